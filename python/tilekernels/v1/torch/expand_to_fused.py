"""The references of the copies into the buffer sorted by expert."""

from ...moe.expand_to_fused import expand_to_fused_ref as expand_to_fused
from ...moe.expand_to_fused import expand_to_fused_with_sf_ref as expand_to_fused_with_sf

__all__ = ["expand_to_fused", "expand_to_fused_with_sf"]
