"""The reference of the weighted sums out of the buffer sorted by expert."""

from ...moe.reduce_fused import reduce_fused_ref as reduce_fused

__all__ = ["reduce_fused"]
