"""Routing of generation 1: score, rank with a bias, limit to the best groups, choose, normalise, map to physical and
local experts.

A warp takes a token and keeps its scores in registers. Presence of the optional tensors, grouping, counts and ranks
are branches at run time, uniform within a warp; the scoring function is an axis because it is the inner loop. The
scores of the few experts chosen are computed again from their logits, which costs less than keeping all of them.
"""

import tilelang.language as T

from ..common.device import include
from ..common.selecting import (
    PASS_CONFIGS,
    WARP,
    exists,
    keep_best_groups,
    load_offsets,
    load_scores,
    order_key,
    rank_keys,
    score_of_key,
    select_best,
    warp_max,
    warp_sum,
)
from ..declare import forms, grid, kernel

# form -> scores of a lane, blocks that a multiprocessor shall hold, whether all of them exist; warps of a block
_FORMS = {
    "full256": (8, 16, True),
    "experts256": (8, 16, False),
    "experts1024": (32, 4, False),
}
_WARPS = 4


_SCORES_OF_SLOTS = {"sigmoid": "tk::sigmoid_of_slots", "sqrtsoftplus": "tk::sqrt_softplus_of_slots"}


def _score(scoring, logit, largest, total):
    """The score of one logit; the last two are softmax's."""
    if scoring == "softmax":
        part = T.call_extern("float32", "tk::softmax_part", logit, largest)
        return T.call_extern("float32", "tk::quotient", part, total)
    return T.call_extern("float32", "tk::sigmoid" if scoring == "sigmoid" else "tk::sqrt_softplus", logit)


@T.macro
def _softmax_row(values, slots, num_experts, lane, largest, total):
    """The row's largest logit and the sum of exp(logit - largest), in the order of slots, then of warp_sum."""
    best = T.alloc_var("float32")
    best = values[0]
    for j in T.unroll(slots - 1):
        best = T.call_extern("float32", "fmaxf", best, values[j + 1])
    largest[0] = score_of_key(warp_max(order_key(best)))
    total[0] = T.float32(0)
    for j in T.unroll(slots):
        if exists(j, lane, num_experts):
            total[0] = T.call_extern(
                "float32", "tk::sum", total[0], T.call_extern("float32", "tk::softmax_part", values[j], largest[0])
            )
    warp_sum(total)


@T.macro
def _rank_scores(values, slots, scoring, bias, num_experts, lane):
    """values = score + bias; softmax ranks by logit + bias."""
    offsets = T.alloc_local((slots,), "float32")
    load_offsets(offsets, slots, bias, num_experts, lane)
    if scoring != "softmax":
        T.call_extern("handle", f"{_SCORES_OF_SLOTS[scoring]}<{slots}>", T.address_of(values[0]), num_experts)
    for j in T.unroll(slots):
        values[j] = T.call_extern("float32", "tk::sum", values[j], offsets[j])


