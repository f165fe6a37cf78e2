"""A fused multiply-add in plain torch, exact to the last bit: what references need to equal a GPU's."""

from __future__ import annotations

import torch


def fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x * y + z of fp32 tensors, rounded once to nearest even.

    The product is exact in float64. Their sum is not, and rounding it twice could go the wrong way at a tie: so its
    error is found, and the sum rounded to odd, which keeps fp32's rounding right.
    """
    product = x.double() * y.double()
    addend = z.double()
    total = product + addend
    # What the addition lost (Knuth's two-sum)
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    inexact = (error != 0) & total.isfinite() & error.isfinite() & (bits & 1 == 0)
    # Towards the error: away from zero where both have one sign
    step = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact, bits + step, bits).view(torch.float64).float()
