"""The groups of experts with the best sums of their one or two best scores.

A warp takes a token, and as many lanes a group as leave one for each of the others: for 8 groups of 9 experts that is
4 lanes with three scores, and two exchanges of their two best where 16 lanes with one score took four exchanges for
each pair of groups. Then one lane per group counts the groups before its own.
"""

import tilelang.language as T

from ..common.device import include
from ..common.selecting import PASS_CONFIGS, WARP, order_key, rank_groups, score_of_key
from ..declare import forms, grid, kernel

# form -> scores of a lane read at once (16 bytes where the group's size and the address allow it), and how many such
# reads are in flight: together they cover 256 and 128 experts
_FORMS = {"aligned": (4, 2), "general": (1, 4)}
_WARPS = 4
_MIN_BLOCKS = 10  # that a multiprocessor shall hold


@T.macro
def _insert(best, second, key):
    """Put one more key into the two best."""
    second[0] = T.max(second[0], T.min(best[0], key))
    best[0] = T.max(best[0], key)


def _lane_shift(num_groups):
    """A group has 1 << this lanes, the largest power of two that leaves as many to each."""
    return T.if_then_else(
        num_groups <= 1, 5, T.if_then_else(num_groups <= 2, 4, T.if_then_else(num_groups <= 4, 3,
        T.if_then_else(num_groups <= 8, 2, T.if_then_else(num_groups <= 16, 1, 0)))),
    )  # fmt: skip


@kernel(axes=grid(form=forms(*_FORMS)), pass_configs=PASS_CONFIGS)
def topk_sum_and_topk_group_idx(form):
    """Write the topk_group_idx.shape[1] groups with the best sums of their num_topk_sum best scores, best first, to
    topk_group_idx."""
    vector, steps = _FORMS[form]
    step_shift = steps.bit_length() - 1
    num_tokens, num_groups, group_size = T.dynamic("num_tokens"), T.dynamic("num_groups"), T.dynamic("group_size")
    num_topk_groups = T.dynamic("num_topk_groups")

    @T.prim_func
    def main(
        scores: T.Tensor((num_tokens, num_groups, group_size), "float32"),
        topk_group_idx: T.Tensor((num_tokens, num_topk_groups), "int64"),
        num_topk_sum: T.int32,
    ):
        T.assume(num_groups <= WARP)
        T.assume(num_topk_groups <= num_groups)
        T.assume(num_topk_sum >= 1)
        T.assume(num_topk_sum <= 2)
        T.assume(num_topk_sum <= group_size)
        if vector > 1:
            T.assume(group_size % vector == 0)
        with T.Kernel(T.ceildiv(num_tokens, _WARPS), threads=_WARPS * WARP) as block:
            include("ranking.cuh", "scoring.cuh")
            T.annotate_min_blocks_per_sm(_MIN_BLOCKS)
            values = T.alloc_local((steps * vector,), "float32")
            best = T.alloc_local((1,), "uint32")
            second = T.alloc_local((1,), "uint32")
            group_key = T.alloc_local((1,), "uint32")
            rank = T.alloc_local((1,), "int32")
            shift = T.alloc_var("int32")
            num_chunks = T.alloc_var("int32")
            own_chunk = T.alloc_var("int32")
            own_group = T.alloc_var("int32")
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            token = block * _WARPS + warp
            num_chunks = T.truncdiv(group_size, vector)
            shift = _lane_shift(num_groups)
            own_group = T.shift_right(lane, shift)
            own_chunk = lane - T.shift_left(own_group, shift)
            if token < num_tokens:
                best[0] = T.uint32(0)
                second[0] = T.uint32(0)
                for part in T.serial(
                    T.shift_right(num_chunks + steps * T.shift_left(1, shift) - 1, shift + step_shift)
                ):
                    for j in T.unroll(steps):
                        if own_group < num_groups and T.shift_left(part * steps + j, shift) + own_chunk < num_chunks:
                            for i in T.vectorized(vector):
                                values[j * vector + i] = scores[
                                    token, own_group, (T.shift_left(part * steps + j, shift) + own_chunk) * vector + i
                                ]
                    for j in T.unroll(steps):
                        if own_group < num_groups and T.shift_left(part * steps + j, shift) + own_chunk < num_chunks:
                            for i in T.unroll(vector):
                                _insert(best, second, order_key(values[j * vector + i]))
                for i in T.unroll(5):
                    if (16 >> i) < T.shift_left(1, shift):
                        other = T.shfl_xor(best[0], 16 >> i)
                        second[0] = T.max(second[0], T.shfl_xor(second[0], 16 >> i))
                        second[0] = T.max(second[0], T.min(best[0], other))
                        best[0] = T.max(best[0], other)
                group_key[0] = order_key(
                    T.if_then_else(
                        num_topk_sum == 1,
                        score_of_key(best[0]),
                        T.call_extern("float32", "tk::sum", score_of_key(best[0]), score_of_key(second[0])),
                    )
                )
                # From the first lane of a group to that of its number
                group_key[0] = T.shfl_sync(group_key[0], T.bitwise_and(T.shift_left(lane, shift), WARP - 1))
                rank_groups(group_key, num_groups, lane, rank)
                if lane < num_groups and rank[0] < num_topk_groups:
                    topk_group_idx[token, rank[0]] = T.cast(lane, "int64")

    return main
