"""SwiGLU, cast to e4m3 with one scale for each channel of neighbouring tokens, transposed or not."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..testing.cases import BenchCase
from . import _channels as channels
from ._channels import SWIGLU
from ._reference import QuantTensor, cast_ref
from ._sf import amax_clamps
from ._swiglu import swiglu

_NUM_TOKENS, _HIDDEN = size_of(0, 0), size_of(0, 1, 1, 2)
_DATA = (torch.float8_e4m3fn, 0, _NUM_TOKENS, _HIDDEN)
_TRANSPOSED_DATA = (torch.float8_e4m3fn, 0, _HIDDEN, _NUM_TOKENS)
_SF = channels.asked_sf(width=2)


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: torch.Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
) -> QuantTensor:
    """`per_channel_cast_and_transpose` of gate / (1 + exp(-gate)) * value, computed in fp32 and rounded to bf16.

    x: (T, 2 H) bf16, unit column stride, any row stride, T % 128 == 0, H % 64 == 0; the first half of a row are the
    gates, the second the values. fmt: 'e4m3'. num_per_tokens = n: 32 or 128. round_sf: scales are powers of two.
    swiglu_clamp_value: gates are clamped from above before, values to both sides. Returns data (H, T) e4m3, or (T, H)
    with without_transpose, and sf (T / n, H) fp32. Inputs must be finite.
    """
    channels.check_options(SWIGLU, fmt, num_per_tokens, round_sf)
    channels.check_bool(SWIGLU, "without_transpose", without_transpose)
    clamp_value = channels.clamp_of(SWIGLU, swiglu_clamp_value)
    num_tokens, _ = channels.sizes_of(SWIGLU, x, (torch.bfloat16,), multiple=128)
    channels.check_tokens(SWIGLU, num_tokens)
    asked = (_DATA if without_transpose else _TRANSPOSED_DATA, _SF[num_per_tokens])
    clamp_min = amax_clamps["e4m3", False]
    return _swiglu(x, *asked, num_per_tokens, clamp_min, round_sf, clamp_value, without_transpose)


def swiglu_forward_and_per_channel_cast_and_transpose_ref(
    x: torch.Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
) -> QuantTensor:
    """`swiglu_forward_and_per_channel_cast_and_transpose` in plain torch."""
    values = swiglu(x, swiglu_clamp_value, None).bfloat16()
    data, sf = cast_ref(values, fmt, (num_per_tokens, 1), round_sf=round_sf)
    return data if without_transpose else data.t().contiguous(), sf


def _swiglu_cpu(
    x: torch.Tensor,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    num_per_tokens: int,
    clamp_min: float,
    round_sf: bool,
    swiglu_clamp_value: float,
    without_transpose: bool,
) -> None:
    values = swiglu(x, swiglu_clamp_value, None).bfloat16()
    data, sf = cast_ref(values, "e4m3", (num_per_tokens, 1), round_sf=round_sf, clamp_min=clamp_min)
    out.copy_(data if without_transpose else data.t())
    out_sf.copy_(sf)


_swiglu = kernel(SWIGLU, cpu=_swiglu_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's sizes and others, and small calls."""
    sizes = ((128, 2048), (4096, 4096), (8192, 2048), (8192, 3584), (8064, 4096), (8064, 7168))
    cases = [_case(*size, 128, transposed, None) for size in sizes for transposed in (True, False)]
    for hidden in (4096, 7168):
        cases += [_case(8064, hidden, 32, transposed, clamp) for transposed in (True, False) for clamp in (None, 0.5)]
    return cases


def _case(num_tokens: int, hidden: int, num_per_tokens: int, transposed: bool, clamp: float | None) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        kwargs = {"x": torch.randn((num_tokens, 2 * hidden), device=device).bfloat16(), "fmt": "e4m3"}
        options = {"num_per_tokens": num_per_tokens, "round_sf": True, "without_transpose": not transposed}
        return {**kwargs, **options, "swiglu_clamp_value": clamp}

    num_bytes = 5 * num_tokens * hidden + num_tokens // num_per_tokens * hidden * 4
    params = {"num_tokens": num_tokens, "hidden": hidden, "num_per_tokens": num_per_tokens}
    return BenchCase(SWIGLU, {**params, "transposed": transposed, "clamp": clamp}, make, num_bytes)
