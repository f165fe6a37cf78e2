"""What quantisation would leave of a matrix: a per-token cast and the way back in one step, in place."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error
from ..testing.cases import BenchCase
from . import _checks as checks
from ._reference import cast_back_ref, cast_ref
from ._settings import find_settings
from ._sf import amax_clamps

FAKE_CAST = "quant.per_token_cast_and_cast_back"


def per_token_cast_and_cast_back(
    x: torch.Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> None:
    """Replace x by what `per_token_cast` and `cast_back` to its own dtype would make of it.

    x: (T, H) bf16 or fp32, unit column stride, any row stride, H % 64 == 0; changed in place. fmt: 'e4m3' or 'e2m1'.
    num_per_channels: 16, 32, 64 or 128, a divisor of H. round_sf: scales are powers of two. use_e4m3_sf: scales are
    rounded to e4m3, excludes round_sf. Inputs must be finite.
    """
    settings = find_settings((FAKE_CAST, fmt, num_per_channels, False, round_sf, False, use_e4m3_sf, False))
    _, hidden = checks.sizes_of(x, settings)
    if hidden % settings.group:
        raise argument_error(FAKE_CAST, "num_per_channels", f"divide the {hidden} channels of x", num_per_channels)
    clamp_min = amax_clamps[settings.clamp_key]
    _kernel(x, clamp_min, settings.rounded, settings.clamp_key[1], settings.group, settings.fmt)


def per_token_cast_and_cast_back_ref(
    x: torch.Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> None:
    """`per_token_cast_and_cast_back` in plain torch, also in place."""
    x.copy_(_cast_and_back(x, fmt, num_per_channels, round_sf, use_e4m3_sf, None))


def _cast_and_back(
    x: torch.Tensor, fmt: str, num_per_channels: int, round_sf: bool, use_e4m3_sf: bool, clamp_min: float | None
) -> torch.Tensor:
    block = (1, num_per_channels)
    pair = cast_ref(x, fmt, block, round_sf=round_sf, use_e4m3_sf=use_e4m3_sf, clamp_min=clamp_min)
    assert isinstance(pair, tuple)
    return cast_back_ref(pair, "fp32" if x.dtype == torch.float32 else "bf16", block)


def _per_token_cast_and_cast_back_cpu(
    x: torch.Tensor, clamp_min: float, round_sf: bool, use_e4m3_sf: bool, num_per_channels: int, fmt: str
) -> None:
    x.copy_(_cast_and_back(x, fmt, num_per_channels, round_sf, use_e4m3_sf, clamp_min))


_kernel = kernel(FAKE_CAST, cpu=_per_token_cast_and_cast_back_cpu)


def bench_cases() -> list[BenchCase]:
    """Large matrices of both dtypes and formats, and small batches."""
    cases = [_case(8192, 7168, dtype, fmt, 128) for dtype in ("bf16", "fp32") for fmt in ("e4m3", "e2m1")]
    cases.append(_case(8192, 7168, "bf16", "e2m1", 16, {"use_e4m3_sf": True}))
    cases.append(_case(8192, 7168, "bf16", "e4m3", 32, {"round_sf": True}))
    return [*cases, _case(8, 4096, "bf16", "e4m3", 128), _case(128, 4096, "bf16", "e4m3", 128)]


def _case(
    num_tokens: int, hidden: int, kind: str, fmt: str, group: int, flags: dict[str, bool] | None = None
) -> BenchCase:
    flags = flags or {}

    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((num_tokens, hidden), device=device)
        return {"x": x if kind == "fp32" else x.bfloat16(), "fmt": fmt, "num_per_channels": group, **flags}

    params = {"num_tokens": num_tokens, "hidden": hidden, "in": kind, "fmt": fmt, "num_per_channels": group}
    return BenchCase(FAKE_CAST, {**params, **flags}, make, 2 * num_tokens * hidden * (4 if kind == "fp32" else 2))
