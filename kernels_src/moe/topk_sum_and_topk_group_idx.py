"""The groups of experts with the best sums of their one or two best scores.

A warp takes a token. The lanes of a group are the power of two that covers it in four scores a lane, so that
neighbouring lanes read neighbouring scores; each finds its two best, lanes exchange theirs, and then one lane per
group counts the groups before its own.
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
def _insert(best, second, at, key):
    """Put one more key into the two best."""
    second[at] = T.max(second[at], T.min(best[at], key))
    best[at] = T.max(best[at], key)


@kernel(axes=grid(form=forms(*_FORMS)), pass_configs=PASS_CONFIGS)
def topk_sum_and_topk_group_idx(form):
    """Write the topk_group_idx.shape[1] groups with the best sums of their num_topk_sum best scores, best first, to
    topk_group_idx."""
    vector, steps = _FORMS[form]
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
            sums = T.alloc_shared((_WARPS, WARP), "uint32")
            values = T.alloc_local((steps * vector,), "float32")
            best = T.alloc_local((steps,), "uint32")
            second = T.alloc_local((steps,), "uint32")
            group_key = T.alloc_local((1,), "uint32")
            rank = T.alloc_local((1,), "int32")
            width = T.alloc_var("int32")
            across = T.alloc_var("int32")
            num_chunks = T.alloc_var("int32")
            own_chunk = T.alloc_var("int32")
            own_group = T.alloc_var("int32")
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            token = block * _WARPS + warp
            num_chunks = T.truncdiv(group_size, vector)
            width = T.if_then_else(
                num_chunks <= 1, 1, T.if_then_else(num_chunks <= 2, 2, T.if_then_else(num_chunks <= 4, 4,
                T.if_then_else(num_chunks <= 8, 8, T.if_then_else(num_chunks <= 16, 16, 32)))),
            )  # fmt: skip
            # Variables, since a division inside an index would be one of 64 bits
            across = T.truncdiv(WARP, width)
            own_group = T.truncdiv(lane, width)
            own_chunk = lane - own_group * width
            if token < num_tokens:
                for first in T.serial(T.ceildiv(num_groups, across * steps)):
                    for j in T.unroll(steps):
                        best[j] = T.uint32(0)
                        second[j] = T.uint32(0)
                    for chunk in T.serial(T.ceildiv(num_chunks, width)):
                        for j in T.unroll(steps):
                            group = (first * steps + j) * across + own_group
                            if group < num_groups and chunk * width + own_chunk < num_chunks:
                                for i in T.vectorized(vector):
                                    values[j * vector + i] = scores[
                                        token, group, (chunk * width + own_chunk) * vector + i
                                    ]
                        for j in T.unroll(steps):
                            group = (first * steps + j) * across + own_group
                            if group < num_groups and chunk * width + own_chunk < num_chunks:
                                for i in T.unroll(vector):
                                    _insert(best, second, j, order_key(values[j * vector + i]))
                    for j in T.unroll(steps):
                        if (first * steps + j) * across < num_groups:
                            for i in T.unroll(5):
                                if (16 >> i) < width:
                                    other = T.shfl_xor(best[j], 16 >> i)
                                    second[j] = T.max(second[j], T.shfl_xor(second[j], 16 >> i))
                                    second[j] = T.max(second[j], T.min(best[j], other))
                                    best[j] = T.max(best[j], other)
                            group = (first * steps + j) * across + own_group
                            if group < num_groups and own_chunk == 0:
                                sums[warp, group] = order_key(
                                    T.if_then_else(
                                        num_topk_sum == 1,
                                        score_of_key(best[j]),
                                        T.call_extern(
                                            "float32", "tk::sum", score_of_key(best[j]), score_of_key(second[j])
                                        ),
                                    )
                                )
                T.sync_warp()
                group_key[0] = T.uint32(0)
                if lane < num_groups:
                    group_key[0] = sums[warp, lane]
                rank_groups(group_key, num_groups, lane, rank)
                if lane < num_groups and rank[0] < num_topk_groups:
                    topk_group_idx[token, rank[0]] = T.cast(lane, "int64")

    return main
