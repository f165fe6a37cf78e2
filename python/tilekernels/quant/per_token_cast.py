"""Casts of a matrix to FP8, FP4 or e5m6 with one scale for each group of neighbouring channels of a token."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import ArgumentError, ArgumentTypeError
from ..layout import SfLayout, ceildiv
from ..testing.cases import BenchCase
from . import _checks as checks
from ._checks import CAST, PRECOMPUTED, SF_ONLY
from ._formats import FORMATS
from ._reference import QuantTensor, cast_ref
from ._settings import find_settings
from ._sf import amax_clamps


def per_token_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
) -> QuantTensor:
    """Quantised data and its scales: value = data * sf, one scale for num_per_channels neighbours in a row.

    x: (T, H) bf16 or fp32, unit column stride, any row stride, H % 64 == 0; or a pair (data, sf) with data e4m3 (T, H)
    or packed e2m1 (T, H / 2) and one fp32, packed or e4m3 scale, row or column-major, for each x_block_size = (rows,
    columns); columns are a multiple of 16 or cover the row. A pair is not dequantised first: data * (x_sf * inv).
    fmt: 'e4m3', 'e2m1' (two values in an int8), or 'e5m6' (twelve bits a value in uint8; H % 8 == 0, whole rows).
    num_per_channels: 16, 32, 64 or 128, the last group of a row may be partial; or H, for plain x, one scale for a row.

    use_tma_aligned_col_major_sf: scales column after column, each starting on 16 bytes. round_sf: scales are powers of
    two. use_packed_ue8m0: four exponents in an int32, needs round_sf; bytes beyond the last group are undefined.
    use_e4m3_sf: scales are stored as e4m3, excludes round_sf. stochastic_cast: rounds by bits hashed from the data.
    out: (data, sf) to write into, either may be None; data dense, sf row-major. Inputs must be finite.
    """
    # fmt: off
    settings = find_settings((
        CAST, fmt, num_per_channels,
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf, stochastic_cast,
    ))
    # fmt: on
    data: Any = None
    sf: Any = None
    if out is not None:
        try:  # what given_outputs looks at, where all is well: it takes 0.2 us more to say what is not
            data, sf = out
            is_good = data.dtype is settings.out_dtype and sf.dtype is settings.sf_dtype and not settings.sf_alignment
        except (AttributeError, TypeError, ValueError):
            is_good = False
        if not is_good:
            data, sf = checks.given_outputs(out, settings)
    ask_data, ask_sf = settings.asked_data, settings.asked_sf
    x_sf, x_block_rows, x_block_cols = None, 1, 1
    if isinstance(x, tuple):
        x, x_sf, num_tokens, hidden = checks.sizes_of_pair(x, x_block_size, settings)
        x_block_rows, x_block_cols = x_block_size  # type: ignore[misc]  # sizes_of_pair has refused None
        ask_data = (settings.out_dtype, 0, num_tokens, hidden * settings.bits // 8)
        ask_sf = (settings.sf_dtype, settings.sf_alignment, num_tokens, ceildiv(hidden, settings.sf_span))
    elif x_block_size is not None:
        raise checks.refused_block_size(CAST, x_block_size)
    elif not settings.group:
        checks.sizes_of(x, settings)  # a scale for each row: as many channels as num_per_channels says

    clamp_min = settings.fixed_clamp or amax_clamps[settings.clamp_key]
    try:
        # fmt: off
        made = _per_token_cast(
            x, x_sf, ask_data if data is None else data, ask_sf if sf is None else sf,
            x_block_rows, x_block_cols, clamp_min, settings.rounded, settings.group, settings.stochastic,
        )
        # fmt: on
    except (ArgumentError, ArgumentTypeError):
        if x_sf is None:
            num_tokens, hidden = checks.sizes_of(x, settings)
        checks.check_sf_shape(CAST, "out_sf", sf, num_tokens, ceildiv(hidden, settings.sf_span))
        raise
    return made if out is None else checks.with_made(data, sf, made)


def per_token_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out_sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scales that `per_token_cast` would return, without the data.

    x: (T, H) bf16 or fp32, unit column stride, H % 64 == 0. fmt: 'e4m3' or 'e2m1'. num_per_channels: 16, 32, 64 or 128.
    The flags and out_sf are those of `per_token_cast`.
    """
    # fmt: off
    settings = find_settings((
        SF_ONLY, fmt, num_per_channels,
        use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf, False,
    ))
    # fmt: on
    scalars = (settings.max_value, amax_clamps[settings.clamp_key], settings.rounded, settings.group)
    if out_sf is not None and (settings.sf_alignment or getattr(out_sf, "dtype", None) is not settings.sf_dtype):
        checks.check_out_sf(out_sf, settings)
    try:
        if out_sf is None:
            return _per_token_cast_with_sf_only(x, settings.asked_sf, *scalars)
        _per_token_cast_with_sf_only(x, out_sf, *scalars)
    except (ArgumentError, ArgumentTypeError):
        num_tokens, hidden = checks.sizes_of(x, settings)
        checks.check_sf_shape(SF_ONLY, "out_sf", out_sf, num_tokens, ceildiv(hidden, settings.sf_span))
        raise
    return out_sf


