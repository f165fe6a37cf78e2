"""Gradients of SwiGLU for rows of gates and values, as bf16 or fp32, or in bf16 and cast to FP8 at the same time."""

from __future__ import annotations

import math
from typing import Any

import torch

from .. import config
from .._dispatch import kernel
from .._outputs import requests_of, size_of, with_made
from ..errors import argument_error, argument_type_error
from ..layout import SfLayout
from ..moe._fma import fma
from ..testing.cases import BenchCase
from ._reference import QuantTensor, cast_ref
from ._sf import amax_clamps, asked_sf
from ._swiglu import (
    Routing,
    check_limit,
    halves_of,
    refuse_fmt,
    routing_by_segments,
    row_weights,
    rows_of_padding,
)

_NAME = "quant.swiglu_backward"
_NAME_WITH_CAST = "quant.swiglu_backward_and_per_token_cast"

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_GROUPS = (32, 128)

# Outputs as the extension is asked for them, by argument 0, the rows of gates and values
_WEIGHT_GRAD = (torch.float32, 0, size_of(0, 0))
_X_GRAD_OF = requests_of(size_of(0, 0), size_of(0, 1))
_ACT_OF = requests_of(size_of(0, 0), size_of(0, 1, 1, 2))


def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    act_x_grad: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[Any, ...]:
    """`swiglu_backward` for a quantised input, with the gradients of gates and values in bf16 and in FP8.

    x: (data, sf), e4m3 (T, 2 H) and fp32 (T, 2 H / num_per_channels), dense. act_x_grad: (T, H) bf16 or fp32. fmt:
    'e4m3'. num_per_channels: 32, or 128 where H is a multiple of it, for input and output. The three flags are those of
    `per_token_cast`; all else is as in `swiglu_backward`. Returns (x_grad, (data, sf)), then weight_grad if there are
    weights, then act_out if do_recompute; x_grad and act_out in bf16. The cast takes the fp32 gradients, those of gates
    and of values by themselves, and gives rows of padding scales of zero.
    """
    layout = SfLayout.from_flags(_NAME_WITH_CAST, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if fmt != "e4m3":
        raise refuse_fmt(_NAME_WITH_CAST, fmt, "'e4m3'")
    if num_per_channels not in _GROUPS:
        raise argument_error(_NAME_WITH_CAST, "num_per_channels", "be 32 or 128", num_per_channels)
    data, sf = _split_pair(x)
    multiple = max(num_per_channels, 64)
    data, act_x_grad = _as_matrices(_NAME_WITH_CAST, data, act_x_grad, multiple)
    num_tokens, hidden = data.shape[0], data.shape[1] // 2
    sf = _as_matrix(sf)
    expected = (num_tokens, 2 * hidden // num_per_channels)
    if isinstance(sf, torch.Tensor) and sf.shape != expected:
        raise argument_error(_NAME_WITH_CAST, "x_sf", f"have shape {expected}", tuple(sf.shape))
    check_limit(_NAME_WITH_CAST, "clamp_value", clamp_value, None, 0)
    routing = routing_by_segments(
        _NAME_WITH_CAST, num_tokens, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor
    )
    clamp_min = amax_clamps["e4m3", False]
    results = cast_backward(
        data, sf, act_x_grad, num_per_channels, layout, routing, clamp_value, clamp_min, do_recompute
    )
    return tuple(result for result in results if result is not None)


def cast_backward(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    act_x_grad: torch.Tensor,
    num_per_channels: int,
    layout: SfLayout,
    routing: Routing,
    clamp_value: float | None,
    clamp_min: float,
    do_recompute: bool,
    weight_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, QuantTensor, torch.Tensor | None, torch.Tensor | None]:
    """Runs the kernel with either generation's routing: (x_grad, (data, sf), weight_grad, act_out).

    weight_grad: what to write into, only for weights that a row has; made where it is None and there are weights.
    """
    inputs = (x, x_sf, act_x_grad, routing.psum, routing.pos_to_token_topk, routing.topk_weights)
    scalars = (*_scalars(routing, clamp_value), clamp_min, layout.rounded, num_per_channels)
    outputs = (
        *(_X_GRAD_OF[torch.bfloat16], _X_GRAD_OF[torch.float8_e4m3fn], asked_sf(layout, num_per_channels)),
        _WEIGHT_GRAD if routing.topk_weights is not None and weight_grad is None else weight_grad,
        _ACT_OF[torch.bfloat16] if do_recompute else None,
    )
    made = _swiglu_backward_and_per_token_cast(*inputs, *outputs, *scalars)
    x_grad, data, sf, weight_grad, act_out = with_made(outputs, made)
    return x_grad, (data, sf), weight_grad, act_out


def swiglu_backward(
    x: torch.Tensor,
    act_x_grad: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The gradients of what `swiglu_forward` computes, and its result once more.

    x: (T, 2 H) bf16 or fp32, dense, H % 64 == 0: the gates of a row, then its values; more leading dimensions are taken
    for rows too. act_x_grad: (T, H) of x's dtype, the gradient of the result. fmt: 'bf16' or 'fp32', of what is
    returned. psum_num_tokens_per_expert, topk_weights, routed_scaling_factor and clamp_value are those of
    `swiglu_forward`. Rows between the end of an expert and the start of the next are padding: not read, and all their
    results are zeros. Rows behind the last expert and its padding count as rows of an expert.

    In fp32, gate and value clamped, s = 1 / (1 + exp(-gate)), gs = grad * weight * s: the gradient of the gate is
    gs * value * fma(gate, 1 - s, 1), that of the value gs * gate, and zero each where it was clamped.
    Returns (x_grad,), then weight_grad (T,) fp32 if there are weights: the sum over a row of grad * act, in an order of
    its own, times routed_scaling_factor; then act_out (T, H) if do_recompute: act * weight, where act is
    gate / (1 + exp(-gate)) * value.
    """
    if fmt not in _DTYPES:
        raise refuse_fmt(_NAME, fmt, "'bf16' or 'fp32'")
    x, act_x_grad = _as_matrices(_NAME, x, act_x_grad, 64)
    num_tokens = x.shape[0]
    if act_x_grad.dtype is not x.dtype:
        requirement = f"have the dtype {str(x.dtype).removeprefix('torch.')} of x"
        raise argument_error(_NAME, "act_x_grad", requirement, str(act_x_grad.dtype).removeprefix("torch."))
    check_limit(_NAME, "clamp_value", clamp_value, None, 0)
    routing = routing_by_segments(_NAME, num_tokens, psum_num_tokens_per_expert, topk_weights, routed_scaling_factor)
    inputs = (x, act_x_grad, routing.psum, routing.pos_to_token_topk, routing.topk_weights)
    scalars = _scalars(routing, clamp_value)
    weight_grad = None if topk_weights is None else _WEIGHT_GRAD
    act_out = _ACT_OF[_DTYPES[fmt]] if do_recompute else None
    made = _swiglu_backward(*inputs, _X_GRAD_OF[_DTYPES[fmt]], weight_grad, act_out, *scalars)
    return made if isinstance(made, tuple) else (made,)


def swiglu_backward_and_per_token_cast_ref(
    x: QuantTensor,
    act_x_grad: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[Any, ...]:
    """`swiglu_backward_and_per_token_cast` in plain torch."""
    scaling = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    routing = Routing(psum_num_tokens_per_expert, topk_weights, scaling)
    data, sf = (_as_matrix(each) for each in x)
    grad, quantised, weight_grad, act_out = _cast_gradients(
        data,
        sf,
        _as_matrix(act_x_grad),
        num_per_channels,
        SfLayout.from_flags("", use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0),
        routing,
        config.get_token_alignment(),
        clamp_value,
        amax_clamps["e4m3", False],
    )
    results = (grad.bfloat16(), quantised, weight_grad, act_out.bfloat16() if do_recompute else None)
    return tuple(result for result in results if result is not None)


def swiglu_backward_ref(
    x: torch.Tensor,
    act_x_grad: torch.Tensor,
    fmt: str,
    psum_num_tokens_per_expert: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[torch.Tensor, ...]:
    """`swiglu_backward` in plain torch."""
    scaling = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    routing = Routing(psum_num_tokens_per_expert, topk_weights, scaling)
    grad, weight_grad, act_out = gradients(
        _as_matrix(x).float(), _as_matrix(act_x_grad), routing, config.get_token_alignment(), clamp_value
    )
    results = (grad.to(_DTYPES[fmt]), weight_grad, act_out.to(_DTYPES[fmt]) if do_recompute else None)
    return tuple(result for result in results if result is not None)


def gradients(
    x: torch.Tensor, act_x_grad: torch.Tensor, routing: Routing, alignment: int, limit: float | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """fp32 gradients of rows (T, 2 H) and of their weights (T,), and the weighted result (T, H); padding is zero."""
    num_tokens = x.shape[0]
    gate, up = x.chunk(2, dim=-1)
    grad = act_x_grad.float()
    weights = row_weights(routing, num_tokens)
    gate_is_clamped = up_is_clamped = None
    if limit is not None:
        gate_is_clamped, up_is_clamped = gate > limit, (up > limit) | (up < -limit)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    divisor = 1 + torch.exp(-gate)
    sigmoid = 1 / divisor
    act = gate / divisor * up
    inner = (grad if weights is None else grad * weights) * sigmoid
    gate_grad = (inner * up) * fma(gate, 1 - sigmoid, torch.ones_like(gate))
    up_grad = inner * gate
    if gate_is_clamped is not None and up_is_clamped is not None:
        gate_grad, up_grad = gate_grad.masked_fill(gate_is_clamped, 0), up_grad.masked_fill(up_is_clamped, 0)
    x_grad, act_out = torch.cat((gate_grad, up_grad), dim=1), act if weights is None else act * weights
    weight_grad = None if weights is None else (grad * act).sum(dim=1) * routing.scaling
    padding = rows_of_padding(routing, num_tokens, alignment)
    if padding is not None:
        x_grad, act_out = (each.masked_fill(padding[:, None], 0) for each in (x_grad, act_out))
        weight_grad = None if weight_grad is None else weight_grad.masked_fill(padding, 0)
    return x_grad, weight_grad, act_out


def _cast_gradients(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    act_x_grad: torch.Tensor,
    num_per_channels: int,
    layout: SfLayout,
    routing: Routing,
    alignment: int,
    limit: float | None,
    clamp_min: float,
) -> tuple[torch.Tensor, QuantTensor, torch.Tensor | None, torch.Tensor]:
    """`gradients` of a quantised input, with the cast of those of x."""
    values = x.float() * x_sf.repeat_interleave(num_per_channels, dim=1)
    grad, weight_grad, act_out = gradients(values, act_x_grad, routing, alignment, limit)
    quantised = cast_ref(
        grad,
        "e4m3",
        (1, num_per_channels),
        use_tma_aligned_col_major_sf=layout.col_major,
        round_sf=layout.rounded,
        use_packed_ue8m0=layout.packed,
        clamp_min=clamp_min,
    )
    assert isinstance(quantised, tuple)
    padding = rows_of_padding(routing, x.shape[0], alignment)
    if padding is not None:
        quantised[1].masked_fill_(padding[:, None], 0)
    return grad, quantised, weight_grad, act_out


def _split_pair(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(x, tuple) or len(x) != 2:
        what = f"a {type(x).__name__}" if not isinstance(x, tuple) else f"{len(x)} of them"
        raise argument_type_error(_NAME_WITH_CAST, "x", "be a tuple of two tensors (data, sf)", what)
    return x


def _as_matrix(x: torch.Tensor) -> torch.Tensor:
    """Leading dimensions as one; anything that has no more than two as it is."""
    return x.flatten(0, -2) if isinstance(x, torch.Tensor) and x.dim() > 2 else x


def _as_matrices(
    operator: str, x: torch.Tensor, act_x_grad: torch.Tensor, multiple: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and the gradient of the result as matrices that fit each other."""
    x, act_x_grad = _as_matrix(x), _as_matrix(act_x_grad)
    shape = halves_of(operator, x, multiple)
    if not isinstance(act_x_grad, torch.Tensor):
        raise argument_type_error(operator, "act_x_grad", "be a tensor", type(act_x_grad).__name__)
    if act_x_grad.shape != shape:
        raise argument_error(operator, "act_x_grad", f"have shape {shape}", tuple(act_x_grad.shape))
    return x, act_x_grad


def _scalars(routing: Routing, clamp_value: float | None) -> tuple[int, float, bool, float]:
    has_clamp = clamp_value is not None
    return config.get_token_alignment(), routing.scaling, has_clamp, float(clamp_value or 0.0)


def _write_weight_grad(target: torch.Tensor | None, grad: torch.Tensor | None, routing: Routing) -> None:
    if target is None or grad is None:
        return
    position = routing.pos_to_token_topk
    if position is None:
        target.copy_(grad)
    else:
        is_known = (position >= 0) & (position < target.numel())
        target[position[is_known].long()] = grad[is_known]


def _swiglu_backward_and_per_token_cast_cpu(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    act_x_grad: torch.Tensor,
    psum: torch.Tensor | None,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    x_grad: torch.Tensor,
    x_grad_fp8: torch.Tensor,
    x_grad_sf: torch.Tensor,
    weight_grad: torch.Tensor | None,
    act_out: torch.Tensor | None,
    alignment: int,
    routed_scaling_factor: float,
    has_clamp: bool,
    clamp_value: float,
    clamp_min: float,
    round_sf: bool,
    num_per_channels: int,
) -> None:
    routing = Routing(psum, topk_weights, routed_scaling_factor, None, pos_to_token_topk)
    layout = SfLayout(rounded=round_sf, packed=x_grad_sf.dtype == torch.int32)
    limit = clamp_value if has_clamp else None
    results = _cast_gradients(x, x_sf, act_x_grad, num_per_channels, layout, routing, alignment, limit, clamp_min)
    x_grad.copy_(results[0])
    x_grad_fp8.copy_(results[1][0])
    x_grad_sf.copy_(results[1][1])
    _write_weight_grad(weight_grad, results[2], routing)
    if act_out is not None:
        act_out.copy_(results[3])


def _swiglu_backward_cpu(
    x: torch.Tensor,
    act_x_grad: torch.Tensor,
    psum: torch.Tensor | None,
    pos_to_token_topk: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    x_grad: torch.Tensor,
    weight_grad: torch.Tensor | None,
    act_out: torch.Tensor | None,
    alignment: int,
    routed_scaling_factor: float,
    has_clamp: bool,
    clamp_value: float,
) -> None:
    routing = Routing(psum, topk_weights, routed_scaling_factor, None, pos_to_token_topk)
    results = gradients(x.float(), act_x_grad, routing, alignment, clamp_value if has_clamp else None)
    x_grad.copy_(results[0])
    _write_weight_grad(weight_grad, results[1], routing)
    if act_out is not None:
        act_out.copy_(results[2])


_swiglu_backward_and_per_token_cast = kernel(_NAME_WITH_CAST, cpu=_swiglu_backward_and_per_token_cast_cpu)
_swiglu_backward = kernel(_NAME, cpu=_swiglu_backward_cpu)

# Of weight_grad, whose sum has no set order
_MAX_DIFF = 1e-12


def bench_cases() -> list[BenchCase]:
    """Few tokens, then the published benchmark's sizes, with the result recomputed as there; plain ones."""
    packed = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    cases = [_case(8, 2048, "e4m3", "e4m3", 128, packed), _case(8, 2048, "bf16", "bf16", 0, {})]
    for hidden in (4096, 7168):
        for group in _GROUPS:
            for clamp_value in (None, 0.5):
                cases.append(_case(21760, hidden, "e4m3", "e4m3", group, {"round_sf": True}, clamp_value, 32))
    cases.append(_case(21760, 4096, "e4m3", "e4m3", 128, packed))
    cases += [_case(8064, 4096, kind, fmt, 0, {}, None, 32) for kind, fmt in (("bf16", "bf16"), ("fp32", "fp32"))]
    return cases + [_case(num_tokens, 4096, "e4m3", "e4m3", 128, packed, None, 32) for num_tokens in (1, 32, 256)]


def _case(
    num_tokens: int,
    hidden: int,
    kind: str,
    fmt: str,
    group: int,
    flags: dict[str, bool],
    clamp_value: float | None = None,
    num_experts: int = 0,
) -> BenchCase:
    """num_experts > 0: with weights, segments that leave no row out, and the result recomputed."""
    name = _NAME_WITH_CAST if group else _NAME

    def make(device: Any) -> dict[str, Any]:
        x: Any = torch.randn((num_tokens, 2 * hidden), device=device).to(_DTYPES.get(kind, torch.bfloat16))
        grad = torch.randn((num_tokens, hidden), device=device).to(_DTYPES.get(kind, torch.bfloat16))
        kwargs: dict[str, Any] = {"x": x, "act_x_grad": grad, "fmt": fmt, "clamp_value": clamp_value, **flags}
        if group:
            kwargs["x"] = cast_ref(x, "e4m3", (1, group), round_sf=True)
            kwargs["num_per_channels"] = group
        if num_experts:
            share = math.ceil(num_tokens / num_experts / config.get_token_alignment()) * config.get_token_alignment()
            ends = torch.arange(1, num_experts + 1, device=device, dtype=torch.int32) * share
            kwargs["psum_num_tokens_per_expert"] = ends.clamp(max=num_tokens)
            kwargs["topk_weights"] = torch.rand(num_tokens, device=device)
            kwargs["do_recompute"] = True
        return kwargs

    layout = SfLayout.from_flags(name, **flags)
    size = {"e4m3": 1, "bf16": 2, "fp32": 4}
    out_size = 2 if group else size[fmt]
    num_bytes = num_tokens * hidden * (2 * size[kind] + (2 if group else size[kind]) + 2 * out_size)
    if group:
        num_groups = 2 * hidden // group
        num_bytes += num_tokens * (2 * hidden + 4 * num_groups) + layout.num_bytes(num_tokens, num_groups)
    if num_experts:
        num_bytes += num_tokens * (hidden * out_size + 8) + 4 * num_experts
    params: dict[str, Any] = {"num_tokens": num_tokens, "hidden": hidden, "in": kind, "out": fmt}
    params |= {"num_per_channels": group, "sf": layout.label} if group else {}
    params |= {"clamp_value": clamp_value} if clamp_value is not None else {}
    params |= {"num_experts": num_experts} if num_experts else {}
    return BenchCase(name, params, make, num_bytes, _MAX_DIFF if num_experts else 0.0)
