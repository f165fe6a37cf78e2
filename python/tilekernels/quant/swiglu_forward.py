"""SwiGLU of rows of gates and values, weighted by row: as bf16 or fp32, or cast to FP8 with block scales."""

from __future__ import annotations

from typing import Any

import torch

from .. import config
from .._dispatch import kernel
from .._outputs import requests_of, size_of
from ..errors import argument_error
from ..layout import SfLayout, ceildiv
from ..testing.cases import BenchCase
from ._reference import QuantTensor, cast_ref
from ._sf import amax_clamps, asked_sf
from ._swiglu import (
    Routing,
    check_limit,
    count_clamped,
    halves_of,
    num_parts,
    refuse_fmt,
    routing_by_segments,
    row_weights,
    rows_of_experts,
    swiglu,
)

_NAME = "quant.swiglu_forward"
_NAME_WITH_CAST = "quant.swiglu_forward_and_per_token_cast"

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_OUT_OF = requests_of(size_of(0, 0), size_of(0, 1, 1, 2))
_DATA = _OUT_OF[torch.float8_e4m3fn]
_GROUPS = (32, 128)
_NUM_COUNTS = 4


def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> QuantTensor:
    """`swiglu_forward`, cast to FP8 as `per_token_cast` does it, without rounding in between.

    fmt: 'e4m3'. num_per_channels: 32, or 128 where hidden is a multiple of it. The three flags are those of
    `per_token_cast`, all else is as in `swiglu_forward`. Returns (data, sf): (T, H) and one scale for num_per_channels
    neighbours; both stay uninitialised in rows of no expert.
    """
    layout = SfLayout.from_flags(_NAME_WITH_CAST, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if fmt != "e4m3":
        raise refuse_fmt(_NAME_WITH_CAST, fmt, "'e4m3'")
    if num_per_channels not in _GROUPS:
        raise argument_error(_NAME_WITH_CAST, "num_per_channels", "be 32 or 128", num_per_channels)
    check_limit(_NAME_WITH_CAST, "clamp_value", clamp_value, clamped_count, _NUM_COUNTS)
    num_tokens, _ = halves_of(_NAME_WITH_CAST, x, max(num_per_channels, 64))
    routing = routing_by_segments(
        _NAME_WITH_CAST, num_tokens, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor
    )
    return cast_forward(x, num_per_channels, layout, routing, clamp_value, clamped_count, amax_clamps["e4m3", False])


def cast_forward(
    x: torch.Tensor,
    num_per_channels: int,
    layout: SfLayout,
    routing: Routing,
    clamp_value: float | None,
    clamped_count: torch.Tensor | None,
    clamp_min: float,
) -> QuantTensor:
    """Runs the kernel with either generation's routing; what the kernel cannot check has been checked.

    num_per_channels: 32, 128, or 0 for one scale a row.
    """
    num_tokens, hidden = x.shape[0], x.shape[1] // 2
    scalars = (
        *_scalars(routing, clamp_value),
        clamp_min,
        layout.rounded,
        num_per_channels,
        num_parts(num_tokens, hidden) if num_per_channels else 1,
    )
    sf = asked_sf(layout, 2 * num_per_channels)
    return _swiglu_forward_and_per_token_cast(x, *routing.tensors(), _DATA, sf, clamped_count, *scalars)


def swiglu_forward(
    x: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """gate / (1 + exp(-gate)) * value * weight in fp32, each operation rounded; then rounded to fmt.

    x: (T, 2 H) bf16 or fp32, unit column stride, H % 64 == 0: the gates of a row, then its values. fmt: 'bf16' or
    'fp32'. psum_num_tokens_per_expert: (E,) int32, where the rows of each expert end; they start where the previous
    expert's end, rounded up to a multiple of `config.get_token_alignment()`. Rows in between and behind are neither
    read nor written: the result is uninitialised there. None: all rows. topk_weights: (T,) fp32, multiplied by
    routed_scaling_factor first if that is given; None: no weights.

    clamp_value: gates are clamped from above, values to both sides; NaN stays. clamped_count: int64 (4,), to which are
    added the numbers of gates above clamp_value, values above it, values below its negative, and of channels, of rows
    that belong to an expert. Returns (T, H).
    """
    if fmt not in _DTYPES:
        raise refuse_fmt(_NAME, fmt, "'bf16' or 'fp32'")
    check_limit(_NAME, "clamp_value", clamp_value, clamped_count, _NUM_COUNTS)
    num_tokens, hidden = halves_of(_NAME, x, 64)
    routing = routing_by_segments(_NAME, num_tokens, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor)
    scalars = (*_scalars(routing, clamp_value), num_parts(num_tokens, hidden))
    return _swiglu_forward(x, *routing.tensors(), _OUT_OF[_DTYPES[fmt]], clamped_count, *scalars)


def swiglu_forward_and_per_token_cast_ref(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> QuantTensor:
    """`swiglu_forward_and_per_token_cast` in plain torch; rows of no expert are computed too, but not counted."""
    arguments = (psum_num_tokens_per_expert, topk_weights, routed_scaling_factor, clamp_value, clamped_count)
    values = swiglu_forward_ref(x, "fp32", *arguments)
    result = cast_ref(
        values,
        fmt,
        (1, num_per_channels),
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        round_sf=round_sf,
        use_packed_ue8m0=use_packed_ue8m0,
    )
    assert isinstance(result, tuple)
    return result


def swiglu_forward_ref(
    x: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """`swiglu_forward` in plain torch; rows of no expert are computed too, but not counted."""
    scaling = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    routing = Routing(psum_num_tokens_per_expert, topk_weights, scaling)
    if clamped_count is not None and clamp_value is not None:
        valid = rows_of_experts(routing, x.shape[0], config.get_token_alignment())
        clamped_count += count_clamped(x, clamp_value, valid)
    return swiglu(x, clamp_value, row_weights(routing, x.shape[0])).to(_DTYPES[fmt])


def _scalars(routing: Routing, clamp_value: float | None) -> tuple[int, float, bool, float]:
    has_clamp = clamp_value is not None
    return config.get_token_alignment(), routing.scaling, has_clamp, float(clamp_value or 0.0)


def _run_on_cpu(
    x: torch.Tensor,
    routing: Routing,
    clamped_count: torch.Tensor | None,
    alignment: int,
    clamp_value: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values in fp32, rows that are processed); counts."""
    valid = rows_of_experts(routing, x.shape[0], alignment)
    if clamped_count is not None and clamp_value is not None:
        clamped_count += count_clamped(x, clamp_value, valid)[: clamped_count.numel()]
    values = swiglu(x, clamp_value, row_weights(routing, x.shape[0]))
    return values, torch.ones(x.shape[0], dtype=torch.bool) if valid is None else valid


def _swiglu_forward_and_per_token_cast_cpu(
    x: torch.Tensor,
    psum: torch.Tensor | None,
    pos_to_expert: torch.Tensor | None,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    clamped_count: torch.Tensor | None,
    alignment: int,
    routed_scaling_factor: float,
    has_clamp: bool,
    clamp_value: float,
    clamp_min: float,
    round_sf: bool,
    num_per_channels: int,
    num_parts: int,
) -> None:
    routing = Routing(psum, topk_weights, routed_scaling_factor, pos_to_expert, pos_to_token_topk)
    values, valid = _run_on_cpu(x, routing, clamped_count, alignment, clamp_value if has_clamp else None)
    result = cast_ref(
        values,
        "e4m3",
        (1, num_per_channels or values.shape[1]),
        round_sf=round_sf,
        use_packed_ue8m0=out_sf.dtype == torch.int32,
        clamp_min=clamp_min,
    )
    # As bytes: FP8 has no torch.where
    out.view(torch.uint8).copy_(torch.where(valid[:, None], result[0].view(torch.uint8), out.view(torch.uint8)))
    out_sf.copy_(torch.where(valid[:, None], result[1], out_sf))


def _swiglu_forward_cpu(
    x: torch.Tensor,
    psum: torch.Tensor | None,
    pos_to_expert: torch.Tensor | None,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    out: torch.Tensor,
    clamped_count: torch.Tensor | None,
    alignment: int,
    routed_scaling_factor: float,
    has_clamp: bool,
    clamp_value: float,
    num_parts: int,
) -> None:
    routing = Routing(psum, topk_weights, routed_scaling_factor, pos_to_expert, pos_to_token_topk)
    values, valid = _run_on_cpu(x, routing, clamped_count, alignment, clamp_value if has_clamp else None)
    out.copy_(torch.where(valid[:, None], values.to(out.dtype), out))


_swiglu_forward_and_per_token_cast = kernel(_NAME_WITH_CAST, cpu=_swiglu_forward_and_per_token_cast_cpu)
_swiglu_forward = kernel(_NAME, cpu=_swiglu_forward_cpu)


def bench_cases() -> list[BenchCase]:
    """Few tokens, then the published benchmark's sizes and those of larger models."""
    packed = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    cases = [_case(8, 2048, "bf16", "e4m3", 128, packed), _case(8, 2048, "bf16", "bf16", 0, {})]
    for hidden in (2048, 3584, 4096, 7168):
        cases.append(_case(21760, hidden, "bf16", "e4m3", 128, packed))
        cases.append(_case(21760, hidden, "bf16", "e4m3", 128, {**packed, "clamp_value": 0.5}))
        cases.append(_case(21760, hidden, "bf16", "e4m3", 128, {**packed, "clamp_value": 0.5}, is_counted=True))
    cases += [_case(8192, hidden, "bf16", "e4m3", 128, packed) for hidden in (2048, 3584)]
    cases.append(_case(21760, 2048, "bf16", "e4m3", 32, {}, num_experts=32))
    cases.append(_case(21760, 2048, "fp32", "e4m3", 128, {}, num_experts=32))
    for kind, fmt in (("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp32")):
        cases.append(_case(8064, 4096, kind, fmt, 0, {}, num_experts=32))
    for num_tokens in (1, 32, 256):
        cases.append(_case(num_tokens, 2048, "bf16", "e4m3", 128, packed, num_experts=32))
    return cases


def _case(
    num_tokens: int,
    hidden: int,
    kind: str,
    fmt: str,
    group: int,
    options: dict[str, Any],
    num_experts: int = 0,
    is_counted: bool = False,
) -> BenchCase:
    """num_experts > 0: with weights, and segments that leave no row out."""
    name = _NAME_WITH_CAST if group else _NAME

    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((num_tokens, 2 * hidden), device=device).to(_DTYPES[kind])
        kwargs: dict[str, Any] = {"x": x, "fmt": fmt, **({"num_per_channels": group} if group else {}), **options}
        if is_counted:
            kwargs["clamped_count"] = torch.zeros(_NUM_COUNTS, dtype=torch.int64, device=device)
        if num_experts:
            step = config.get_token_alignment()
            ends = torch.arange(1, num_experts + 1, device=device, dtype=torch.int32) * (
                ceildiv(num_tokens, num_experts * step) * step
            )
            kwargs["psum_num_tokens_per_expert"] = ends.clamp(max=num_tokens)
            kwargs["topk_weights"] = torch.rand(num_tokens, device=device)
        return kwargs

    flags = {flag: value for flag, value in options.items() if flag != "clamp_value"}
    layout = SfLayout.from_flags(name, **flags)
    out_bytes = {"e4m3": 1, "bf16": 2, "fp32": 4}
    num_bytes = num_tokens * hidden * (2 * out_bytes[kind] + out_bytes[fmt])
    num_bytes += layout.num_bytes(num_tokens, hidden // group) if group else 0
    num_bytes += 4 * (num_tokens + num_experts) if num_experts else 0
    params = {"num_tokens": num_tokens, "hidden": hidden, "in": kind, "out": fmt}
    params |= {"num_per_channels": group, "sf": layout.label} if group else {}
    params |= {"clamp_value": options["clamp_value"]} if "clamp_value" in options else {}
    params |= {"num_experts": num_experts} if num_experts else {}
    params |= {"counted": True} if is_counted else {}
    return BenchCase(name, params, make, num_bytes)
