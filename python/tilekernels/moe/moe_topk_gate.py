"""Routing of generation 2 by sqrt(softplus) scores, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..errors import argument_error, argument_type_error, check_int, shape_of
from ..testing.cases import BenchCase
from ._gate import (
    EPSILON,
    MAX_EXPERTS,
    MAX_TOPK,
    WARP,
    append_shared,
    butterfly_sum,
    check_both_or_neither,
    check_count_values,
    check_fixed_values,
    check_logits,
    check_routing,
    check_topk,
    flatten_mask,
    lane_sum,
    map_to_physical,
    sqrt_softplus,
    take_scores,
)
from ._random import draw_experts
from .topk_gate import topk_gate_ref

_NAME = "moe.moe_topk_gate_forward"
_BACKWARD_NAME = "moe.moe_topk_gate_backward"
_SCORING = "sqrtsoftplus"
_SHARED_COUNTS = (1, 2)
_NUM_TOKENS = size_of(0, 0)
_GRAD_LOGITS = (torch.float32, 0, _NUM_TOKENS, size_of(0, 1))


def moe_topk_gate_forward(
    logits: torch.Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = _SCORING,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    image_bias: torch.Tensor | None = None,
    image_token_mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
    force_random: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_idx, topk_weights): each token's experts, best first, and their weights.

    logits: (num_tokens, num_experts) fp32, dense, num_experts a multiple of 4 and at most 1024. A score is
    sqrt(softplus(logit)). Experts rank by score + bias (fp32 (num_experts,)); tokens of image_token_mask (bool
    (num_tokens,)) by score + image_bias instead. Ties go to the smaller index, NaN ranks below -inf. A weight is the
    score over the sum of the chosen scores + 1e-20 (pairs at distance 16, 8, 4, 2, 1 first, 1e-20 last), times
    routed_scaling_factor.

    With use_shared_as_routed, num_shared_experts (1 or 2) experts num_experts, ... follow with weight 1.
    to_physical_map (num_experts + shared, columns) and logical_count (num_experts + shared,), both int32, give an
    expert's replicas; the token's row and ep_rank choose one.

    mask: bool, num_tokens elements; False gives -1 and 0. force_random: bool (num_tokens,); True gives distinct random
    physical experts with random weights in (0, 1], from Philox4x32-10 seeded by ep_rank, and -1 in unmapped_topk_idx.
    unmapped_topk_idx: int64 (num_tokens, num_topk), any row stride, receives the logical experts; where
    fix_routing_mask (bool (num_tokens,)) is True it gives them instead. An expert given there that does not exist
    yields -1 and 0 on a GPU and an error on a CPU. scores: fp32 like logits, receives the scores without bias, 0 for
    masked and random tokens. `out` takes the results.

    Returns int64 and fp32 (num_tokens, num_topk + shared).
    """
    mask = flatten_mask(mask)
    _check_scoring(_NAME, scoring_func)
    check_int(_NAME, "num_topk", num_topk, 1, MAX_TOPK)
    topk_idx, topk_weights = _split_out(out)
    routing = (fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx)
    tensors = (logits, mask, bias, image_bias, image_token_mask, *routing, flatten_mask(force_random))
    num_shared = _check_shared(use_shared_as_routed, num_shared_experts)
    num_tokens, num_experts = shape_of(_NAME, "logits", logits, 2)
    check_logits(_NAME, "logits", num_experts)
    check_topk(_NAME, num_topk, num_experts, num_shared)
    check_both_or_neither(_NAME, ("image_bias", image_bias), ("image_token_mask", image_token_mask))
    check_routing(_NAME, num_experts + num_shared, *routing)
    scalars = (num_topk, routed_scaling_factor, ep_rank)
    width = num_topk + num_shared
    if topk_idx is None or topk_weights is None:
        asked = (torch.int64, 0, _NUM_TOKENS, width), (torch.float32, 0, _NUM_TOKENS, width)
        return _moe_topk_gate_forward(*tensors, *asked, scores, *scalars)
    _check_out(topk_idx, topk_weights, (num_tokens, width))
    _moe_topk_gate_forward(*tensors, topk_idx, topk_weights, scores, *scalars)
    return topk_idx, topk_weights


