"""The references of the cast to e5m6 and of the way back."""

from ...quant._reference import cast_back_from_e5m6_ref as cast_back_from_e5m6
from ...quant._reference import cast_to_e5m6_ref as cast_to_e5m6

__all__ = ["cast_back_from_e5m6", "cast_to_e5m6"]
