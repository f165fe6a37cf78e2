"""The reference of every cast to FP8 and FP4 and of the way back."""

from ...quant._reference import cast_back_ref as cast_back
from ...quant._reference import cast_ref as cast

__all__ = ["cast", "cast_back"]
