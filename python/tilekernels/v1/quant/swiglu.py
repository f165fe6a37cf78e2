"""SwiGLU with the routing of generation 1: the rows of a buffer name their token and slot, and their expert."""

from __future__ import annotations

import torch

from ...errors import argument_error, argument_type_error
from ...layout import SfLayout
from ...quant import QuantTensor
from ...quant._sf import amax_clamps
from ...quant._swiglu import Routing, check_limit, check_number, halves_of, refuse_fmt
from ...quant.swiglu_backward import cast_backward
from ...quant.swiglu_forward import cast_forward
from .._asserting import asserting

_FORWARD = "quant.swiglu_forward_and_per_token_cast"
_BACKWARD = "quant.swiglu_backward_and_per_token_cast"

_NUM_COUNTS = 3
_GROUP = 128  # of the forward pass; or a whole row
_BACKWARD_GROUPS = (32, 128)


@asserting
def swiglu_forward_and_per_token_cast(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    pos_to_expert: torch.Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
    sf_clamp_min: float | None = None,
) -> QuantTensor:
    """`tilekernels.quant.swiglu_forward_and_per_token_cast` for rows that are told apart one by one.

    x: (M, 2 H), H % 128 == 0. num_per_channels: 128, or H with row-major scales. pos_to_token_topk: (M,) int32, where
    in topk_weights, (T, k) fp32, dense, the weight of each row is; 0 where it is negative. pos_to_expert: (M,) int32;
    rows where it is negative are neither computed nor counted, their results are uninitialised. clamped_count: int64
    (3,), without the number of channels. sf_clamp_min: the lower bound of a block's maximum instead of `config`'s.
    """
    layout = SfLayout.from_flags(_FORWARD, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if fmt != "e4m3":
        raise refuse_fmt(_FORWARD, fmt, "'e4m3'")
    _, hidden = halves_of(_FORWARD, x, _GROUP)
    if num_per_channels not in (_GROUP, hidden):
        raise argument_error(_FORWARD, "num_per_channels", f"be {_GROUP} or the {hidden} channels", num_per_channels)
    if num_per_channels != _GROUP and layout.col_major:
        raise argument_error(_FORWARD, "use_tma_aligned_col_major_sf", "be False for one scale a row", True)
    if (pos_to_token_topk is None) != (topk_weights is None):
        given = "topk_weights" if pos_to_token_topk is None else "pos_to_token_topk"
        raise argument_error(_FORWARD, "pos_to_token_topk", "be given together with topk_weights", f"{given} alone")
    check_limit(_FORWARD, "swiglu_clamp_value", swiglu_clamp_value, clamped_count, _NUM_COUNTS)
    weights = None if topk_weights is None else _as_vector(_FORWARD, "topk_weights", topk_weights)
    routing = Routing(None, weights, 1.0, pos_to_expert, pos_to_token_topk)
    clamp_min = amax_clamps["e4m3", False]
    if sf_clamp_min is not None:
        clamp_min = check_number(_FORWARD, "sf_clamp_min", sf_clamp_min)
    group = _GROUP if num_per_channels == _GROUP else 0
    return cast_forward(x, group, layout, routing, swiglu_clamp_value, clamped_count, clamp_min)


@asserting
def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[torch.Tensor, QuantTensor, torch.Tensor, torch.Tensor]:
    """(out, (data, sf), x_grad, weight_grad) of `tilekernels.quant.swiglu_backward_and_per_token_cast`.

    x: (data, sf) of (M, 2 H), or of more dimensions that make M. weight: (T, k) fp32, dense. pos_to_token_topk: (M,)
    int32, t * k + s for the row of token t's slot s, or -1 for a weight of 0. token_topk_to_pos: (T, k) int32, the
    other way round. out: bf16, the weighted result. weight_grad: (T, k), 0 for slots without a row.
    """
    if not isinstance(x, tuple) or len(x) != 2:
        raise argument_type_error(_BACKWARD, "x", "be a tuple of two tensors (data, sf)", type(x).__name__)
    if num_per_channels not in _BACKWARD_GROUPS:
        raise argument_error(_BACKWARD, "num_per_channels", "be 32 or 128", num_per_channels)
    data, sf, grad = (each.flatten(0, -2) if each.dim() > 2 else each for each in (*x, grad_out))
    num_tokens, hidden = halves_of(_BACKWARD, data, max(num_per_channels, 64))
    for name, tensor, shape in (
        ("x_sf", sf, (num_tokens, 2 * hidden // num_per_channels)),
        ("grad_out", grad, (num_tokens, hidden)),
        ("token_topk_to_pos", token_topk_to_pos, tuple(weight.shape)),
    ):
        if tensor.shape != shape:
            raise argument_error(_BACKWARD, name, f"have shape {shape}", tuple(tensor.shape))
    check_limit(_BACKWARD, "swiglu_clamp_value", swiglu_clamp_value, None, 0)
    routing = Routing(None, _as_vector(_BACKWARD, "weight", weight), 1.0, None, pos_to_token_topk)
    weight_grad = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
    x_grad, quantised, _, out = cast_backward(
        data,
        sf,
        grad,
        num_per_channels,
        SfLayout.from_flags(_BACKWARD, round_sf=round_sf),
        routing,
        swiglu_clamp_value,
        amax_clamps["e4m3", False],
        True,
        weight_grad.view(-1),
    )
    assert out is not None
    return out, quantised, x_grad, weight_grad


def _as_vector(operator: str, argument: str, weights: torch.Tensor) -> torch.Tensor:
    """Weights of tokens and slots in one dimension."""
    if not weights.is_contiguous():
        raise argument_error(operator, argument, "be dense", f"strides {weights.stride()}")
    return weights.view(-1)
