"""Routing of generation 1: best groups by their two best experts, then best experts, mapped to physical and local
ones."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..errors import argument_error, argument_type_error, check_int, shape_of
from ..testing.cases import BenchCase
from ._gate import (
    MAX_EXPERTS,
    MAX_TOPK,
    WARP,
    append_shared,
    check_count_values,
    check_fixed_values,
    check_logits,
    check_routing,
    check_topk,
    flatten_mask,
    keep_best_groups,
    map_to_physical,
    sequential_sum,
    sigmoid,
    softmax,
    sqrt_softplus,
    take_scores,
)
from .topk_gate import topk_gate_ref

_NAME = "moe.top2_sum_gate"
_SCORES = {"sigmoid": sigmoid, "sqrtsoftplus": sqrt_softplus, "softmax": softmax}
_SHARED_COUNTS = (1, 2)
_NUM_TOKENS = size_of(0, 0)


def top2_sum_gate(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_idx, topk_weights): each token's experts on this tensor-parallel rank, best first, and their weights.

    logits: (num_tokens, num_experts) fp32, dense, num_experts a multiple of 4 and at most 1024. bias: (num_experts,)
    fp32. scoring_func: sigmoid, sqrtsoftplus or softmax. Experts rank by score + bias (softmax: logit + bias), within
    the num_topk_groups of num_groups groups whose two best rank highest; equal counts mean no groups. Ties go to the
    smaller index, NaN ranks below -inf. A weight is the score over 1e-20 + the sum of the chosen scores, from left to
    right, times routed_scaling_factor.

    With use_shared_as_routed, num_shared_experts experts num_experts, num_experts + 1 follow with weight 1.
    to_physical_map (num_experts + shared, columns) and logical_count (num_experts + shared,), both int32, give an
    expert's replicas; the token's row and ep_rank choose one. Experts of other tensor-parallel ranks become -1, their
    weights stay.

    mask: bool, num_tokens elements; False gives -1 and 0. unmapped_topk_idx: int64 (num_tokens, num_topk), any row
    stride, receives the logical experts; where fix_routing_mask (bool (num_tokens,)) is True it gives them instead. An
    expert given there that does not exist yields -1 and 0 on a GPU and an error on a CPU.

    Returns int64 and fp32 (num_tokens, num_topk + shared).
    """
    mask = flatten_mask(mask)
    scoring = _find_scoring(scoring_func)
    check_int(_NAME, "num_topk", num_topk, 1, MAX_TOPK)
    _check_groups(num_groups, num_topk_groups)
    check_int(_NAME, "num_ep_ranks", num_ep_ranks)
    routing = (mask, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx)
    _, num_experts = shape_of(_NAME, "logits", logits, 2)
    num_shared = _check_shared(use_shared_as_routed, num_shared_experts, num_topk, num_experts)
    check_logits(_NAME, "logits", num_experts)
    check_topk(_NAME, num_topk, num_experts, num_shared)
    _check_group_size(num_groups, num_topk_groups, num_experts)
    check_routing(_NAME, num_experts + num_shared, *routing[1:])
    num_physical = num_experts
    if to_physical_map is not None:
        num_physical += to_physical_map.shape[1] - 1
    if num_shared > num_physical - num_experts:
        raise argument_error(
            _NAME,
            "to_physical_map",
            f"have more than {num_shared} columns, for the shared experts",
            _columns(to_physical_map),
        )
    _check_ranks(ep_rank, num_ep_ranks, tp_rank, num_tp_ranks, num_physical)
    width = num_topk + num_shared
    return _top2_sum_gate(
        *(logits, bias, *routing, (torch.int64, 0, _NUM_TOKENS, width), (torch.float32, 0, _NUM_TOKENS, width)),
        *(num_topk, num_groups, num_topk_groups, routed_scaling_factor, ep_rank, num_physical // num_ep_ranks),
        *(tp_rank, num_tp_ranks, scoring),
    )


def top2_sum_gate_ref(
    logits: torch.Tensor,
    bias: torch.Tensor,
    num_topk: int,
    num_topk_groups: int,
    num_groups: int,
    use_shared_as_routed: bool,
    num_shared_experts: int,
    routed_scaling_factor: float,
    ep_rank: int,
    num_ep_ranks: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring_func: str,
    mask: torch.Tensor | None = None,
    fix_routing_mask: torch.Tensor | None = None,
    to_physical_map: torch.Tensor | None = None,
    logical_count: torch.Tensor | None = None,
    unmapped_topk_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`top2_sum_gate` in plain torch, without checks; an expert given in unmapped_topk_idx that does not exist
    yields -1 and 0."""
    num_physical = logits.shape[1] + (0 if to_physical_map is None else to_physical_map.shape[1] - 1)
    return _route(
        *(logits, bias, mask, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx),
        *(
            num_topk,
            num_shared_experts if use_shared_as_routed else 0,
            num_groups,
            num_topk_groups,
            routed_scaling_factor,
        ),
        *(ep_rank, num_physical // num_ep_ranks, tp_rank, num_tp_ranks, scoring_func.lower()),
    )


def _find_scoring(scoring_func: Any) -> str:
    if not isinstance(scoring_func, str):
        raise argument_type_error(_NAME, "scoring_func", "be a str", type(scoring_func).__name__)
    scoring = scoring_func.lower()
    if scoring not in _SCORES:
        raise argument_error(_NAME, "scoring_func", f"be one of {', '.join(_SCORES)}", scoring_func)
    return scoring


def _check_shared(use_shared_as_routed: bool, num_shared_experts: int, num_topk: int, num_experts: int) -> int:
    """How many shared experts there are among the routed ones."""
    if not use_shared_as_routed:
        return 0
    check_int(_NAME, "num_shared_experts", num_shared_experts)
    if num_shared_experts not in _SHARED_COUNTS:
        raise argument_error(_NAME, "num_shared_experts", "be 1 or 2", num_shared_experts)
    if num_topk % num_shared_experts != 0:
        raise argument_error(_NAME, "num_topk", f"be a multiple of num_shared_experts {num_shared_experts}", num_topk)
    each = num_topk // num_shared_experts
    if each > 0 and num_experts % each != 0:
        raise argument_error(
            _NAME, "logits", f"have a multiple of num_topk / num_shared_experts = {each} experts", num_experts
        )
    return num_shared_experts


def _check_groups(num_groups: int, num_topk_groups: int) -> None:
    check_int(_NAME, "num_groups", num_groups, 0, MAX_EXPERTS)
    check_int(_NAME, "num_topk_groups", num_topk_groups)
    lowest = 0 if num_groups == 0 else 1
    if not lowest <= num_topk_groups <= num_groups:
        raise argument_error(
            _NAME, "num_topk_groups", f"be between {lowest} and num_groups {num_groups}", num_topk_groups
        )


def _check_group_size(num_groups: int, num_topk_groups: int, num_experts: int) -> None:
    if num_groups > 0 and num_experts % num_groups != 0:
        raise argument_error(_NAME, "num_groups", f"divide the number of experts {num_experts}", num_groups)
    if num_groups == num_topk_groups:
        return
    if num_groups > WARP:
        raise argument_error(_NAME, "num_groups", f"be at most {WARP}", num_groups)
    size = num_experts // num_groups
    if not 2 <= size <= WARP:
        raise argument_error(
            _NAME, "num_groups", f"leave 2 to {WARP} experts to a group", f"{num_groups} of {size} experts"
        )


def _check_ranks(ep_rank: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int, num_physical: int) -> None:
    check_int(_NAME, "ep_rank", ep_rank, 0)
    check_int(_NAME, "tp_rank", tp_rank, 0)
    if not 1 <= num_ep_ranks <= num_physical:
        requirement = f"be between 1 and the number of physical experts {num_physical}"
        raise argument_error(_NAME, "num_ep_ranks", requirement, num_ep_ranks)
    check_int(_NAME, "num_tp_ranks", num_tp_ranks, 1)


def _columns(to_physical_map: torch.Tensor | None) -> int | None:
    return None if to_physical_map is None else to_physical_map.shape[1]


def _route(
    logits: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    fix_routing_mask: torch.Tensor | None,
    to_physical_map: torch.Tensor | None,
    logical_count: torch.Tensor | None,
    unmapped_topk_idx: torch.Tensor | None,
    num_topk: int,
    num_shared: int,
    num_groups: int,
    num_topk_groups: int,
    routed_scaling_factor: float,
    ep_rank: int,
    experts_per_rank: int,
    tp_rank: int,
    num_tp_ranks: int,
    scoring: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts = logits.shape[1]
    scores = _SCORES[scoring](logits)
    ranks = (logits if scoring == "softmax" else scores) + bias
    if num_groups != num_topk_groups:
        ranks = keep_best_groups(ranks, num_groups, num_topk_groups)
    experts = topk_gate_ref(ranks, num_topk)
    if fix_routing_mask is not None and unmapped_topk_idx is not None:
        experts = torch.where(fix_routing_mask[:, None], unmapped_topk_idx, experts)
    if unmapped_topk_idx is not None:
        unmapped_topk_idx.copy_(experts if mask is None else torch.where(mask.reshape(-1, 1), experts, -1))
    experts, taken = take_scores(scores, experts)
    weights = taken / sequential_sum(taken) * routed_scaling_factor
    experts, weights = append_shared(experts, weights, num_experts, num_shared)
    experts = map_to_physical(experts, ep_rank, to_physical_map, logical_count)
    experts = _keep_local(experts, experts_per_rank, tp_rank, num_tp_ranks)
    if mask is not None:
        experts = torch.where(mask.reshape(-1, 1), experts, -1)
        weights = torch.where(mask.reshape(-1, 1), weights, 0.0)
    return experts, weights


def _keep_local(experts: torch.Tensor, experts_per_rank: int, tp_rank: int, num_tp_ranks: int) -> torch.Tensor:
    """The numbers that experts have on this tensor-parallel rank, -1 for those of other ranks."""
    per_node = experts_per_rank * num_tp_ranks
    is_local = (experts >= 0) & (experts.div(experts_per_rank, rounding_mode="floor") % num_tp_ranks == tp_rank)
    shifted = experts - tp_rank * experts_per_rank
    local = shifted - shifted.div(per_node, rounding_mode="floor") * (per_node - experts_per_rank)
    return torch.where(is_local & (local >= 0), local, -1)


def _top2_sum_gate_cpu(
    logits: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    fix_routing_mask: torch.Tensor | None,
    to_physical_map: torch.Tensor | None,
    logical_count: torch.Tensor | None,
    unmapped_topk_idx: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_topk: int,
    *rest: Any,
) -> None:
    check_count_values(_NAME, to_physical_map, logical_count)
    if fix_routing_mask is not None:
        rows = fix_routing_mask if mask is None else fix_routing_mask & mask
        check_fixed_values(_NAME, unmapped_topk_idx, rows, logits.shape[1])
    routing = (mask, fix_routing_mask, to_physical_map, logical_count, unmapped_topk_idx)
    results = _route(logits, bias, *routing, num_topk, topk_idx.shape[1] - num_topk, *rest)
    topk_idx.copy_(results[0])
    topk_weights.copy_(results[1])


_top2_sum_gate = kernel(_NAME, cpu=_top2_sum_gate_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's settings for a few tokens, and the largest of them for many."""
    few, many = 36, 8192
    settings = [(few, num_experts, 0, 0, 6, "sigmoid") for num_experts in (16, 32, 36, 64, 72, 96, 108, 128, 144)]
    for scoring in _SCORES:
        settings += [(few, 256, 8, 8, 8, scoring), (few, 256, 8, 4, 8, scoring)]
        settings += [(many, 256, 8, 8, 8, scoring), (many, 256, 8, 4, 8, scoring)]
    return [_case(*setting) for setting in settings]


def _case(
    num_tokens: int, num_experts: int, num_groups: int, num_topk_groups: int, num_topk: int, scoring_func: str
) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {
            "logits": torch.randn((num_tokens, num_experts), device=device),
            "bias": torch.randn((num_experts,), device=device),
            "num_topk": num_topk,
            "num_topk_groups": num_topk_groups,
            "num_groups": num_groups,
            "use_shared_as_routed": False,
            "num_shared_experts": 0,
            "routed_scaling_factor": 1.5,
            "ep_rank": 0,
            "num_ep_ranks": 4,
            "tp_rank": 0,
            "num_tp_ranks": 2,
            "scoring_func": scoring_func,
        }

    params = {
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "num_groups": num_groups,
        "num_topk_groups": num_topk_groups,
        "num_topk": num_topk,
        "scoring_func": scoring_func,
    }
    return BenchCase(_NAME, params, make, 4 * num_tokens * num_experts + 4 * num_experts + 12 * num_tokens * num_topk)
