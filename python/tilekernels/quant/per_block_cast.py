"""Casts of a matrix to FP8 or FP4 with one scale for each block of neighbouring tokens and channels."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import ArgumentError, ArgumentTypeError
from ..layout import SfLayout, ceildiv
from ..testing.cases import BenchCase
from . import _checks as checks
from ._formats import FORMATS
from ._reference import Block, QuantTensor, cast_ref
from ._settings import find_block_settings
from ._sf import amax_clamps

CAST = "quant.per_block_cast"
SF_ONLY = "quant.per_block_cast_with_sf_only"
PRECOMPUTED = "quant.per_block_cast_with_precomputed_sf"


def per_block_cast(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
) -> QuantTensor:
    """Quantised data and its scales: value = data * sf, one scale for a block of block_size = (rows, columns).

    x: (T, H) bf16 or fp32, unit column stride, any row stride, H % 64 == 0. fmt: 'e4m3' or 'e2m1' (two values in an
    int8). block_size: 32 or 128 each. Blocks at the lower and the right edge may be partial.
    Returns data (T, H) e4m3 or (T, H / 2) int8, dense, and scales (ceil(T / rows), ceil(H / columns)).

    use_tma_aligned_col_major_sf: scales column after column, each starting on 16 bytes. round_sf: scales are powers of
    two. use_packed_ue8m0: four exponents in an int32, needs round_sf; bytes beyond the last block are undefined.
    out: (data, sf) to write into, either may be None; data dense, sf row-major. Inputs must be finite.
    """
    settings = find_block_settings((CAST, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0))
    data, sf = (None, None) if out is None else checks.given_outputs(out, settings)
    block_rows, block_cols = settings.block_rows, settings.group
    scalars = (amax_clamps[settings.clamp_key], settings.rounded, block_rows, block_cols)
    if data is None or sf is None:
        checks.sizes_of(x, settings)
    try:
        made = _per_block_cast(
            x, settings.asked_data if data is None else data, settings.asked_sf if sf is None else sf, *scalars
        )
    except (ArgumentError, ArgumentTypeError):
        num_tokens, hidden = checks.sizes_of(x, settings)
        checks.check_sf_shape(CAST, "out_sf", sf, ceildiv(num_tokens, block_rows), ceildiv(hidden, settings.sf_span))
        raise
    return checks.with_made(data, sf, made)


def per_block_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scales that `per_block_cast` would return, without the data.

    The arguments are those of `per_block_cast`; out_sf: row-major scales to write into.
    """
    settings = find_block_settings((SF_ONLY, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0))
    block_rows, block_cols = settings.block_rows, settings.group
    scalars = (settings.max_value, amax_clamps[settings.clamp_key], settings.rounded, block_rows, block_cols)
    if out_sf is None:
        checks.sizes_of(x, settings)
    elif settings.sf_alignment or getattr(out_sf, "dtype", None) is not settings.sf_dtype:
        checks.check_out_sf(out_sf, settings)
    try:
        if out_sf is None:
            out_sf = _per_block_cast_with_sf_only(x, settings.asked_sf, *scalars)
        else:
            _per_block_cast_with_sf_only(x, out_sf, *scalars)
    except (ArgumentError, ArgumentTypeError):
        num_tokens, hidden = checks.sizes_of(x, settings)
        rows, columns = ceildiv(num_tokens, block_rows), ceildiv(hidden, settings.sf_span)
        checks.check_sf_shape(SF_ONLY, "out_sf", out_sf, rows, columns)
        raise
    assert out_sf is not None
    return out_sf