def per_token_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The data for scales that exist already: each value times 1 / sf, an IEEE division, then converted.

    x: (T, H) bf16 or fp32, unit column stride, H % 64 == 0. fmt: 'e4m3' or 'e2m1'. num_per_channels: 16, 32, 64 or 128.
    sf: (T, ceil(H / num_per_channels)) row-major, any row stride, fp32 or with use_e4m3_sf float8_e4m3fn; packed and
    column-major scales are refused. round_sf changes nothing. out: dense data to write into.
    """
    if use_tma_aligned_col_major_sf or use_packed_ue8m0:
        flag = "use_packed_ue8m0" if use_packed_ue8m0 else "use_tma_aligned_col_major_sf"
        raise checks.refused_flag(PRECOMPUTED, flag, "where the scales are given")
    settings = find_settings((PRECOMPUTED, fmt, num_per_channels, False, round_sf, False, use_e4m3_sf, False))
    if out is not None and getattr(out, "dtype", None) is not settings.out_dtype:
        checks.check_out(out, settings)
    if getattr(sf, "dtype", None) is not settings.sf_dtype:
        checks.check_given_sf(sf, settings)
    try:
        if out is None:
            return _per_token_cast_with_precomputed_sf(x, sf, settings.asked_data, settings.group)
        _per_token_cast_with_precomputed_sf(x, sf, out, settings.group)
    except (ArgumentError, ArgumentTypeError):
        num_tokens, hidden = checks.sizes_of(x, settings)
        checks.check_sf_shape(PRECOMPUTED, "sf", sf, num_tokens, ceildiv(hidden, settings.sf_span))
        raise
    return out


def per_token_cast_ref(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
) -> QuantTensor:
    """`per_token_cast` in plain torch; unused packed bytes and padding rows are zero."""
    result = cast_ref(
        x,
        fmt,
        (1, num_per_channels),
        x_block_size=x_block_size,
        round_sf=round_sf,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        use_packed_ue8m0=use_packed_ue8m0,
        use_e4m3_sf=use_e4m3_sf,
        stochastic_cast=stochastic_cast,
    )
    assert isinstance(result, tuple)
    return result


def per_token_cast_with_sf_only_ref(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
) -> torch.Tensor:
    """`per_token_cast_with_sf_only` in plain torch."""
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    return per_token_cast_ref(x, fmt, num_per_channels, None, *flags)[1]


def per_token_cast_with_precomputed_sf_ref(
    x: torch.Tensor, fmt: str, num_per_channels: int, sf: torch.Tensor
) -> torch.Tensor:
    """`per_token_cast_with_precomputed_sf` in plain torch."""
    result = cast_ref(x, fmt, (1, num_per_channels), sf=sf)
    assert isinstance(result, torch.Tensor)
    return result


def _per_token_cast_cpu(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    x_block_rows: int,
    x_block_cols: int,
    clamp_min: float,
    round_sf: bool,
    num_per_channels: int,
    stochastic: bool,
) -> None:
    # What a GPU would meet as the assumptions of a form
    fmt = _name_of_format(out)
    hidden = x.shape[1] * (2 if x.dtype == torch.int8 else 1)
    checks.check_hidden(CAST, hidden, checks.multiple_of_channels(FORMATS[fmt]))
    result = cast_ref(
        x if x_sf is None else (x, x_sf),
        fmt,
        (1, num_per_channels or hidden),
        x_block_size=(x_block_rows, x_block_cols),
        round_sf=round_sf,
        use_packed_ue8m0=out_sf.dtype == torch.int32,
        use_e4m3_sf=out_sf.dtype == torch.float8_e4m3fn,
        stochastic_cast=stochastic,
        clamp_min=clamp_min,
    )
    checks.check_sf_shape(CAST, "out_sf", out_sf, *result[1].shape)
    out.copy_(result[0])
    out_sf.copy_(result[1])


def _per_token_cast_with_sf_only_cpu(
    x: torch.Tensor, out_sf: torch.Tensor, max_value: float, clamp_min: float, round_sf: bool, num_per_channels: int
) -> None:
    result = cast_ref(
        x,
        next(format.name for format in FORMATS.values() if format.max_value == max_value),
        (1, num_per_channels),
        round_sf=round_sf,
        use_packed_ue8m0=out_sf.dtype == torch.int32,
        use_e4m3_sf=out_sf.dtype == torch.float8_e4m3fn,
        clamp_min=clamp_min,
    )
    out_sf.copy_(result[1])


def _per_token_cast_with_precomputed_sf_cpu(
    x: torch.Tensor, sf: torch.Tensor, out: torch.Tensor, num_per_channels: int
) -> None:
    out.copy_(per_token_cast_with_precomputed_sf_ref(x, _name_of_format(out), num_per_channels, sf))


def _name_of_format(data: torch.Tensor) -> str:
    return next(format.name for format in FORMATS.values() if format.dtype == data.dtype)


_per_token_cast = kernel(CAST, cpu=_per_token_cast_cpu)
_per_token_cast_with_sf_only = kernel(SF_ONLY, cpu=_per_token_cast_with_sf_only_cpu)
_per_token_cast_with_precomputed_sf = kernel(PRECOMPUTED, cpu=_per_token_cast_with_precomputed_sf_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's settings (packed column-major scales), then the other modes at one size."""
    packed = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    cases = []
    for hidden in (4096, 7168):
        for fmt, dtype, group in (
            ("e4m3", "bf16", 32),
            ("e4m3", "fp32", 128),
            ("e2m1", "bf16", 32),
            ("e4m3", "bf16", hidden),
            ("e5m6", "bf16", hidden),
        ):
            cases.append(_case(CAST, 8001, hidden, dtype, fmt, group, packed))
        cases.append(_case(CAST, 8001, hidden, "e4m3", "e4m3", 128, packed, x_block_size=(128, 128)))
        cases.append(_case(CAST, 8001, hidden, "e2m1", "e4m3", 32, packed, x_block_size=(32, 32)))
    cases.append(_case(CAST, 8001, 7168, "e4m3", "e2m1", 32, packed, x_block_size=(128, 128)))
    cases.append(_case(CAST, 8001, 7168, "bf16", "e4m3", 128, {}))
    cases.append(_case(CAST, 8001, 7168, "bf16", "e2m1", 16, {"use_e4m3_sf": True}))
    cases.append(_case(CAST, 8001, 7168, "bf16", "e4m3", 128, {**packed, "stochastic_cast": True}))
    cases.append(_case(CAST, 8, 2048, "e2m1", "e4m3", 32, {}, x_block_size=(32, 32)))
    cases.append(_case(CAST, 8, 4096, "bf16", "e5m6", 4096, packed))
    for num_tokens, hidden in ((8, 4096), (8001, 4096), (8001, 7168)):
        cases.append(_case(CAST, num_tokens, hidden, "bf16", "e4m3", 128, packed))
        cases.append(_case(SF_ONLY, num_tokens, hidden, "bf16", "e4m3", 128, packed))
        cases.append(_case(PRECOMPUTED, num_tokens, hidden, "bf16", "e4m3", 128, {}))
    return cases


