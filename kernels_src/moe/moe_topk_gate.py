"""Routing of generation 2 by sqrt(softplus) scores, with masked, fixed, image and random tokens; and its gradient.

Forward: a warp takes a token as in top2_sum_gate; what is absent costs a uniform branch. Backward: a warp takes a
token, places the coefficients of its chosen experts in shared memory and walks the row. Sums are taken in a fixed
order, so equal inputs give equal bytes.
"""

import tilelang.language as T

from ..common.device import include
from ..common.selecting import (
    PASS_CONFIGS,
    WARP,
    exists,
    load_offsets,
    load_scores,
    rank_keys,
    select_best,
    warp_min,
    warp_sum,
)
from ..declare import forms, grid, kernel

# form -> scores of a lane, blocks that a multiprocessor shall hold; warps of a block
_FORMS = {
    "experts256": (8, 16),
    "experts512": (16, 8),
    "experts1024": (32, 4),
}
_WARPS = 4
# Backward: loads in flight of a lane, blocks that a multiprocessor shall hold, and the most experts
_STEPS = 8
_BACKWARD_BLOCKS = 10
_MAX_EXPERTS = 1024


def _rounded(name, x, y):
    """One operation in fp32, never fused with another: sum, difference, product, quotient."""
    return T.call_extern("float32", f"tk::{name}", x, y)


@T.macro
def _store_scores(scores, values, slots, token, num_experts, lane):
    for j in T.unroll(slots):
        if exists(j, lane, num_experts):
            scores[token, j * WARP + lane] = values[j]


@T.macro
def _draw_experts(logical_count, num_logical, token, num_slots, ep_rank, lane, expert, weight):
    """Distinct random physical experts for the lanes below num_slots, and weights in (0, 1].

    Lane l draws c in [0, total - l). The smallest c is fixed, the higher lanes that are left step over it, and so
    on."""
    draws = T.alloc_local((2,), "uint32")
    total = T.alloc_var("int32")
    drawn = T.alloc_var("uint32")
    smallest = T.alloc_var("uint32")
    first = T.alloc_var("int32")
    is_open = T.alloc_var("bool")
    total = num_logical
    if not T.isnullptr(logical_count.data):
        total = 0
        for i in T.serial(T.ceildiv(num_logical, WARP)):
            if exists(i, lane, num_logical):
                total += logical_count[i * WARP + lane]
        for i in T.unroll(5):
            total += T.shfl_xor(total, 16 >> i)
    T.call_extern(
        "handle",
        "tk::draw_two",
        T.cast(ep_rank, "int64"),
        T.cast(token, "int64") * T.int64(WARP) + T.cast(lane, "int64"),
        T.address_of(draws[0]),
    )
    weight[0] = T.call_extern("float32", "tk::uniform", draws[0])
    is_open = lane < num_slots and lane < total
    expert[0] = -1
    drawn = T.uint32(0)
    if is_open:
        drawn = T.truncmod(draws[1], T.cast(total - lane, "uint32"))
    for _ in T.serial(num_slots):
        smallest = warp_min(T.if_then_else(is_open, drawn, T.uint32(0xFFFFFFFF)))
        first = T.call_extern("int32", "__ffs", T.cast(T.ballot(is_open and drawn == smallest), "int32")) - 1
        if is_open:
            if lane == first:
                expert[0] = T.cast(drawn, "int32")
                is_open = False
            else:
                if lane > first:
                    drawn += T.uint32(1)


