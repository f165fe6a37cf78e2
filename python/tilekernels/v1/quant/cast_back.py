"""The way back from e5m6, which has a function of its own."""

from __future__ import annotations

import torch

from ... import quant as _quant
from ...quant import QuantTensor
from .._asserting import asserting


@asserting
def cast_back_e5m6(x: QuantTensor, fmt: str, x_block_size: tuple[int, int]) -> torch.Tensor:
    """`tilekernels.quant.cast_back` of twelve-bit data."""
    return _quant.cast_back(x, fmt, x_block_size, "e5m6")
