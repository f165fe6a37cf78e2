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


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a block multiplies: `rows` of a and `cols` rows of b, `stages` of them in flight."""

    rows: int
    cols: int
    stages: int
    # Sizes that the form is for
    max_m: int | None = None
    max_n: int | None = None
    min_n: int = 0
    max_tiles: int | None = None
    groups: int = 1  # warp groups that multiply
    split: int = 1  # blocks of a cluster that share K
    swapped: bool = False
    stored_by_tma: bool = False  # wants rows of out on 16 bytes
    panel: int = 8  # tiles along m whose blocks run beside each other, so that they share b in the L2


def _tiles(m, n, rows, cols):
    return T.ceildiv(m, rows) * T.ceildiv(n, cols)


# Tried from the first to the last; `matmul` says where the numbers come from.
_TILES = {
    "rows16_split": Tile(16, 64, 8, max_m=16, max_n=4096, split=4, swapped=True),
    "rows16": Tile(16, 64, 8, max_m=16, swapped=True),
    "rows64_split": Tile(64, 64, 8, max_m=64, max_n=4096, split=4, swapped=True),
    "rows64": Tile(64, 64, 8, max_m=64, swapped=True),
    "small_split": Tile(128, 128, 4, max_tiles=66, groups=2, split=2),
    "large": Tile(128, 256, 4, min_n=256, groups=2, stored_by_tma=True),
    "small": Tile(128, 128, 5, groups=2),
}

# gemv: warps of a block, those that share a row of b, and loads in flight
_GEMV_WARPS = 8
_GEMV_WARPS_PER_ROW = 1
_GEMV_UNROLL = 8

# general: rows of a and of b in a tile, threads
_GENERAL_ROWS = 64
_GENERAL_COLS = 64
_GENERAL_THREADS = 128

_FORMS = ("gemv", *_TILES, "general")


@kernel(
    axes=grid(
        dtype=dtype_of("a", bf16="bfloat16", fp16="float16"),
        out_dtype=dtype_of("out", bf16="bfloat16", fp16="float16", fp32="float32"),
        form=forms(*_FORMS),
    ),
    where=lambda dtype, out_dtype: out_dtype in (dtype, "fp32"),
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
        if tile.max_m is not None:
            T.assume(m <= tile.max_m)
        if tile.max_n is not None:
            T.assume(n <= tile.max_n)
        if tile.min_n > 0:
            T.assume(n >= tile.min_n)
        if tile.max_tiles is not None:
            T.assume(_tiles(m, n, rows, cols) <= tile.max_tiles)
        with T.Kernel(_tiles(m, n, rows, cols) * split, threads=threads, cluster_dims=(split, 1, 1)) as block:
            include("matmul.cuh")
            a_tile = T.alloc_shared((rows, _K), dtype)
            b_tile = T.alloc_shared((cols, _K), dtype)
            sums = T.alloc_fragment((cols, rows) if tile.swapped else (rows, cols), "float32")
            row = T.alloc_var("int32")
            col = T.alloc_var("int32")
            down = T.alloc_var("int32")
            index = T.alloc_var("int32")
            first_step = T.alloc_var("int32")
            num_steps = T.alloc_var("int32")
            # Tiles in panels: `panel` of them along m, then the next along n
            index = T.truncmod(T.truncdiv(block, split), T.truncdiv(n + cols - 1, cols) * panel)
            row = T.truncdiv(T.truncdiv(block, split), T.truncdiv(n + cols - 1, cols) * panel) * panel
            down = T.min(T.truncdiv(m + rows - 1, rows) - row, panel)
            row = (row + T.truncmod(index, down)) * rows
            col = T.truncdiv(index, down) * cols
            num_steps = T.truncdiv(k + _K - 1, _K)
            first_step = T.truncdiv(num_steps * T.truncmod(block, split), split)
            num_steps = T.truncdiv(num_steps * (T.truncmod(block, split) + 1), split) - first_step
            T.clear(sums)
            for step in T.Pipelined(num_steps, num_stages=tile.stages):
                T.copy(a[row, (first_step + step) * _K], a_tile)
                T.copy(b[col, (first_step + step) * _K], b_tile)
                if tile.swapped:
                    T.gemm(b_tile, a_tile, sums, transpose_B=True, policy=policy)
                else:
                    T.gemm(a_tile, b_tile, sums, transpose_B=True, policy=policy)
            if tile.stored_by_tma:
                out_tile = T.alloc_shared((rows, cols), out_dtype)
                T.copy(sums, out_tile)
                T.copy(out_tile, out[row, col])
            else:
                # One-dimensional, so that its layout is this one
                part = T.alloc_shared((rows * pitch,), "float32")
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
    lanes = _GEMV_WARPS_PER_ROW * _WARP
    rows = _GEMV_WARPS // _GEMV_WARPS_PER_ROW

    @T.prim_func
    def main(
        a: T.StridedTensor((m, k), (a_stride, 1), dtype),
        b: T.StridedTensor((n, k), (b_stride, 1), dtype),
        out: T.StridedTensor((m, n), (out_stride, 1), out_dtype),
    ):
        T.assume(m == 1)
        T.assume(k % _VECTOR == 0)
        T.assume(b_stride % _VECTOR == 0)
        with T.Kernel(T.ceildiv(n, rows), threads=_GEMV_WARPS * _WARP) as block:
            include("matmul.cuh")
            thread = T.get_thread_binding()
            parts = T.alloc_shared((_GEMV_WARPS,), "float32")
            a_values = T.alloc_local((_GEMV_UNROLL * _VECTOR,), dtype)
            b_values = T.alloc_local((_GEMV_UNROLL * _VECTOR,), dtype)
            row = block * rows + thread // lanes
            part = T.alloc_var("float32")
            part = 0.0
            if row < n:
                for step in T.serial(T.ceildiv(k, lanes * _GEMV_UNROLL * _VECTOR)):
                    for i in T.unroll(_GEMV_UNROLL):
                        chunk = (step * _GEMV_UNROLL + i) * lanes + thread % lanes
                        if chunk * _VECTOR < k:
                            for j in T.vectorized(_VECTOR):
                                b_values[i * _VECTOR + j] = b[row, chunk * _VECTOR + j]
                        else:
                            for j in T.vectorized(_VECTOR):
                                b_values[i * _VECTOR + j] = T.cast(0, dtype)
                    for i in T.unroll(_GEMV_UNROLL):
                        chunk = (step * _GEMV_UNROLL + i) * lanes + thread % lanes
                        if chunk * _VECTOR < k:
                            for j in T.vectorized(_VECTOR):
                                a_values[i * _VECTOR + j] = a[0, chunk * _VECTOR + j]
                            part += T.call_extern(
                                "float32",
                                "tk::sum_of_products",
                                T.address_of(a_values[i * _VECTOR]),
                                T.address_of(b_values[i * _VECTOR]),
                            )
            part = T.warp_reduce_sum(part)
            if _GEMV_WARPS_PER_ROW > 1:
                if thread % _WARP == 0:
                    parts[thread // _WARP] = part
                T.sync_threads()
                if thread % lanes == 0:
                    for i in T.unroll(_GEMV_WARPS_PER_ROW - 1):
                        part += parts[thread // _WARP + 1 + i]
            if thread % lanes == 0 and row < n:
                out[0, row] = part

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
