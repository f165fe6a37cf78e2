"""Matrix products a x b^T of bf16 or fp16, summed in fp32 and rounded once.

tile forms: tiles of a and b come by TMA into a ring of stages, one warp group loads, the others multiply (wgmma). Where
there are few rows of a, b is the left operand (`swapped`): wgmma wants 64 rows there, and 8 are enough on the right.
Where there are too few tiles for the GPU's SMs, the blocks of a cluster share K and add up their sums through
distributed shared memory, so that no scratch memory and no second launch is needed and the order of the sum is fixed.
gemv: one row of a; warps read rows of b. general: any stride, any address, any K.
"""

import dataclasses

import tilelang.language as T

from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_K = 64  # columns of a and b in a stage: 128 bytes, a row of TMA's widest swizzle
_VECTOR = 8  # elements in 16 bytes
_WARP = 32
_WARP_GROUP = 128
_NUM_SMS = 132  # of an H100 or H200; another number is slower, not wrong


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a block multiplies: `rows` of a and `cols` rows of b, `stages` of them in flight."""

    rows: int
    cols: int
    stages: int
    # The form is for at most so many rows of a, and at least so many tiles in all
    max_m: int = 0
    min_tiles: int = 0
    groups: int = 1  # warp groups that multiply
    split: int = 1  # blocks of a cluster that share K
    swapped: bool = False
    stored_by_tma: bool = False  # wants rows of out on 16 bytes
    # A block for each SM takes tile after tile, and loads the next one's while it stores; not measured yet, so not used
    persistent: bool = False
    panel: int = 8  # tiles along m whose blocks run beside each other, so that they share b in the L2


def _tiles(m, n, rows, cols):
    return T.ceildiv(m, rows) * T.ceildiv(n, cols)


# Tried from the first to the last. Times on an H200, cold L2, torch's in brackets (cuBLAS of CUDA 13.0); all that was
# tried is in benchmarks/results/h200/tuning.jsonl
_TILES = {
    # 16 x 7168 x 7168: 33.6 us (35.7). With 32 rows 33.8, with 128 columns 34.3, in two splits 35.0
    "rows16": Tile(16, 64, 8, max_m=16, min_tiles=80, swapped=True),
    # 8 x 4096 x 4096: 14.6 us (15.2); not split 16.6, in four 17.2
    "rows16_split2": Tile(16, 64, 8, max_m=16, min_tiles=40, split=2, swapped=True),
    # 1 x 2048 x 7168: 13.4 us (14.1); in two splits 15.3, in eight 16.5
    "rows16_split4": Tile(16, 64, 8, max_m=16, split=4, swapped=True),
    # 64 x 7168 x 7168: 34.6 us (33.2)
    "rows64": Tile(64, 64, 8, max_m=64, min_tiles=56, swapped=True),
    # 64 x 576 x 7168: 9.6 us (9.0); in two splits 11.8, in eight 13.7
    "rows64_split4": Tile(64, 64, 8, max_m=64, split=4, swapped=True),
    # 8192 x 8192 x 8192: 1380 us (1372); stored through shared memory 1397, 256 x 128 tiles 1407, three stages 1464
    "large": Tile(128, 256, 4, min_tiles=96, groups=2, stored_by_tma=True, panel=16),
    # 256 x 7168 x 2048: 17.0 us (15.0); 128 x 64 tiles 22.2, 128 x 256 in two splits 22.1
    "medium": Tile(128, 128, 6, min_tiles=96, groups=2),
    # 128 x 7168 x 2048: 13.7 us (13.0); in two splits 16.2, 128 x 128 tiles 16.5
    "small": Tile(128, 64, 8, min_tiles=56, groups=2),
    # 128 x 2112 x 7168: 19.6 us (16.3); with 64 columns 26.3
    "small_split4": Tile(128, 128, 6, groups=2, split=4),
}

# 1 x 7168 x 7168: 32.2 us (36.1), 1 x 2048 x 7168: 11.3 us (14.3); a row of b for each warp took 43.5 and 19.8
# gemv: warps of a block, which share K; rows of b that they take; chunks of each row in flight
_GEMV_WARPS = 8
_GEMV_ROWS = 4
_GEMV_CHUNKS = 2
_GEMV_BLOCKS = 4  # of a multiprocessor

# Stages after which sums move to a second set of registers, where the result is fp32: the tensor cores cut off digits
# at each addition, which after 18432 products is 2e-5 of the result (H200)
_STAGES_OF_SUM = 64

# general: rows of a and of b in a tile, threads
_GENERAL_ROWS = 64
_GENERAL_COLS = 64
_GENERAL_THREADS = 128

_FORMS = ("gemv", *_TILES, "general")
# fp32 results are rare, and their second set of sums leaves no registers for large tiles
_FP32_FORMS = ("gemv", "rows16_split4", "rows64_split4", "medium", "small_split4", "general")


@kernel(
    axes=grid(
        dtype=dtype_of("a", bf16="bfloat16", fp16="float16"),
        out_dtype=dtype_of("out", bf16="bfloat16", fp16="float16", fp32="float32"),
        form=forms(*_FORMS),
    ),
    where=lambda dtype, out_dtype, form: out_dtype == dtype or (out_dtype == "fp32" and form in _FP32_FORMS),
    archs=("sm_90a",),
    pass_configs={"tl.disable_safe_memory_legalize": True},  # helpers test bounds; TMA fills with zeros
)
def matmul(dtype, out_dtype, form):
    """Write a (m, k) times the transpose of b (n, k) to out (m, n)."""
    if form == "gemv":
        return _gemv(_DTYPES[dtype], _DTYPES[out_dtype])
    if form == "general":
        return _general(_DTYPES[dtype], _DTYPES[out_dtype])
    return _tiled(_DTYPES[dtype], _DTYPES[out_dtype], _TILES[form])


def _sizes():
    return T.dynamic("m"), T.dynamic("n"), T.dynamic("k")


def _strides(*names):
    return tuple(T.dynamic(name, "int64") for name in names)


# ---- tiles by TMA and wgmma ------------------------------------------------------------------------------------------


def _tiled(dtype, out_dtype, tile):
    m, n, k = _sizes()
    a_stride, b_stride, out_stride = _strides("a_stride", "b_stride", "out_stride")
    rows, cols, split, panel = tile.rows, tile.cols, tile.split, tile.panel
    threads = tile.groups * _WARP_GROUP
    exact = out_dtype == "float32"
    policy = T.GemmWarpPolicy.FullRow
    # Pitch of the fp32 tile: rows of an accumulator's registers fall into different banks
    pitch = cols + (4 if tile.swapped else 8)

    @T.prim_func
    def main(
        a: T.StridedTensor((m, k), (a_stride, 1), dtype),
        b: T.StridedTensor((n, k), (b_stride, 1), dtype),
        out: T.StridedTensor((m, n), (out_stride, 1), out_dtype),
    ):
        T.assume(k > 0)
        if tile.max_m > 0:
            T.assume(m <= tile.max_m)
        if tile.min_tiles > 0:
            T.assume(_tiles(m, n, rows, cols) >= tile.min_tiles)
        with T.Kernel(
            T.min(_tiles(m, n, rows, cols), _NUM_SMS) if tile.persistent else _tiles(m, n, rows, cols) * split,
            threads=threads,
            cluster_dims=(split, 1, 1),
        ) as block:
            include("matmul.cuh")
            a_tile = T.alloc_shared((rows, _K), dtype)
            b_tile = T.alloc_shared((cols, _K), dtype)
            out_tile = T.alloc_shared((rows, cols), out_dtype)
            # One-dimensional, so that its layout is this one
            part = T.alloc_shared((rows * pitch,), "float32")
            sums = T.alloc_fragment((cols, rows) if tile.swapped else (rows, cols), "float32")
            totals = T.alloc_fragment((cols, rows) if tile.swapped else (rows, cols), "float32")
            row = T.alloc_var("int32")
            col = T.alloc_var("int32")
            down = T.alloc_var("int32")
            index = T.alloc_var("int32")
            first_step = T.alloc_var("int32")
            num_steps = T.alloc_var("int32")
            for wave in T.serial(
                T.truncdiv(
                    T.truncdiv(m + rows - 1, rows) * T.truncdiv(n + cols - 1, cols) - block + _NUM_SMS - 1, _NUM_SMS
                )
                if tile.persistent
                else 1
            ):
                # Tiles in panels: `panel` of them along m, then the next along n
                index = T.truncdiv(block, split) + wave * _NUM_SMS
                row = T.truncdiv(index, T.truncdiv(n + cols - 1, cols) * panel) * panel
                index = T.truncmod(index, T.truncdiv(n + cols - 1, cols) * panel)
                down = T.min(T.truncdiv(m + rows - 1, rows) - row, panel)
                row = (row + T.truncmod(index, down)) * rows
                col = T.truncdiv(index, down) * cols
                num_steps = T.truncdiv(k + _K - 1, _K)
                first_step = T.truncdiv(num_steps * T.truncmod(block, split), split)
                num_steps = T.truncdiv(num_steps * (T.truncmod(block, split) + 1), split) - first_step
                T.clear(sums)
                if exact:
                    T.clear(totals)
                for step in T.Pipelined(num_steps, num_stages=tile.stages):
                    T.copy(a[row, (first_step + step) * _K], a_tile)
                    T.copy(b[col, (first_step + step) * _K], b_tile)
                    if tile.swapped:
                        T.gemm(b_tile, a_tile, sums, transpose_B=True, policy=policy)
                    else:
                        T.gemm(a_tile, b_tile, sums, transpose_B=True, policy=policy)
                    if exact:
                        if step % _STAGES_OF_SUM == _STAGES_OF_SUM - 1:
                            for i, j in T.Parallel(cols if tile.swapped else rows, rows if tile.swapped else cols):
                                totals[i, j] += sums[i, j]
                                sums[i, j] = 0.0
                if exact:
                    for i, j in T.Parallel(cols if tile.swapped else rows, rows if tile.swapped else cols):
                        sums[i, j] += totals[i, j]
                if tile.stored_by_tma:
                    T.copy(sums, out_tile)
                    T.copy(out_tile, out[row, col])
                else:
                    if tile.swapped:
                        for j, i in T.Parallel(cols, rows):
                            part[i * pitch + j] = sums[j, i]
                    else:
                        for i, j in T.Parallel(rows, cols):
                            part[i * pitch + j] = sums[i, j]
                    if split > 1:
                        T.cluster_sync()
                    else:
                        T.sync_threads()
                    T.call_extern(
                        "handle",
                        f"tk::store_tile<{rows}, {cols}, {pitch}, {split}, {threads}>",
                        T.access_ptr(part[0], "r"),
                        T.access_ptr(out[0, 0], "w"),
                        out_stride,
                        row,
                        col,
                        m,
                        n,
                        T.truncmod(block, split),
                        T.get_thread_binding(),
                    )
                    if split > 1:
                        T.cluster_sync()

    return main


# ---- one row of a ----------------------------------------------------------------------------------------------------


def _gemv(dtype, out_dtype):
    m, n, k = _sizes()
    a_stride, b_stride, out_stride = _strides("a_stride", "b_stride", "out_stride")
    threads, rows, chunks = _GEMV_WARPS * _WARP, _GEMV_ROWS, _GEMV_CHUNKS

    @T.prim_func
    def main(
        a: T.StridedTensor((m, k), (a_stride, 1), dtype),
        b: T.StridedTensor((n, k), (b_stride, 1), dtype),
        out: T.StridedTensor((m, n), (out_stride, 1), out_dtype),
    ):
        T.assume(m == 1)
        T.assume(k % _VECTOR == 0)
        T.assume(b_stride % _VECTOR == 0)
        with T.Kernel(T.ceildiv(n, rows), threads=threads) as block:
            include("matmul.cuh")
            T.annotate_min_blocks_per_sm(_GEMV_BLOCKS)
            thread = T.get_thread_binding()
            parts = T.alloc_shared((_GEMV_WARPS, rows), "float32")
            a_values = T.alloc_local((_VECTOR,), dtype)
            b_values = T.alloc_local((chunks * rows * _VECTOR,), dtype)
            sums = T.alloc_local((rows,), "float32")
            total = T.alloc_var("float32")
            for r in T.unroll(rows):
                sums[r] = 0.0
            for step in T.serial(T.ceildiv(k, threads * chunks * _VECTOR)):
                for i in T.unroll(chunks):
                    chunk = (step * chunks + i) * threads + thread
                    if chunk * _VECTOR < k:
                        for r in T.unroll(rows):
                            # Rows behind the last one are read as that one, and not written
                            for j in T.vectorized(_VECTOR):
                                b_values[(i * rows + r) * _VECTOR + j] = b[
                                    T.min(block * rows + r, n - 1), chunk * _VECTOR + j
                                ]
                for i in T.unroll(chunks):
                    chunk = (step * chunks + i) * threads + thread
                    if chunk * _VECTOR < k:
                        for j in T.vectorized(_VECTOR):
                            a_values[j] = a[0, chunk * _VECTOR + j]
                        for r in T.unroll(rows):
                            sums[r] += T.call_extern(
                                "float32",
                                "tk::sum_of_products",
                                T.address_of(a_values[0]),
                                T.address_of(b_values[(i * rows + r) * _VECTOR]),
                            )
            for r in T.unroll(rows):
                total = T.warp_reduce_sum(sums[r])
                if thread % _WARP == 0:
                    parts[thread // _WARP, r] = total
            T.sync_threads()
            if thread < rows and block * rows + thread < n:
                total = 0.0
                for i in T.unroll(_GEMV_WARPS):
                    total += parts[i, thread]
                out[0, block * rows + thread] = total

    return main


# ---- everything else -------------------------------------------------------------------------------------------------


def _general(dtype, out_dtype):
    m, n, k = _sizes()
    a_stride, a_col_stride, b_stride, b_col_stride, out_stride = _strides(
        "a_stride", "a_col_stride", "b_stride", "b_col_stride", "out_stride"
    )
    rows, cols, pitch = _GENERAL_ROWS, _GENERAL_COLS, _GENERAL_COLS + 8

    @T.prim_func
    def main(
        a: T.StridedTensor((m, k), (a_stride, a_col_stride), dtype),
        b: T.StridedTensor((n, k), (b_stride, b_col_stride), dtype),
        out: T.StridedTensor((m, n), (out_stride, 1), out_dtype),
    ):
        with T.Kernel(_tiles(m, n, rows, cols), threads=_GENERAL_THREADS) as block:
            include("matmul.cuh")
            a_tile = T.alloc_shared((rows, _K), dtype)
            b_tile = T.alloc_shared((cols, _K), dtype)
            part = T.alloc_shared((rows * pitch,), "float32")
            sums = T.alloc_fragment((rows, cols), "float32")
            row = T.alloc_var("int32")
            col = T.alloc_var("int32")
            row = T.truncdiv(block, T.ceildiv(n, cols)) * rows
            col = T.truncmod(block, T.ceildiv(n, cols)) * cols
            T.clear(sums)
            for step in T.serial(T.ceildiv(k, _K)):
                for i, j in T.Parallel(rows, _K):
                    a_tile[i, j] = T.if_then_else(
                        row + i < m and step * _K + j < k, a[row + i, step * _K + j], T.cast(0, dtype)
                    )
                for i, j in T.Parallel(cols, _K):
                    b_tile[i, j] = T.if_then_else(
                        col + i < n and step * _K + j < k, b[col + i, step * _K + j], T.cast(0, dtype)
                    )
                T.gemm(a_tile, b_tile, sums, transpose_B=True)
            for i, j in T.Parallel(rows, cols):
                part[i * pitch + j] = sums[i, j]
            T.sync_threads()
            T.call_extern(
                "handle",
                f"tk::store_tile<{rows}, {cols}, {pitch}, 1, {_GENERAL_THREADS}>",
                T.access_ptr(part[0], "r"),
                T.access_ptr(out[0, 0], "w"),
                out_stride,
                row,
                col,
                m,
                n,
                0,
                T.get_thread_binding(),
            )

    return main
