"""Router of a mixture of experts in one kernel: logits = hidden_states x gate_weight^T, scores, choice and weights.

The blocks of a cluster share the columns of hidden_states: each multiplies its part for a tile of tokens and all
experts (TMA and wgmma, as in gemm/matmul.py), then each adds up, through distributed shared memory, and ranks the
tokens of its rank, a warp a token. Logits never leave the multiprocessors.

On an H200, cold L2, against torch's linear, softmax and topk: 4096 x 7168 x 256 takes 71 us (105, its linear alone 30),
16384 x 7168 x 256 175 us (333). A block of 128 tokens and 256 experts reads 1.4 MB, 176 MB over all blocks, which is 32
us of the L2; its tensor cores need 16 us however few the tokens are, so below 256 tokens torch is faster (26 us for
128). What would help: one load of the weights for two tiles of tokens (TMA multicast), tiles of 16 tokens for few.
"""

import tilelang.language as T

from ..common.device import include
from ..common.selecting import (
    PASS_CONFIGS,
    WARP,
    exists,
    load_offsets,
    order_key,
    rank_keys,
    score_of_key,
    select_best,
    warp_max,
    warp_sum,
)
from ..declare import forms, grid, kernel

_K = 64  # columns in a stage
_WARP_GROUP = 128
_GROUPS = 2  # warp groups that multiply
_THREADS = _GROUPS * _WARP_GROUP
_WARPS = _THREADS // WARP
# form -> tokens of a tile, experts, stages, blocks of a cluster
_FORMS = {
    "experts64": (128, 64, 8, 4),
    "experts128": (128, 128, 6, 4),
    "experts256": (128, 256, 4, 4),
    "experts512": (64, 512, 2, 4),
}


def _rounded(name, x, y):
    """One operation in fp32, never fused with another: sum, difference, product, quotient."""
    return T.call_extern("float32", f"tk::{name}", x, y)


@T.macro
def _load_logits(values, slots, split, part, pitch, row, num_experts, lane):
    """values = the sums over the cluster of a row of logits, NaN for experts that do not exist."""
    for j in T.unroll(slots):
        values[j] = T.float32(float("nan"))
        if exists(j, lane, num_experts):
            values[j] = T.call_extern(
                "float32", f"tk::sum_of_cluster<{split}>", T.access_ptr(part[row * pitch + j * WARP + lane], "r")
            )


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
            total[0] = _rounded("sum", total[0], T.call_extern("float32", "tk::softmax_part", values[j], largest[0]))
    warp_sum(total)