def per_block_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    sf: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The data for scales that exist already: each value times 1 / sf, an IEEE division, then converted.

    x, fmt and block_size are those of `per_block_cast`. sf: (ceil(T / rows), ceil(H / columns)) fp32, row-major, any
    row stride; packed and column-major scales are refused. round_sf changes nothing. out: dense data to write into.
    """
    if use_tma_aligned_col_major_sf or use_packed_ue8m0:
        flag = "use_packed_ue8m0" if use_packed_ue8m0 else "use_tma_aligned_col_major_sf"
        raise checks.refused_flag(PRECOMPUTED, flag, "where the scales are given")
    settings = find_block_settings((PRECOMPUTED, fmt, block_size, False, round_sf, False))
    block_rows, block_cols = settings.block_rows, settings.group
    if out is None:
        checks.sizes_of(x, settings)
    elif getattr(out, "dtype", None) is not settings.out_dtype:
        checks.check_out(out, settings)
    try:
        if out is None:
            out = _per_block_cast_with_precomputed_sf(x, sf, settings.asked_data, block_rows, block_cols)
        else:
            _per_block_cast_with_precomputed_sf(x, sf, out, block_rows, block_cols)
    except (ArgumentError, ArgumentTypeError):
        num_tokens, hidden = checks.sizes_of(x, settings)
        checks.check_sf_shape(PRECOMPUTED, "sf", sf, ceildiv(num_tokens, block_rows), ceildiv(hidden, block_cols))
        raise
    assert out is not None
    return out


def per_block_cast_ref(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """`per_block_cast` in plain torch; unused packed bytes and padding rows are zero."""
    result = cast_ref(
        x,
        fmt,
        block_size,
        round_sf=round_sf,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        use_packed_ue8m0=use_packed_ue8m0,
    )
    assert isinstance(result, tuple)
    return result


def per_block_cast_with_sf_only_ref(
    x: torch.Tensor,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """`per_block_cast_with_sf_only` in plain torch."""
    return per_block_cast_ref(x, fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)[1]


def per_block_cast_with_precomputed_sf_ref(
    x: torch.Tensor, fmt: str, block_size: tuple[int, int], sf: torch.Tensor
) -> torch.Tensor:
    """`per_block_cast_with_precomputed_sf` in plain torch."""
    result = cast_ref(x, fmt, block_size, sf=sf)
    assert isinstance(result, torch.Tensor)
    return result


def _per_block_cast_cpu(
    x: torch.Tensor,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    clamp_min: float,
    round_sf: bool,
    block_rows: int,
    block_cols: int,
) -> None:
    # What a GPU would meet as the assumptions of a form
    checks.check_hidden(CAST, x.shape[1], 64)
    data, sf = _cast(x, _name_of_format(out), out_sf, clamp_min, round_sf, (block_rows, block_cols))
    checks.check_sf_shape(CAST, "out_sf", out_sf, *sf.shape)
    out.copy_(data)
    out_sf.copy_(sf)


def _per_block_cast_with_sf_only_cpu(
    x: torch.Tensor,
    out_sf: torch.Tensor,
    max_value: float,
    clamp_min: float,
    round_sf: bool,
    block_rows: int,
    block_cols: int,
) -> None:
    checks.check_hidden(SF_ONLY, x.shape[1], 64)
    fmt = next(format.name for format in FORMATS.values() if format.max_value == max_value)
    sf = _cast(x, fmt, out_sf, clamp_min, round_sf, (block_rows, block_cols))[1]
    checks.check_sf_shape(SF_ONLY, "out_sf", out_sf, *sf.shape)
    out_sf.copy_(sf)


def _per_block_cast_with_precomputed_sf_cpu(
    x: torch.Tensor, sf: torch.Tensor, out: torch.Tensor, block_rows: int, block_cols: int
) -> None:
    checks.check_hidden(PRECOMPUTED, x.shape[1], 64)
    rows, columns = ceildiv(x.shape[0], block_rows), ceildiv(x.shape[1], block_cols)
    checks.check_sf_shape(PRECOMPUTED, "sf", sf, rows, columns)
    out.copy_(per_block_cast_with_precomputed_sf_ref(x, _name_of_format(out), (block_rows, block_cols), sf))


def _cast(
    x: torch.Tensor, fmt: str, out_sf: torch.Tensor, clamp_min: float, round_sf: bool, block: Block
) -> QuantTensor:
    """Data, and scales of the dtype of out_sf, row-major."""
    packed = out_sf.dtype == torch.int32
    result = cast_ref(x, fmt, block, round_sf=round_sf, use_packed_ue8m0=packed, clamp_min=clamp_min)
    assert isinstance(result, tuple)
    return result


def _name_of_format(data: torch.Tensor) -> str:
    return next(format.name for format in FORMATS.values() if format.dtype == data.dtype)


_per_block_cast = kernel(CAST, cpu=_per_block_cast_cpu)
_per_block_cast_with_sf_only = kernel(SF_ONLY, cpu=_per_block_cast_with_sf_only_cpu)
_per_block_cast_with_precomputed_sf = kernel(PRECOMPUTED, cpu=_per_block_cast_with_precomputed_sf_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's settings, round sizes, then the other modes and a small batch."""
    packed = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    rounded = {"round_sf": True}
    cases = []
    for hidden in (4096, 7168):
        cases.append(_case(CAST, 8001, hidden, "bf16", "e4m3", (128, 128), rounded))
        cases.append(_case(CAST, 8001, hidden, "bf16", "e4m3", (128, 128), packed))
        cases.append(_case(CAST, 8001, hidden, "fp32", "e4m3", (128, 128), packed))
        cases.append(_case(CAST, 8001, hidden, "bf16", "e2m1", (32, 32), packed))
        cases.append(_case(CAST, 8001, hidden, "bf16", "e4m3", (32, 32), packed))
    for num_tokens, hidden in ((4096, 4096), (8192, 7168)):
        cases.append(_case(CAST, num_tokens, hidden, "bf16", "e4m3", (128, 128), {}))
        cases.append(_case(CAST, num_tokens, hidden, "bf16", "e2m1", (32, 32), {}))
    for num_tokens in (1, 32, 256):
        cases.append(_case(CAST, num_tokens, 4096, "bf16", "e4m3", (128, 128), packed))
    for num_tokens, hidden in ((128, 4096), (8192, 7168)):
        cases.append(_case(SF_ONLY, num_tokens, hidden, "bf16", "e4m3", (128, 128), packed))
        cases.append(_case(PRECOMPUTED, num_tokens, hidden, "bf16", "e4m3", (128, 128), {}))
    return cases


def _case(
    operator: str, num_tokens: int, hidden: int, input_kind: str, fmt: str, block: Block, flags: dict[str, bool]
) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((num_tokens, hidden), device=device)
        x = x if input_kind == "fp32" else x.bfloat16()
        kwargs: dict[str, Any] = {"x": x, "fmt": fmt, "block_size": block, **flags}
        if operator == PRECOMPUTED:
            kwargs["sf"] = per_block_cast_ref(x, fmt, block)[1]
        return kwargs

    layout = SfLayout.from_flags(operator, **flags)
    bits = {"fp32": 32, "bf16": 16}[input_kind] + (0 if operator == SF_ONLY else FORMATS[fmt].bits)
    num_bytes = num_tokens * hidden * bits // 8
    num_bytes += layout.num_bytes(ceildiv(num_tokens, block[0]), ceildiv(hidden, block[1]))
    params = {"num_tokens": num_tokens, "hidden": hidden, "in": input_kind, "fmt": fmt, "block_size": block}
    return BenchCase(operator, {**params, "sf": layout.label}, make, num_bytes)
