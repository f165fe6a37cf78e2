"""Router of a mixture of experts in one kernel: logits = hidden_states x gate_weight^T, scores, choice and weights.

The blocks of a cluster share the columns of hidden_states: each multiplies its part for a tile of tokens and all
experts (TMA and wgmma, as in gemm/matmul.py), then each adds up, through distributed shared memory, and routes the
tokens of its rank, a few for each warp. Logits never leave the multiprocessors.

On an H200, cold L2, against torch's linear, softmax and topk in the same run: 4096 x 7168 x 256 takes 37.8 us (114, its
linear alone 30), 16 x 7168 x 256 12.5 us (26.8). The tensor cores need 16 us for the former, hidden_states come from
memory in 15, and the blocks read 287 MB of tiles, 31 us at the rate at which gemm.matmul's largest products get theirs.
Two things had made it 72 us: 32 clusters of four blocks, of which only 30 run at once, and code. Its instructions come
from memory too when they are needed first: 66 KB more of them, four rows of a warp at once instead of two, took 17 us.
"""

import dataclasses

import tilelang.language as T

from ..common.device import include
from ..common.selecting import PASS_CONFIGS, WARP
from ..declare import forms, grid, kernel

_K = 64  # columns in a stage
_WARP_GROUP = 128
_GROUPS = 2  # warp groups that multiply
_THREADS = _GROUPS * _WARP_GROUP
_WARPS = _THREADS // WARP
_ROWS_AT_ONCE = 2  # that a warp routes


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a block multiplies: `rows` tokens and up to `experts` experts, `stages` of 64 columns in flight."""

    rows: int
    experts: int
    stages: int
    split: int  # blocks of a cluster, which share the columns
    max_tokens: int = 0  # the form is for at most so many; 0: for any number


# Tried from the first to the last. An H200 runs 132 blocks at once, but only 66 clusters of two, 39 of three, 30 of
# four and 15 of eight: max_tokens are those that run at once, since the rest would take as long again.
_FORMS = {
    "few64": Tile(64, 64, 8, 8, max_tokens=960),
    "experts64": Tile(64, 64, 8, 2, max_tokens=4224),
    "many64": Tile(128, 64, 8, 1),
    "few128": Tile(64, 128, 8, 8, max_tokens=960),
    "experts128": Tile(64, 128, 8, 2, max_tokens=4224),
    "many128": Tile(128, 128, 6, 1),
    "few256": Tile(64, 256, 5, 8, max_tokens=960),
    "some256": Tile(64, 256, 5, 4, max_tokens=1920),
    "experts256": Tile(64, 256, 5, 2, max_tokens=4224),
    "more256": Tile(128, 256, 4, 2, max_tokens=8448),
    "many256": Tile(128, 256, 4, 1),
    "few512": Tile(64, 512, 3, 8, max_tokens=960),
    "experts512": Tile(64, 512, 3, 2, max_tokens=4224),
    "many512": Tile(64, 512, 3, 1),
}


@kernel(axes=grid(form=forms(*_FORMS)), archs=("sm_90a",), pass_configs=PASS_CONFIGS)
def fused_topk_gating(form):
    """Multiply hidden_states by the transpose of gate_weight, and route each token to its topk_idx.shape[1] best
    experts."""
    tile = _FORMS[form]
    rows, experts, split = tile.rows, tile.experts, tile.split
    slots, pitch = experts // WARP, experts + 8
    rows_of_rank = rows // split
    rows_at_once = min(_ROWS_AT_ONCE, rows_of_rank // _WARPS)
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
        if tile.max_tokens > 0:
            T.assume(num_tokens <= tile.max_tokens)
        with T.Kernel(T.ceildiv(num_tokens, rows) * split, threads=_THREADS, cluster_dims=(split, 1, 1)) as block:
            include("gating.cuh")
            hidden_tile = T.alloc_shared((rows, _K), "bfloat16")
            weight_tile = T.alloc_shared((experts, _K), "bfloat16")
            part = T.alloc_shared((rows * pitch,), "float32")
            offsets = T.alloc_shared((experts,), "float32")
            candidates = T.alloc_shared((_WARPS * rows_at_once * experts,), "uint64")
            sums = T.alloc_fragment((rows, experts), "float32")
            row = T.alloc_var("int32")
            rank = T.alloc_var("int32")
            first_step = T.alloc_var("int32")
            num_steps = T.alloc_var("int32")
            rank = T.truncmod(block, split)
            row = T.truncdiv(block, split) * rows
            num_steps = T.truncdiv(hidden + _K - 1, _K)
            first_step = T.truncdiv(num_steps * rank, split)
            num_steps = T.truncdiv(num_steps * (rank + 1), split) - first_step
            T.clear(sums)
            for step in T.Pipelined(num_steps, num_stages=tile.stages):
                T.copy(hidden_states[row, (first_step + step) * _K], hidden_tile)
                T.copy(gate_weight[0, (first_step + step) * _K], weight_tile)
                T.gemm(hidden_tile, weight_tile, sums, transpose_B=True, policy=policy)
            # The sums take the place of the tiles, which every warp group must have read
            T.sync_threads(3, _THREADS)
            # Not before the loop: there the threads that load count too
            thread = T.get_thread_binding()
            for i in T.unroll(-(-experts // _THREADS)):
                if i * _THREADS + thread < experts:
                    offsets[i * _THREADS + thread] = 0.0
            if not T.isnullptr(bias.data):
                for i in T.unroll(-(-experts // _THREADS)):
                    if i * _THREADS + thread < num_experts:
                        offsets[i * _THREADS + thread] = bias[i * _THREADS + thread]
            for i, j in T.Parallel(rows, experts):
                part[i * pitch + j] = sums[i, j]
            if split > 1:
                T.cluster_sync()
            else:
                T.sync_threads(3, _THREADS)
            T.call_extern(
                "handle",
                f"tk::route_rows<{slots}, {split}, {rows_at_once}, {_WARPS}, {pitch}>",
                T.access_ptr(part[0], "r"),
                T.access_ptr(offsets[0], "r"),
                T.access_ptr(candidates[0], "w"),
                T.access_ptr(topk_idx[row, 0], "w"),
                T.access_ptr(topk_weights[row, 0], "w"),
                rank * rows_of_rank,
                T.min((rank + 1) * rows_of_rank, num_tokens - row),
                num_experts,
                num_topk,
                scoring,
                renormalize,
                routed_scaling_factor,
                thread // WARP,
                thread % WARP,
            )
            # The others may still read this block's sums
            if split > 1:
                T.cluster_sync()

    return main