@kernel(axes=grid(form=forms(*_FORMS)), pass_configs=PASS_CONFIGS)
def moe_topk_gate_forward(form):
    """Route each token to its num_topk best experts by sqrt(softplus(logit)) + bias, and to the shared experts
    behind them."""
    slots, min_blocks = _FORMS[form]
    num_tokens, num_experts, num_slots = T.dynamic("num_tokens"), T.dynamic("num_experts"), T.dynamic("num_slots")
    num_unmapped, unmapped_stride = T.dynamic("num_unmapped"), T.dynamic("unmapped_stride", "int64")
    num_logical, num_replicas = T.dynamic("num_logical"), T.dynamic("num_replicas")

    @T.prim_func
    def main(
        logits: T.Tensor((num_tokens, num_experts), "float32"),
        mask: T.Tensor((num_tokens,), "bool"),
        bias: T.Tensor((num_experts,), "float32"),
        image_bias: T.Tensor((num_experts,), "float32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        fix_routing_mask: T.Tensor((num_tokens,), "bool"),
        to_physical_map: T.Tensor((num_logical, num_replicas), "int32"),
        logical_count: T.Tensor((num_logical,), "int32"),
        unmapped_topk_idx: T.StridedTensor((num_tokens, num_unmapped), (unmapped_stride, 1), "int64"),
        force_random: T.Tensor((num_tokens,), "bool"),
        topk_idx: T.Tensor((num_tokens, num_slots), "int64"),
        topk_weights: T.Tensor((num_tokens, num_slots), "float32"),
        scores: T.Tensor((num_tokens, num_experts), "float32"),
        num_topk: T.int32,
        routed_scaling_factor: T.float32,
        ep_rank: T.int32,
    ):
        T.assume(num_experts <= slots * WARP)
        T.assume(num_topk >= 1)
        T.assume(num_topk <= num_experts)
        T.assume(num_topk <= num_slots)
        T.assume(num_slots <= WARP)
        T.assume(num_unmapped == num_topk)
        T.assume(num_logical == num_experts + num_slots - num_topk)
        with T.Kernel(T.ceildiv(num_tokens, _WARPS), threads=_WARPS * WARP) as block:
            include("ranking.cuh", "scoring.cuh", "philox.cuh")
            T.annotate_min_blocks_per_sm(min_blocks)
            candidates = T.alloc_shared((_WARPS, slots * WARP), "uint64")
            chosen = T.alloc_shared((_WARPS, WARP), "int32")
            values = T.alloc_local((slots,), "float32")
            keys = T.alloc_local((slots,), "uint32")
            offsets = T.alloc_local((slots,), "float32")
            expert = T.alloc_local((1,), "int32")
            score = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            is_active = T.alloc_var("bool")
            is_random = T.alloc_var("bool")
            is_fixed = T.alloc_var("bool")
            is_image = T.alloc_var("bool")
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            token = block * _WARPS + warp
            if token < num_tokens:
                load_scores(values, slots, logits, token, num_experts, lane)
                is_active = True
                if not T.isnullptr(mask.data):
                    is_active = mask[token]
                is_random = False
                if not T.isnullptr(force_random.data):
                    is_random = is_active and force_random[token]
                is_fixed = False
                if not T.isnullptr(fix_routing_mask.data):
                    is_fixed = fix_routing_mask[token]
                is_image = False
                if not T.isnullptr(image_token_mask.data):
                    is_image = image_token_mask[token]
                expert[0] = -1
                score[0] = T.float32(0)
                if is_active and not is_random:
                    T.call_extern(
                        "handle", f"tk::sqrt_softplus_of_slots<{slots}>", T.address_of(values[0]), num_experts
                    )
                    if not T.isnullptr(scores.data):
                        _store_scores(scores, values, slots, token, num_experts, lane)
                    if is_fixed:
                        if not T.isnullptr(unmapped_topk_idx.data):
                            if lane < num_topk:
                                given = unmapped_topk_idx[token, lane]
                                if given >= T.int64(0) and given < T.cast(num_experts, "int64"):
                                    expert[0] = T.cast(given, "int32")
                    else:
                        # Behind the scores, which leave no registers for them
                        for j in T.unroll(slots):
                            offsets[j] = T.float32(0)
                        if is_image:
                            if not T.isnullptr(image_bias.data):
                                load_offsets(offsets, slots, image_bias, num_experts, lane)
                        else:
                            if not T.isnullptr(bias.data):
                                load_offsets(offsets, slots, bias, num_experts, lane)
                        for j in T.unroll(slots):
                            values[j] = _rounded("sum", values[j], offsets[j])
                        rank_keys(keys, slots, values, num_experts, lane)
                        select_best(keys, slots, num_topk, candidates, chosen, warp, lane)
                        if lane < num_topk:
                            expert[0] = chosen[warp, lane]
                    if expert[0] >= 0:
                        score[0] = T.call_extern("float32", "tk::sqrt_softplus", logits[token, expert[0]])
                else:
                    if not T.isnullptr(scores.data):
                        for j in T.unroll(slots):
                            values[j] = T.float32(0)
                        _store_scores(scores, values, slots, token, num_experts, lane)
                if not T.isnullptr(unmapped_topk_idx.data):
                    if lane < num_topk and (is_random or not (is_active and is_fixed)):
                        unmapped_topk_idx[token, lane] = T.cast(expert[0], "int64")
                if is_random:
                    _draw_experts(
                        logical_count,
                        num_experts + num_slots - num_topk,
                        token,
                        num_slots,
                        ep_rank,
                        lane,
                        expert,
                        score,
                    )
                    if lane < num_slots:
                        topk_idx[token, lane] = T.cast(expert[0], "int64")
                        topk_weights[token, lane] = score[0]
                else:
                    total[0] = score[0]
                    warp_sum(total)
                    total[0] = _rounded("sum", total[0], T.float32(1e-20))
                    if lane < num_slots:
                        score[0] = _rounded("product", _rounded("quotient", score[0], total[0]), routed_scaling_factor)
                        if is_active and lane >= num_topk:
                            expert[0] = num_experts + lane - num_topk
                            score[0] = T.float32(1)
                        if not T.isnullptr(to_physical_map.data):
                            if not T.isnullptr(logical_count.data):
                                if expert[0] >= 0:
                                    replica = T.call_extern(
                                        "int64",
                                        "tk::replica_of",
                                        ep_rank,
                                        T.cast(token, "int64"),
                                        logical_count[expert[0]],
                                    )
                                    if replica >= T.int64(0) and replica < T.cast(num_replicas, "int64"):
                                        expert[0] = to_physical_map[expert[0], replica]
                                    else:
                                        expert[0] = -1
                        topk_idx[token, lane] = T.cast(expert[0], "int64")
                        topk_weights[token, lane] = score[0]

    return main


@T.macro
def _place_coefficients(
    scores,
    topk_idx,
    topk_weights,
    grad_topk_weights,
    token,
    num_experts,
    num_topk,
    routed_scaling_factor,
    coefficients,
    terms,
    warp,
    lane,
):
    """coefficients[warp, e] = (routed_scaling_factor * grad - dot) / total, summed over its slots in their order."""
    total = T.alloc_local((1,), "float32")
    dot = T.alloc_local((1,), "float32")
    expert = T.alloc_var("int32")
    grad = T.alloc_var("float32")
    term = T.alloc_var("float32")
    same = T.alloc_var("uint32")
    for j in T.serial(T.ceildiv(num_experts, WARP)):
        if exists(j, lane, num_experts):
            coefficients[warp, j * WARP + lane] = T.float32(0)
    expert = -1
    grad = T.float32(0)
    dot[0] = T.float32(0)
    total[0] = T.float32(0)
    if lane < num_topk:
        given = topk_idx[token, lane]
        if given >= T.int64(0) and given < T.cast(num_experts, "int64"):
            expert = T.cast(given, "int32")
            grad = grad_topk_weights[token, lane]
            dot[0] = _rounded("product", grad, topk_weights[token, lane])
            total[0] = scores[token, expert]
    warp_sum(dot)
    warp_sum(total)
    total[0] = _rounded("sum", total[0], T.float32(1e-20))
    term = _rounded(
        "quotient", _rounded("difference", _rounded("product", routed_scaling_factor, grad), dot[0]), total[0]
    )
    terms[warp, lane] = term
    same = T.cast(T.match_any_sync(expert), "uint32")
    T.sync_warp()
    if expert >= 0:
        # The first lane of an expert adds for all of them
        if T.call_extern("int32", "tk::lanes_below", same) == 0:
            same = T.bitwise_and(same, same - T.uint32(1))
            while same != T.uint32(0):
                term = _rounded("sum", term, terms[warp, T.call_extern("int32", "__ffs", T.cast(same, "int32")) - 1])
                same = T.bitwise_and(same, same - T.uint32(1))
            coefficients[warp, expert] = term
    T.sync_warp()


@kernel(pass_configs=PASS_CONFIGS)
def moe_topk_gate_backward():
    """Write the gradient of the logits, from the scores that the forward call saved, to grad_logits."""
    num_tokens, num_experts, num_topk = T.dynamic("num_tokens"), T.dynamic("num_experts"), T.dynamic("num_topk")
    num_seqs = T.dynamic("num_seqs")

    @T.prim_func
    def main(
        scores: T.Tensor((num_tokens, num_experts), "float32"),
        topk_idx: T.Tensor((num_tokens, num_topk), "int64"),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        grad_topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        mask: T.Tensor((num_tokens,), "bool"),
        grad_scores_sum: T.Tensor((num_seqs, num_experts), "float32"),
        grad_logits: T.Tensor((num_tokens, num_experts), "float32"),
        routed_scaling_factor: T.float32,
    ):
        T.assume(num_experts <= _MAX_EXPERTS)
        T.assume(num_topk <= WARP)
        T.assume(num_topk <= num_experts)
        T.assume(num_seqs >= 1)
        T.assume(num_tokens % num_seqs == 0)
        with T.Kernel(T.ceildiv(num_tokens, _WARPS), threads=_WARPS * WARP) as block:
            include("ranking.cuh", "scoring.cuh")
            T.annotate_min_blocks_per_sm(_BACKWARD_BLOCKS)
            coefficients = T.alloc_shared((_WARPS, _MAX_EXPERTS), "float32")
            terms = T.alloc_shared((_WARPS, WARP), "float32")
            values = T.alloc_local((_STEPS,), "float32")
            extras = T.alloc_local((_STEPS,), "float32")
            score_sum = T.alloc_local((1,), "float32")
            extra_sum = T.alloc_local((1,), "float32")
            inverse = T.alloc_var("float32")
            shift = T.alloc_var("float32")
            seq = T.alloc_var("int32")
            has_aux = T.alloc_var("bool")
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            token = block * _WARPS + warp
            if token < num_tokens:
                _place_coefficients(
                    scores,
                    topk_idx,
                    topk_weights,
                    grad_topk_weights,
                    token,
                    num_experts,
                    num_topk,
                    routed_scaling_factor,
                    coefficients,
                    terms,
                    warp,
                    lane,
                )
                has_aux = False
                inverse = T.float32(0)
                shift = T.float32(0)
                seq = 0
                if not T.isnullptr(mask.data):
                    if not T.isnullptr(grad_scores_sum.data):
                        has_aux = mask[token]
                        if has_aux:
                            seq = T.truncdiv(token, T.truncdiv(num_tokens, num_seqs))
                            score_sum[0] = T.float32(0)
                            extra_sum[0] = T.float32(0)
                            for j in T.serial(T.ceildiv(num_experts, WARP)):
                                if exists(j, lane, num_experts):
                                    score = scores[token, j * WARP + lane]
                                    score_sum[0] = _rounded("sum", score_sum[0], score)
                                    extra_sum[0] = _rounded(
                                        "sum",
                                        extra_sum[0],
                                        _rounded("product", grad_scores_sum[seq, j * WARP + lane], score),
                                    )
                            warp_sum(score_sum)
                            warp_sum(extra_sum)
                            inverse = _rounded("quotient", T.float32(1), score_sum[0])
                            shift = _rounded("product", extra_sum[0], inverse)
                for step in T.serial(T.ceildiv(num_experts, _STEPS * WARP)):
                    for j in T.unroll(_STEPS):
                        values[j] = T.if_then_else(
                            exists(step * _STEPS + j, lane, num_experts),
                            scores[token, (step * _STEPS + j) * WARP + lane],
                            T.float32(0),
                        )
                        extras[j] = T.float32(0)
                    if has_aux:
                        if not T.isnullptr(grad_scores_sum.data):
                            for j in T.unroll(_STEPS):
                                extras[j] = T.if_then_else(
                                    exists(step * _STEPS + j, lane, num_experts),
                                    grad_scores_sum[seq, (step * _STEPS + j) * WARP + lane],
                                    T.float32(0),
                                )
                                extras[j] = _rounded("product", _rounded("difference", extras[j], shift), inverse)
                    for j in T.unroll(_STEPS):
                        if exists(step * _STEPS + j, lane, num_experts):
                            grad_logits[token, (step * _STEPS + j) * WARP + lane] = _rounded(
                                "product",
                                _rounded("sum", coefficients[warp, (step * _STEPS + j) * WARP + lane], extras[j]),
                                T.call_extern("float32", "tk::sqrt_softplus_slope", values[j]),
                            )

    return main