moe_topk_gate = moe_topk_gate_forward


def moe_topk_gate_forward_ref(
    logits: torch.Tensor,
    num_topk: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    scoring_func: str = _SCORING,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    image_bias: torch.Tensor | None = None,
    image_token_mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
    force_random: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    scores: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`moe_topk_gate_forward` in plain torch, without checks; an expert given that does not exist yields -1 and 0."""
    results = _route(
        *(logits, mask, bias, image_bias, image_token_mask, fix_routing_mask, to_physical_map, logical_count),
        *(unmapped_topk_idx, force_random, scores, num_topk, num_shared_experts if use_shared_as_routed else 0),
        *(routed_scaling_factor, ep_rank),
    )
    if out is None:
        return results
    out[0].copy_(results[0])
    out[1].copy_(results[1])
    return out[0], out[1]


moe_topk_gate_ref = moe_topk_gate_forward_ref


def moe_topk_gate_backward(
    scores: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    grad_topk_weights: torch.Tensor,
    routed_scaling_factor: float,
    scoring_func: str = _SCORING,
    mask: torch.Tensor | None = None,
    grad_scores_sum: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the logits, fp32 (num_tokens, num_experts), written to `out` if it is given.

    scores: fp32 (num_tokens, num_experts), saved by the forward call, num_experts at most 1024. topk_idx: int64
    (num_tokens, num_topk), the logical routed experts; -1 is skipped, duplicates add up. topk_weights,
    grad_topk_weights: fp32 (num_tokens, num_topk). mask (bool, num_tokens elements) and grad_scores_sum (fp32
    (num_seqs, num_experts), num_seqs divides num_tokens) belong together: the gradient of each sequence's sum of
    normalised scores, for tokens whose mask is True. All dense. Sums have a fixed order. On a GPU, an expert that
    does not exist is skipped; on a CPU it is an error.
    """
    mask = flatten_mask(mask)
    _check_scoring(_BACKWARD_NAME, scoring_func)
    inputs = (scores, topk_idx, topk_weights, grad_topk_weights, mask, grad_scores_sum)
    num_tokens, num_experts = shape_of(_BACKWARD_NAME, "scores", scores, 2)
    if num_experts > MAX_EXPERTS:
        raise argument_error(_BACKWARD_NAME, "scores", f"have at most {MAX_EXPERTS} experts", num_experts)
    num_topk = shape_of(_BACKWARD_NAME, "topk_idx", topk_idx, 2)[1]
    if num_topk > min(num_experts, WARP):
        requirement = f"have at most {min(num_experts, WARP)} columns"
        raise argument_error(_BACKWARD_NAME, "topk_idx", requirement, num_topk)
    check_both_or_neither(_BACKWARD_NAME, ("mask", mask), ("grad_scores_sum", grad_scores_sum))
    if grad_scores_sum is not None:
        _check_sequences(shape_of(_BACKWARD_NAME, "grad_scores_sum", grad_scores_sum, 2)[0], num_tokens)
    made = _moe_topk_gate_backward(*inputs, _GRAD_LOGITS if out is None else out, routed_scaling_factor)
    return made if out is None else out


def moe_topk_gate_backward_ref(
    scores: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    grad_topk_weights: torch.Tensor,
    routed_scaling_factor: float,
    scoring_func: str = _SCORING,
    mask: torch.Tensor | None = None,
    grad_scores_sum: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`moe_topk_gate_backward` in plain torch, without checks."""
    num_tokens, num_experts = scores.shape
    experts, taken = take_scores(scores, topk_idx)
    exists = experts >= 0
    grads = torch.where(exists, grad_topk_weights, 0.0)
    dot = butterfly_sum(torch.where(exists, grad_topk_weights * topk_weights, 0.0))
    terms = (routed_scaling_factor * grads - dot) / (butterfly_sum(taken) + EPSILON)
    # A column beyond the experts takes what is skipped; slots are added one after the other.
    coefficients = torch.nn.functional.pad(torch.zeros_like(scores), (0, 1))
    for slot in range(experts.shape[1]):
        column = torch.where(exists, experts, num_experts)[:, slot : slot + 1]
        coefficients.scatter_(1, column, coefficients.gather(1, column) + terms[:, slot : slot + 1])
    slopes = sqrt_softplus_slope(scores)
    gradient = coefficients[:, :num_experts]
    if mask is not None and grad_scores_sum is not None:
        extra = grad_scores_sum.repeat_interleave(num_tokens // max(grad_scores_sum.shape[0], 1), dim=0)
        inverse = 1.0 / lane_sum(scores)
        shift = lane_sum(extra * scores) * inverse
        gradient = gradient + torch.where(mask.reshape(-1, 1), (extra - shift) * inverse, 0.0)
    gradient = gradient * slopes
    if out is None:
        return gradient
    return out.copy_(gradient)


def sqrt_softplus_slope(u: torch.Tensor) -> torch.Tensor:
    """du/dx of u = sqrt(softplus(x)), from u: a polynomial in u^2 below 1, where 1 - exp(-u^2) loses digits."""
    v = u * u
    half = 0.5 * u
    q = torch.full_like(v, 0.000129130945)
    for coefficient in (-0.00130112655, 0.00827621203, -0.041647464, 0.166663632, -0.499999821):
        q = q * v + coefficient
    return torch.where(v < 1.0, half + half * v * q, 0.5 * ((1.0 - torch.exp(-v)) / u))


def _check_scoring(name: str, scoring_func: Any) -> None:
    if not isinstance(scoring_func, str):
        raise argument_type_error(name, "scoring_func", "be a str", type(scoring_func).__name__)
    if scoring_func.lower() != _SCORING:
        raise argument_error(name, "scoring_func", f"be {_SCORING}", scoring_func)


def _check_shared(use_shared_as_routed: bool, num_shared_experts: int) -> int:
    """How many shared experts there are among the routed ones."""
    if not use_shared_as_routed:
        return 0
    check_int(_NAME, "num_shared_experts", num_shared_experts)
    if num_shared_experts not in _SHARED_COUNTS:
        raise argument_error(_NAME, "num_shared_experts", "be 1 or 2", num_shared_experts)
    return num_shared_experts


def _split_out(out: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if out is None:
        return None, None
    if not isinstance(out, tuple | list) or len(out) != 2 or not all(isinstance(x, torch.Tensor) for x in out):
        raise argument_type_error(_NAME, "out", "be a pair of tensors", type(out).__name__)
    return out[0], out[1]


def _check_out(topk_idx: torch.Tensor, topk_weights: torch.Tensor, shape: tuple[int, int]) -> None:
    for argument, tensor in (("out[0]", topk_idx), ("out[1]", topk_weights)):
        if tuple(tensor.shape) != shape:
            raise argument_error(_NAME, argument, f"have shape {shape}", tuple(tensor.shape))


def _check_sequences(num_seqs: int, num_tokens: int) -> None:
    check_int(_BACKWARD_NAME, "the number of rows of grad_scores_sum", num_seqs, 1, num_tokens or num_seqs)
    if num_tokens % num_seqs != 0:
        raise argument_error(_BACKWARD_NAME, "grad_scores_sum", f"have rows that divide {num_tokens} tokens", num_seqs)


def _route(
    logits: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    image_bias: torch.Tensor | None,
    image_token_mask: torch.Tensor | None,
    fix_routing_mask: torch.Tensor | None,
    to_physical_map: torch.Tensor | None,
    logical_count: torch.Tensor | None,
    unmapped_topk_idx: torch.Tensor | None,
    force_random: torch.Tensor | None,
    scores: torch.Tensor | None,
    num_topk: int,
    num_shared: int,
    routed_scaling_factor: float,
    ep_rank: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_experts = logits.shape
    is_active = (
        torch.ones((num_tokens, 1), dtype=torch.bool, device=logits.device) if mask is None else mask.reshape(-1, 1)
    )
    is_random = torch.zeros_like(is_active) if force_random is None else force_random.reshape(-1, 1) & is_active
    own = sqrt_softplus(logits)
    if scores is not None:
        scores.copy_(torch.where(is_active & ~is_random, own, 0.0))
    ranks = own if bias is None else own + bias
    if image_bias is not None and image_token_mask is not None:
        ranks = torch.where(image_token_mask[:, None], own + image_bias, ranks)
    experts = topk_gate_ref(ranks, num_topk)
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        experts = torch.where(fix_routing_mask[:, None], unmapped_topk_idx, experts)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(torch.where(is_active & ~is_random, experts, -1))
    experts, taken = take_scores(own, experts)
    weights = taken / (butterfly_sum(taken) + EPSILON) * routed_scaling_factor
    experts, weights = append_shared(experts, weights, num_experts, num_shared)
    experts = map_to_physical(experts, ep_rank, to_physical_map, logical_count)
    if force_random is not None:
        drawn = draw_experts(
            num_tokens, num_topk + num_shared, num_experts + num_shared, logical_count, ep_rank, logits.device
        )
        experts = torch.where(is_random, drawn[0], experts)
        weights = torch.where(is_random, drawn[1], weights)
    return torch.where(is_active, experts, -1), torch.where(is_active, weights, 0.0)


def _moe_topk_gate_forward_cpu(
    logits: torch.Tensor,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    image_bias: torch.Tensor | None,
    image_token_mask: torch.Tensor | None,
    fix_routing_mask: torch.Tensor | None,
    to_physical_map: torch.Tensor | None,
    logical_count: torch.Tensor | None,
    unmapped_topk_idx: torch.Tensor | None,
    force_random: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    scores: torch.Tensor | None,
    num_topk: int,
    routed_scaling_factor: float,
    ep_rank: int,
) -> None:
    check_count_values(_NAME, to_physical_map, logical_count)
    if fix_routing_mask is not None:
        rows = fix_routing_mask if mask is None else fix_routing_mask & mask
        rows = rows if force_random is None else rows & ~force_random
        check_fixed_values(_NAME, unmapped_topk_idx, rows, logits.shape[1])
    results = _route(
        *(logits, mask, bias, image_bias, image_token_mask, fix_routing_mask, to_physical_map, logical_count),
        *(
            unmapped_topk_idx,
            force_random,
            scores,
            num_topk,
            topk_idx.shape[1] - num_topk,
            routed_scaling_factor,
            ep_rank,
        ),
    )
    topk_idx.copy_(results[0])
    topk_weights.copy_(results[1])


def _moe_topk_gate_backward_cpu(
    scores: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    grad_topk_weights: torch.Tensor,
    mask: torch.Tensor | None,
    grad_scores_sum: torch.Tensor | None,
    grad_logits: torch.Tensor,
    routed_scaling_factor: float,
) -> None:
    wrong = topk_idx[(topk_idx < -1) | (topk_idx >= scores.shape[1])]
    if wrong.numel():
        requirement = f"hold -1 or experts from 0 to {scores.shape[1] - 1}"
        raise argument_error(_BACKWARD_NAME, "topk_idx", requirement, int(wrong[0]))
    gradient = moe_topk_gate_backward_ref(
        *(scores, topk_idx, topk_weights, grad_topk_weights, routed_scaling_factor, _SCORING, mask, grad_scores_sum)
    )
    grad_logits.copy_(gradient)


_moe_topk_gate_forward = kernel(_NAME, cpu=_moe_topk_gate_forward_cpu)
_moe_topk_gate_backward = kernel(_BACKWARD_NAME, cpu=_moe_topk_gate_backward_cpu)


def bench_cases() -> list[BenchCase]:
    """Real models' sizes from a few tokens to many: the gate alone, under its alias, with everything, and its
    gradient."""
    sizes = [(32, 72, 6), (4096, 256, 8), (8192, 256, 8), (8192, 384, 8), (8192, 512, 10)]
    small, large = (32, 256, 8), (8192, 256, 8)
    return [
        *(_forward_case(_NAME, *size, with_options=False) for size in sizes),
        *(_forward_case("moe.moe_topk_gate", *size, with_options=False) for size in (small, large)),
        *(_forward_case(_NAME, *size, with_options=True) for size in (small, large)),
        *(_backward_case(*size, with_aux=with_aux) for size in (small, large) for with_aux in (False, True)),
    ]


def _forward_case(name: str, num_tokens: int, num_experts: int, num_topk: int, with_options: bool) -> BenchCase:
    num_shared = int(with_options)

    def make(device: Any) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "logits": torch.randn((num_tokens, num_experts), device=device),
            "num_topk": num_topk,
            "use_shared_as_routed": with_options,
            "num_shared_experts": num_shared,
            "routed_scaling_factor": 1.5,
            "ep_rank": 1,
            "bias": torch.randn((num_experts,), device=device),
        }
        if not with_options:
            return kwargs
        num_logical = num_experts + num_shared
        token = torch.arange(num_tokens, device=device)
        return kwargs | {
            "mask": token % 7 != 0,
            "image_bias": torch.randn((num_experts,), device=device),
            "image_token_mask": token % 2 == 0,
            "to_physical_map": torch.arange(2 * num_logical, dtype=torch.int32, device=device).view(num_logical, 2),
            "logical_count": torch.ones((num_logical,), dtype=torch.int32, device=device),
            "unmapped_topk_idx": torch.empty((num_tokens, num_topk), dtype=torch.int64, device=device),
            "scores": torch.empty((num_tokens, num_experts), device=device),
            "force_random": token % 5 == 0,
        }

    params = {"num_tokens": num_tokens, "num_experts": num_experts, "num_topk": num_topk, "with_options": with_options}
    rows = 4 * num_experts + 12 * (num_topk + num_shared)
    extra = 4 * num_experts + 8 * num_topk + 3
    maps = 12 * (num_experts + num_shared) + 4 * num_experts
    bytes_moved = num_tokens * (rows + extra * with_options) + 4 * num_experts + maps * with_options
    return BenchCase(name, params, make, bytes_moved)


def _backward_case(num_tokens: int, num_experts: int, num_topk: int, with_aux: bool) -> BenchCase:
    num_seqs = 4

    def make(device: Any) -> dict[str, Any]:
        scores = sqrt_softplus(torch.randn((num_tokens, num_experts), device=device))
        topk_idx = torch.rand((num_tokens, num_experts), device=device).topk(num_topk).indices
        kwargs: dict[str, Any] = {
            "scores": scores,
            "topk_idx": topk_idx,
            "topk_weights": scores.gather(1, topk_idx) * 0.25,
            "grad_topk_weights": torch.randn((num_tokens, num_topk), device=device),
            "routed_scaling_factor": 1.5,
        }
        if not with_aux:
            return kwargs
        return kwargs | {
            "mask": torch.arange(num_tokens, device=device) % 7 != 0,
            "grad_scores_sum": torch.randn((num_seqs, num_experts), device=device),
        }

    params = {"num_tokens": num_tokens, "num_experts": num_experts, "num_topk": num_topk, "with_aux": with_aux}
    bytes_moved = num_tokens * (8 * num_experts + 16 * num_topk) + (num_tokens + 4 * num_seqs * num_experts) * with_aux
    return BenchCase(_BACKWARD_NAME, params, make, bytes_moved)
