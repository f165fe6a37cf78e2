"""The indices of each token's highest expert scores, best first, ties to the smaller index; NaN ranks below -inf.

A warp takes a token. The k-th best of its lanes' maxima bounds the k-th best score from below, so only scores that
reach the bound (about k of them) are candidates; each candidate's place is the number of candidates before it. Three
forms keep up to 256, 512 and 1024 scores in registers; the general form reads the row once for every place, for any
number of experts. On an H200 8001 x 256, k = 8 takes 5.8 us (6.4 without a form for 256, 7.4 before the candidates of a
lane were counted ahead of the stores, 8.1 with two waves of blocks), 8001 x 72, k = 6 takes 4.6 us; a same-size copy
5.9 and 4.5.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import forms, grid, kernel

_WARP = 32
# form -> scores of a lane, warps of a block, blocks that a multiprocessor shall hold; full256: all of them exist
_FORMS = {
    "full256": (8, 4, 16),
    "experts256": (8, 4, 16),
    "experts512": (16, 4, 8),
    "experts1024": (32, 4, 4),
    "general": (0, 4, 8),
}


def _order_key(score):
    return T.call_extern("uint32", "tk::order_key", score)


def _warp_max(value):
    return T.call_extern("uint32", "tk::warp_max", value)


def _warp_min(value):
    return T.call_extern("uint32", "tk::warp_min", value)


@T.macro
def _find_bound(keys, slots, num_topk, best, bound):
    """bound[0] = a key that at least num_topk scores of the row reach; more of them where lanes are tied."""
    best[0] = keys[0]
    for slot in T.unroll(slots - 1):
        best[0] = T.max(best[0], keys[slot + 1])
    # Less one, so that the 0 of exhausted lanes is the largest number and leaves the minimum alone
    bound[0] = T.uint32(0xFFFFFFFF)
    for _ in T.serial(num_topk):
        top = _warp_max(best[0])
        bound[0] = T.min(bound[0], top - T.uint32(1))
        best[0] = T.Select(best[0] == top, T.uint32(0), best[0])
    bound[0] = bound[0] + T.uint32(1)


@T.macro
def _select(scores, topk_idx, token, num_experts, num_topk, slots, candidates, warp, lane):
    """One warp's work on one token; `candidates` is its place for keys with indices in shared memory."""
    keys = T.alloc_local((slots,), "uint32")
    best = T.alloc_local((1,), "uint32")
    bound = T.alloc_local((1,), "uint32")
    mine = T.alloc_local((1,), "uint64")
    place = T.alloc_var("int32")
    for slot in T.unroll(slots):
        keys[slot] = T.uint32(0)
        if slot * _WARP + lane < num_experts:
            keys[slot] = _order_key(scores[token, slot * _WARP + lane])
    _find_bound(keys, slots, num_topk, best, bound)
    num_candidates = T.call_extern(
        "int32",
        f"tk::gather_keys<{slots}>",
        T.address_of(keys[0]),
        bound[0],
        lane,
        T.access_ptr(candidates[warp, 0], "w"),
    )
    T.sync_warp()
    for part in T.serial(T.ceildiv(num_candidates, _WARP)):
        if part * _WARP + lane < num_candidates:
            mine[0] = candidates[warp, part * _WARP + lane]
            place = 0
            for other in T.serial(num_candidates):
                place += T.Select(candidates[warp, other] > mine[0], 1, 0)
            if place < num_topk:
                topk_idx[token, place] = T.call_extern("int64", "tk::index_of_key", mine[0])


@T.macro
def _scan(scores, topk_idx, token, num_experts, num_topk, lane):
    """Place after place: the best score that comes after the previous one."""
    previous_key = T.alloc_var("uint32")
    previous = T.alloc_var("int32")
    best_key = T.alloc_var("uint32")
    best = T.alloc_var("uint32")
    previous_key = T.uint32(0xFFFFFFFF)  # of +inf
    previous = -1
    for place in T.serial(num_topk):
        best_key = T.uint32(0)
        best = T.uint32(0)
        for j in T.serial(T.ceildiv(num_experts, _WARP)):
            expert = j * _WARP + lane
            if expert < num_experts:
                key = _order_key(scores[token, expert])
                if key > best_key and (key < previous_key or (key == previous_key and expert > previous)):
                    best_key = key
                    best = T.cast(expert, "uint32")
        previous_key = _warp_max(best_key)
        previous = T.cast(_warp_min(T.if_then_else(best_key == previous_key, best, T.uint32(0xFFFFFFFF))), "int32")
        if lane == 0:
            topk_idx[token, place] = T.cast(previous, "int64")


@kernel(
    axes=grid(form=forms(*_FORMS)),
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_thread_storage_sync": True,  # shared memory is private to a warp
        "tl.disable_buffer_init_check": True,  # it does not follow the loops
    },
)
def topk_gate(form):
    """Write the indices of each token's topk_idx.shape[1] highest scores, best first, ties to the smaller index."""
    slots, warps, min_blocks = _FORMS[form]
    num_tokens, num_experts, num_topk = T.dynamic("num_tokens"), T.dynamic("num_experts"), T.dynamic("num_topk")

    @T.prim_func
    def main(
        scores: T.Tensor((num_tokens, num_experts), "float32"), topk_idx: T.Tensor((num_tokens, num_topk), "int64")
    ):
        T.assume(num_topk <= num_experts)
        if form == "full256":
            T.assume(num_experts == slots * _WARP)
        elif slots > 0:
            T.assume(num_experts <= slots * _WARP)
        if slots > 0:
            T.assume(num_topk <= _WARP)
        with T.Kernel(T.ceildiv(num_tokens, warps), threads=warps * _WARP) as block:
            include("warp.cuh")
            T.annotate_min_blocks_per_sm(min_blocks)
            lane = T.get_thread_binding() % _WARP
            warp = T.get_thread_binding() // _WARP
            token = block * warps + warp
            # A number where it is known: comparisons with it go
            experts = slots * _WARP if form == "full256" else num_experts
            if slots > 0:
                candidates = T.alloc_shared((warps, slots * _WARP), "uint64")
                if token < num_tokens:
                    _select(scores, topk_idx, token, experts, num_topk, slots, candidates, warp, lane)
            else:
                if token < num_tokens:
                    _scan(scores, topk_idx, token, num_experts, num_topk, lane)

    return main
