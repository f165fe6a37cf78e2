"""How a warp ranks the scores of one token: the best experts, and the best groups of experts.

Lane l holds the scores of experts l, l + 32, l + 64, ... in registers, NaN for experts that do not exist. NaN ranks
below -inf, ties go to the smaller index. Needs warp.cuh, ranking.cuh and scoring.cuh; shared memory is private to a
warp.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T

WARP = 32

# Candidates beyond this are ties in all but adversarial rows: worth another pass that drops those that cannot be chosen
_MANY_CANDIDATES = 64

# Kernels that work by warp: bounds are tested by hand, shared memory is private to a warp, and the check of buffers
# for being written before they are read does not follow the loops.
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,
    "tl.disable_thread_storage_sync": True,
    "tl.disable_buffer_init_check": True,
}


def order_key(score: Any) -> Any:
    """An unsigned number that orders as scores do."""
    return T.call_extern("uint32", "tk::order_key", score)


def score_of_key(key: Any) -> Any:
    """The score of a key; NaN for those of NaN and of nothing."""
    return T.call_extern("float32", "tk::score_of_key", key)


def warp_max(value: Any) -> Any:
    """The largest of the lanes' unsigned numbers."""
    return T.call_extern("uint32", "tk::warp_max", value)


def warp_min(value: Any) -> Any:
    """The smallest of the lanes' unsigned numbers."""
    return T.call_extern("uint32", "tk::warp_min", value)


def lanes_below(ballot: Any) -> Any:
    """How many lanes before this one have their bit set."""
    return T.call_extern("int32", "tk::lanes_below", ballot)


def exists(slot, lane, num_experts):
    """Whether a lane's slot holds an expert."""
    return slot * WARP + lane < num_experts


@T.macro
def warp_sum(value):
    """value[0] = the sum over the lanes, the same bits in all of them: butterfly with distances 16, 8, 4, 2, 1."""
    for i in T.unroll(5):
        value[0] = T.call_extern("float32", "tk::sum", value[0], T.shfl_xor(value[0], 16 >> i))


@T.macro
def load_scores(target, slots, source, row, num_experts, lane):
    """target = a row of scores, NaN for what is not there: no maximum, no comparison takes it."""
    for j in T.unroll(slots):
        target[j] = T.if_then_else(exists(j, lane, num_experts), source[row, j * WARP + lane], T.float32(float("nan")))


@T.macro
def load_offsets(target, slots, source, num_experts, lane):
    """target = what is added to each expert's score, 0 where there is none."""
    for j in T.unroll(slots):
        target[j] = T.if_then_else(exists(j, lane, num_experts), source[j * WARP + lane], T.float32(0))


@T.macro
def rank_keys(keys, slots, values, num_experts, lane):
    """keys = what orders as the values do, 0 for experts that do not exist."""
    for j in T.unroll(slots):
        keys[j] = T.uint32(0)
        if exists(j, lane, num_experts):
            keys[j] = order_key(values[j])


@T.macro
def _best_of_lane(keys, slots, best):
    best[0] = keys[0]
    for j in T.unroll(slots - 1):
        best[0] = T.max(best[0], keys[j + 1])


def _gather(keys, slots, bound, candidates, warp, lane):
    """Write the keys that reach the bound, with their experts, to the warp's candidates; how many there are."""
    start = T.access_ptr(candidates[warp, 0], "w")
    return T.call_extern("int32", f"tk::gather_keys<{slots}>", T.address_of(keys[0]), bound, lane, start)


@T.macro
def _find_bound(keys, slots, num_topk, bound):
    """bound[0] = a key that at least num_topk experts reach; where lanes are tied, more of them than need be."""
    best = T.alloc_local((1,), "uint32")
    _best_of_lane(keys, slots, best)
    # Less one, so that the 0 of exhausted lanes is the largest number and leaves the minimum alone
    bound[0] = T.uint32(0xFFFFFFFF)
    for _ in T.serial(num_topk):
        top = warp_max(best[0])
        bound[0] = T.min(bound[0], top - T.uint32(1))
        best[0] = T.Select(best[0] == top, T.uint32(0), best[0])
    bound[0] = bound[0] + T.uint32(1)


@T.macro
def _gather_few(keys, slots, num_topk, num_candidates, candidates, warp, lane):
    """Candidates of rows with many ties: the bound counts tied lanes, and of its equals only as many are taken as
    there are places."""
    best = T.alloc_local((1,), "uint32")
    bound = T.alloc_local((1,), "uint32")
    num_found = T.alloc_var("int32")
    _best_of_lane(keys, slots, best)
    num_found = 0
    while num_found < num_topk:
        bound[0] = warp_max(best[0])
        num_found += T.cast(T.popcount(T.cast(T.ballot(best[0] == bound[0]), "uint32")), "int32")
        if best[0] == bound[0]:
            best[0] = T.uint32(0)
    num_candidates[0] = _gather(keys, slots, bound[0] + T.uint32(1), candidates, warp, lane)
    for j in T.unroll(slots):
        if num_candidates[0] < num_topk:
            ballot = T.cast(T.ballot(keys[j] == bound[0]), "uint32")
            if keys[j] == bound[0]:
                candidates[warp, num_candidates[0] + lanes_below(ballot)] = T.call_extern(
                    "uint64", "tk::key_with_index", keys[j], j * WARP + lane
                )
            num_candidates[0] += T.cast(T.popcount(ballot), "int32")