@kernel(
    axes=grid(scoring_func=("sigmoid", "sqrtsoftplus", "softmax"), form=forms(*_FORMS)),
    pass_configs=PASS_CONFIGS,
)
def top2_sum_gate(scoring_func, form):
    """Route each token to its num_topk best experts within its best groups, and to the shared experts behind them."""
    slots, min_blocks, is_full = _FORMS[form]
    num_tokens, num_experts, num_slots = T.dynamic("num_tokens"), T.dynamic("num_experts"), T.dynamic("num_slots")
    num_unmapped, unmapped_stride = T.dynamic("num_unmapped"), T.dynamic("unmapped_stride", "int64")
    num_logical, num_replicas = T.dynamic("num_logical"), T.dynamic("num_replicas")

    @T.prim_func
    def main(
        logits: T.Tensor((num_tokens, num_experts), "float32"),
        bias: T.Tensor((num_experts,), "float32"),
        mask: T.Tensor((num_tokens,), "bool"),
        fix_routing_mask: T.Tensor((num_tokens,), "bool"),
        to_physical_map: T.Tensor((num_logical, num_replicas), "int32"),
        logical_count: T.Tensor((num_logical,), "int32"),
        unmapped_topk_idx: T.StridedTensor((num_tokens, num_unmapped), (unmapped_stride, 1), "int64"),
        topk_idx: T.Tensor((num_tokens, num_slots), "int64"),
        topk_weights: T.Tensor((num_tokens, num_slots), "float32"),
        num_topk: T.int32,
        num_groups: T.int32,
        num_topk_groups: T.int32,
        routed_scaling_factor: T.float32,
        ep_rank: T.int32,
        experts_per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        if is_full:
            T.assume(num_experts == slots * WARP)
        else:
            T.assume(num_experts <= slots * WARP)
        T.assume(num_topk >= 1)
        T.assume(num_topk <= num_experts)
        T.assume(num_topk <= num_slots)
        T.assume(num_slots <= WARP)
        T.assume(num_groups >= 0)
        T.assume(num_groups <= WARP)
        T.assume(num_unmapped == num_topk)
        T.assume(num_logical == num_experts + num_slots - num_topk)
        with T.Kernel(T.ceildiv(num_tokens, _WARPS), threads=_WARPS * WARP) as block:
            include("ranking.cuh", "scoring.cuh")
            T.annotate_min_blocks_per_sm(min_blocks)
            candidates = T.alloc_shared((_WARPS, slots * WARP), "uint64")
            chosen = T.alloc_shared((_WARPS, WARP), "int32")
            values = T.alloc_local((slots,), "float32")
            keys = T.alloc_local((slots,), "uint32")
            largest = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            is_active = T.alloc_var("bool")
            is_fixed = T.alloc_var("bool")
            expert = T.alloc_var("int32")
            score = T.alloc_var("float32")
            # A number where it is known: comparisons with it go
            experts = slots * WARP if is_full else num_experts
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            token = block * _WARPS + warp
            if token < num_tokens:
                load_scores(values, slots, logits, token, experts, lane)
                is_active = True
                if not T.isnullptr(mask.data):
                    is_active = mask[token]
                is_fixed = False
                if not T.isnullptr(fix_routing_mask.data):
                    is_fixed = fix_routing_mask[token]
                expert = -1
                score = T.float32(0)
                if is_active:
                    if scoring_func == "softmax":
                        _softmax_row(values, slots, experts, lane, largest, total)
                    if is_fixed:
                        if not T.isnullptr(unmapped_topk_idx.data):
                            if lane < num_topk:
                                given = unmapped_topk_idx[token, lane]
                                if given >= T.int64(0) and given < T.cast(experts, "int64"):
                                    expert = T.cast(given, "int32")
                    else:
                        _rank_scores(values, slots, scoring_func, bias, experts, lane)
                        rank_keys(keys, slots, values, experts, lane)
                        if num_groups != num_topk_groups:
                            keep_best_groups(keys, slots, experts, num_groups, num_topk_groups, candidates, warp, lane)
                        select_best(keys, slots, num_topk, candidates, chosen, warp, lane)
                        if lane < num_topk:
                            expert = chosen[warp, lane]
                    if expert >= 0:
                        score = _score(scoring_func, logits[token, expert], largest[0], total[0])
                if not T.isnullptr(unmapped_topk_idx.data):
                    if lane < num_topk and not (is_active and is_fixed):
                        unmapped_topk_idx[token, lane] = T.cast(expert, "int64")
                total[0] = T.float32(1e-20)
                for slot in T.serial(num_topk):
                    total[0] = T.call_extern("float32", "tk::sum", total[0], T.shfl_sync(score, slot))
                if lane < num_slots:
                    score = T.call_extern(
                        "float32",
                        "tk::product",
                        T.call_extern("float32", "tk::quotient", score, total[0]),
                        routed_scaling_factor,
                    )
                    if is_active and lane >= num_topk:
                        expert = experts + lane - num_topk
                        score = T.float32(1)
                    if not T.isnullptr(to_physical_map.data):
                        if not T.isnullptr(logical_count.data):
                            if expert >= 0:
                                replica = T.call_extern(
                                    "int64", "tk::replica_of", ep_rank, T.cast(token, "int64"), logical_count[expert]
                                )
                                if replica >= T.int64(0) and replica < T.cast(num_replicas, "int64"):
                                    expert = to_physical_map[expert, replica]
                                else:
                                    expert = -1
                    expert = T.call_extern("int32", "tk::local_expert", expert, experts_per_rank, tp_rank, num_tp_ranks)
                    topk_idx[token, lane] = T.cast(expert, "int64")
                    topk_weights[token, lane] = score

    return main