def _case(
    operator: str,
    num_tokens: int,
    hidden: int,
    input_kind: str,
    fmt: str,
    group: int,
    options: dict[str, bool],
    x_block_size: tuple[int, int] | None = None,
) -> BenchCase:
    flags = {name: value for name, value in options.items() if name != "stochastic_cast"}

    def make(device: Any) -> dict[str, Any]:
        plain = torch.randn((num_tokens, hidden), device=device)
        x: torch.Tensor | QuantTensor = plain if input_kind == "fp32" else plain.bfloat16()
        if x_block_size is not None:
            x = cast_ref(plain, input_kind, x_block_size, **flags)  # type: ignore[arg-type]
        kwargs: dict[str, Any] = {"x": x, "fmt": fmt, "num_per_channels": group, **options}
        if operator == CAST:
            kwargs["x_block_size"] = x_block_size
        if operator == PRECOMPUTED:
            kwargs["sf"] = per_token_cast_ref(plain.bfloat16(), fmt, group)[1]
        return kwargs

    layout = SfLayout.from_flags(operator, **flags)
    bits_in = {"fp32": 32, "bf16": 16, "e4m3": 8, "e2m1": 4}[input_kind]
    bits_out = 0 if operator == SF_ONLY else FORMATS[fmt].bits
    num_bytes = num_tokens * hidden * (bits_in + bits_out) // 8 + layout.num_bytes(num_tokens, ceildiv(hidden, group))
    if x_block_size is not None:
        num_bytes += layout.num_bytes(ceildiv(num_tokens, x_block_size[0]), ceildiv(hidden, x_block_size[1]))
    params = {"num_tokens": num_tokens, "hidden": hidden, "in": input_kind, "fmt": fmt, "num_per_channels": group}
    params |= {"x_block_size": x_block_size} if x_block_size is not None else {}
    params |= {"sf": layout.label} | ({"stochastic": True} if "stochastic_cast" in options else {})
    return BenchCase(operator, params, make, num_bytes)