@T.macro
def select_best(keys, slots, num_topk, candidates, chosen, warp, lane):
    """chosen[warp, :num_topk] = the experts with the largest keys, largest first.

    Only keys that reach a lower bound of the num_topk-th largest are candidates, about num_topk of them; a
    candidate's place is the number of candidates before it. `candidates` has room for all experts of a warp's
    token."""
    bound = T.alloc_local((1,), "uint32")
    num_candidates = T.alloc_local((1,), "int32")
    mine = T.alloc_local((1,), "uint64")
    place = T.alloc_var("int32")
    _find_bound(keys, slots, num_topk, bound)
    num_candidates[0] = _gather(keys, slots, bound[0], candidates, warp, lane)
    if num_candidates[0] > _MANY_CANDIDATES:
        T.sync_warp()
        _gather_few(keys, slots, num_topk, num_candidates, candidates, warp, lane)
    T.sync_warp()
    for part in T.serial(T.ceildiv(num_candidates[0], WARP)):
        if part * WARP + lane < num_candidates[0]:
            mine[0] = candidates[warp, part * WARP + lane]
            place = 0
            for other in T.serial(num_candidates[0]):
                place += T.Select(candidates[warp, other] > mine[0], 1, 0)
            if place < num_topk:
                chosen[warp, place] = T.cast(T.call_extern("int64", "tk::index_of_key", mine[0]), "int32")
    T.sync_warp()


@T.macro
def rank_groups(group_key, num_groups, lane, rank):
    """rank[0] = how many groups come before this lane's."""
    rank[0] = 0
    for group in T.serial(num_groups):
        other = T.shfl_sync(group_key[0], group)
        rank[0] += T.if_then_else(other > group_key[0] or (other == group_key[0] and group < lane), 1, 0)


@T.macro
def _kept_groups(best, second, num_groups, num_topk_groups, lane, kept):
    """kept[0] = a bit for each group that is kept; best and second are the keys of this lane's group."""
    group_key = T.alloc_local((1,), "uint32")
    rank = T.alloc_local((1,), "int32")
    group_key[0] = T.uint32(0)
    if lane < num_groups:
        group_key[0] = order_key(T.call_extern("float32", "tk::sum", score_of_key(best), score_of_key(second)))
    rank_groups(group_key, num_groups, lane, rank)
    kept[0] = T.cast(T.ballot(lane < num_groups and rank[0] < num_topk_groups), "uint32")


@T.macro
def _keep_best_groups_of_warp_size(keys, slots, num_groups, num_topk_groups, lane):
    """keep_best_groups where a group is one slot of all lanes: 256 experts in 8 groups, say."""
    kept = T.alloc_local((1,), "uint32")
    best = T.alloc_var("uint32")
    second = T.alloc_var("uint32")
    best = T.uint32(0)
    second = T.uint32(0)
    for j in T.unroll(slots):
        if j < num_groups:
            top = warp_max(keys[j])
            is_top = T.cast(T.ballot(keys[j] == top), "uint32")
            rest = warp_max(T.Select(keys[j] == top, T.uint32(0), keys[j]))
            if lane == j:
                best = top
                second = T.Select(T.popcount(is_top) > 1, top, rest)
    _kept_groups(best, second, num_groups, num_topk_groups, lane, kept)
    for j in T.unroll(slots):
        if j < num_groups:
            if T.bitwise_and(kept[0], T.uint32(1 << j)) == T.uint32(0):
                keys[j] = order_key(T.float32(float("-inf")))


@T.macro
def _keep_best_groups_of_any_size(keys, slots, num_experts, num_groups, num_topk_groups, shared, warp, lane):
    """keep_best_groups where a lane takes a group; it starts somewhere in the middle, so that lanes meet different
    banks."""
    kept = T.alloc_local((1,), "uint32")
    best = T.alloc_var("uint32")
    second = T.alloc_var("uint32")
    size = T.alloc_var("int32")
    offset = T.alloc_var("int32")
    group = T.alloc_var("int32")
    size = T.truncdiv(num_experts, num_groups)
    for j in T.unroll(slots):
        if exists(j, lane, num_experts):
            shared[warp, j * WARP + lane] = T.cast(keys[j], "uint64")
    T.sync_warp()
    best = T.uint32(0)
    second = T.uint32(0)
    offset = T.truncmod(lane, size)
    if lane < num_groups:
        for _ in T.serial(size):
            key = T.cast(shared[warp, lane * size + offset], "uint32")
            second = T.max(second, T.min(best, key))
            best = T.max(best, key)
            offset = T.if_then_else(offset + 1 == size, 0, offset + 1)
    _kept_groups(best, second, num_groups, num_topk_groups, lane, kept)
    group = T.truncdiv(lane, size)
    offset = T.truncmod(lane, size)
    for j in T.unroll(slots):
        if exists(j, lane, num_experts):
            if T.bitwise_and(T.shift_right(kept[0], T.cast(group, "uint32")), T.uint32(1)) == T.uint32(0):
                keys[j] = order_key(T.float32(float("-inf")))
        group += T.truncdiv(WARP, size)
        offset += T.truncmod(WARP, size)
        if offset >= size:
            offset -= size
            group += 1
    T.sync_warp()


@T.macro
def keep_best_groups(keys, slots, num_experts, num_groups, num_topk_groups, shared, warp, lane):
    """keys = that of -inf in all but the num_topk_groups groups of neighbouring experts whose two best scores have the
    largest sum.

    `shared` has room for all experts of a warp's token, and may serve select_best afterwards."""
    if num_groups * WARP == num_experts:
        _keep_best_groups_of_warp_size(keys, slots, num_groups, num_topk_groups, lane)
    else:
        _keep_best_groups_of_any_size(keys, slots, num_experts, num_groups, num_topk_groups, shared, warp, lane)