@kernel(axes=grid(form=forms(*_FORMS)), archs=("sm_90a",), pass_configs=PASS_CONFIGS)
def fused_topk_gating(form):
    """Multiply hidden_states by the transpose of gate_weight, and route each token to its topk_idx.shape[1] best
    experts."""
    rows, experts, stages, split = _FORMS[form]
    slots, pitch = experts // WARP, experts + 8
    rows_of_rank = rows // split
    policy = T.GemmWarpPolicy.FullRow if rows >= 64 * _GROUPS else T.GemmWarpPolicy.FullCol
    num_tokens, hidden, num_experts, num_topk = (
        T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_experts"), T.dynamic("num_topk")
    )  # fmt: skip
    hidden_stride, weight_stride = T.dynamic("hidden_stride", "int64"), T.dynamic("weight_stride", "int64")

    @T.prim_func
    def main(
        hidden_states: T.StridedTensor((num_tokens, hidden), (hidden_stride, 1), "bfloat16"),
        gate_weight: T.StridedTensor((num_experts, hidden), (weight_stride, 1), "bfloat16"),
        bias: T.Tensor((num_experts,), "float32"),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        topk_idx: T.Tensor((num_tokens, num_topk), "int64"),
        scoring: T.int32,
        renormalize: T.bool,
        routed_scaling_factor: T.float32,
    ):
        T.assume(hidden > 0)
        T.assume(num_experts <= experts)
        T.assume(num_topk >= 1)
        T.assume(num_topk <= num_experts)
        T.assume(num_topk <= WARP)
        with T.Kernel(T.ceildiv(num_tokens, rows) * split, threads=_THREADS, cluster_dims=(split, 1, 1)) as block:
            include("gating.cuh", "ranking.cuh", "scoring.cuh")
            hidden_tile = T.alloc_shared((rows, _K), "bfloat16")
            weight_tile = T.alloc_shared((experts, _K), "bfloat16")
            part = T.alloc_shared((rows * pitch,), "float32")
            candidates = T.alloc_shared((_WARPS, experts), "uint64")
            logits = T.alloc_shared((_WARPS, experts), "float32")
            chosen = T.alloc_shared((_WARPS, WARP), "int32")
            sums = T.alloc_fragment((rows, experts), "float32")
            values = T.alloc_local((slots,), "float32")
            offsets = T.alloc_local((slots,), "float32")
            keys = T.alloc_local((slots,), "uint32")
            largest = T.alloc_local((1,), "float32")
            total = T.alloc_local((1,), "float32")
            row = T.alloc_var("int32")
            expert = T.alloc_var("int32")
            score = T.alloc_var("float32")
            rank = T.alloc_var("int32")
            first_step = T.alloc_var("int32")
            num_steps = T.alloc_var("int32")
            rank = T.truncmod(block, split)
            row = T.truncdiv(block, split) * rows
            num_steps = T.truncdiv(hidden + _K - 1, _K)
            first_step = T.truncdiv(num_steps * rank, split)
            num_steps = T.truncdiv(num_steps * (rank + 1), split) - first_step
            T.clear(sums)
            for step in T.Pipelined(num_steps, num_stages=stages):
                T.copy(hidden_states[row, (first_step + step) * _K], hidden_tile)
                T.copy(gate_weight[0, (first_step + step) * _K], weight_tile)
                T.gemm(hidden_tile, weight_tile, sums, transpose_B=True, policy=policy)
            # The sums take the place of the tiles, which every warp group must have read
            T.sync_threads(3, _THREADS)
            for i, j in T.Parallel(rows, experts):
                part[i * pitch + j] = sums[i, j]
            T.cluster_sync()
            lane = T.get_thread_binding() % WARP
            warp = T.get_thread_binding() // WARP
            for i in T.serial(T.ceildiv(rows_of_rank, _WARPS)):
                tile_row = rank * rows_of_rank + i * _WARPS + warp
                if row + tile_row < num_tokens:
                    _load_logits(values, slots, split, part, pitch, tile_row, num_experts, lane)
                    if scoring == 2:
                        _softmax_row(values, slots, num_experts, lane, largest, total)
                    for j in T.unroll(slots):
                        offsets[j] = T.float32(0)
                    if not T.isnullptr(bias.data):
                        load_offsets(offsets, slots, bias, num_experts, lane)
                    for j in T.unroll(slots):
                        logits[warp, j * WARP + lane] = values[j]
                        values[j] = _rounded(
                            "sum", T.call_extern("float32", "tk::ranked", values[j], scoring), offsets[j]
                        )
                    rank_keys(keys, slots, values, num_experts, lane)
                    select_best(keys, slots, num_topk, candidates, chosen, warp, lane)
                    score = T.float32(0)
                    expert = -1
                    if lane < num_topk:
                        expert = chosen[warp, lane]
                        score = T.call_extern(
                            "float32", "tk::score", logits[warp, expert], scoring, largest[0], total[0]
                        )
                    if renormalize:
                        total[0] = score
                        warp_sum(total)
                        score = _rounded("quotient", score, _rounded("sum", total[0], T.float32(1e-20)))
                    if lane < num_topk:
                        topk_idx[row + tile_row, lane] = T.cast(expert, "int64")
                        topk_weights[row + tile_row, lane] = _rounded("product", score, routed_scaling_factor)
                    T.sync_warp()
            # The others may still read this block's sums
            T.cluster_sync()

    return main
