"""The cast of a matrix to e4m3 with one scale for each channel of neighbouring tokens, transposed."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..testing.cases import BenchCase
from . import _channels as channels
from ._channels import TRANSPOSE
from ._reference import QuantTensor, cast_ref
from ._sf import amax_clamps

_DATA, _SF = (torch.float8_e4m3fn, 0, size_of(0, 1), size_of(0, 0)), channels.asked_sf()


def per_channel_cast_and_transpose(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> QuantTensor:
    """The transpose of what `per_channel_cast` gives, and the scales as they are: x[t, h] = data[h, t] * sf[t // n, h].

    x: (T, H) bf16, unit column stride, any row stride, T % 128 == 0, H % 64 == 0. fmt: 'e4m3'. num_per_tokens = n: 32
    or 128. round_sf: scales are powers of two. Returns data (H, T) e4m3 and sf (T / n, H) fp32. Inputs must be finite.
    """
    channels.check_options(TRANSPOSE, fmt, num_per_tokens, round_sf)
    num_tokens, _ = channels.sizes_of(TRANSPOSE, x, (torch.bfloat16,))
    channels.check_tokens(TRANSPOSE, num_tokens)
    clamp_min = amax_clamps["e4m3", False]
    return _per_channel_cast_and_transpose(x, _DATA, _SF[num_per_tokens], num_per_tokens, clamp_min, round_sf)


def per_channel_cast_and_transpose_ref(
    x: torch.Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> QuantTensor:
    """`per_channel_cast_and_transpose` in plain torch."""
    result = cast_ref(x, fmt, (num_per_tokens, 1), round_sf=round_sf)
    assert isinstance(result, tuple)
    return result[0].t().contiguous(), result[1]


def _per_channel_cast_and_transpose_cpu(
    x: torch.Tensor, out: torch.Tensor, out_sf: torch.Tensor, num_per_tokens: int, clamp_min: float, round_sf: bool
) -> None:
    data, sf = cast_ref(x, "e4m3", (num_per_tokens, 1), round_sf=round_sf, clamp_min=clamp_min)
    out.copy_(data.t())
    out_sf.copy_(sf)


_per_channel_cast_and_transpose = kernel(TRANSPOSE, cpu=_per_channel_cast_and_transpose_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's sizes, and small calls."""
    sizes = ((128, 4096), (4096, 4096), (8064, 4096), (8064, 7168), (8192, 7168))
    return [_case(*size, num_per_tokens) for size in sizes for num_per_tokens in (32, 128)]


def _case(num_tokens: int, hidden: int, num_per_tokens: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((num_tokens, hidden), device=device).bfloat16()
        return {"x": x, "fmt": "e4m3", "num_per_tokens": num_per_tokens, "round_sf": True}

    num_bytes = 3 * num_tokens * hidden + num_tokens // num_per_tokens * hidden * 4
    params = {"num_tokens": num_tokens, "hidden": hidden, "num_per_tokens": num_per_tokens}
    return BenchCase(TRANSPOSE, params, make, num_bytes)
