"""One kernel for each way of launching: cooperative, in clusters, by tensor maps of sizes known at launch, dependent on
the kernel before, with much shared memory, several kernels over a workspace, through a table of addresses."""

import tilelang.language as T

from ..declare import kernel

_THREADS = 128
_ARCHS = ("sm_90a",)


@kernel(archs=_ARCHS)
def cooperative():
    """Write the sum of all numbers to every place of out; all blocks meet in between."""
    n = T.dynamic("n")
    num_sms = T.dynamic("num_sms")

    @T.prim_func
    def main(x: T.Tensor((n,), "int32"), workspace: T.Tensor((num_sms,), "int32"), out: T.Tensor((n,), "int32")):
        with T.Kernel(num_sms, threads=_THREADS) as block:
            thread = T.get_thread_binding()
            total = T.alloc_var("int32")
            total = 0
            if thread == 0:
                for i in T.serial(T.ceildiv(n, num_sms)):
                    if i * num_sms + block < n:
                        total += x[i * num_sms + block]
                workspace[block] = total
            T.sync_grid()
            total = 0
            for i in T.serial(num_sms):
                total += workspace[i]
            for i in T.serial(T.ceildiv(n, num_sms * _THREADS)):
                if (i * num_sms + block) * _THREADS + thread < n:
                    out[(i * num_sms + block) * _THREADS + thread] = total

    return main


@kernel(archs=_ARCHS)
def cluster():
    """Swap neighbouring pieces of x through the shared memory of the other block of a cluster."""
    n = T.dynamic("n")

    @T.prim_func
    def main(x: T.Tensor((n,), "float32"), out: T.Tensor((n,), "float32")):
        with T.Kernel(T.ceildiv(n, 2 * _THREADS) * 2, threads=_THREADS, cluster_dims=2) as block:
            T.import_source('#include "kinds.cuh"\n')
            piece = T.alloc_shared((_THREADS,), "float32")
            thread = T.get_thread_binding()
            if block * _THREADS + thread < n:
                piece[thread] = x[block * _THREADS + thread]
            T.cluster_sync()
            if block * _THREADS + thread < n:
                out[block * _THREADS + thread] = T.call_extern(
                    "float32", "kinds::of_block", T.access_ptr(piece[thread], "r"), 1 - block % 2
                )
            T.cluster_sync()

    return main


@kernel(archs=_ARCHS)
def tensor_maps():
    """Multiply each matrix of a by the transpose of b, both read and the products written through tensor maps."""
    batch, m, n, k = T.dynamic("batch"), T.dynamic("m"), T.dynamic("n"), T.dynamic("k")
    a_batch_stride, a_stride = T.dynamic("a_batch_stride", "int64"), T.dynamic("a_stride", "int64")

    @T.prim_func
    def main(
        a: T.StridedTensor((batch, m, k), (a_batch_stride, a_stride, 1), "bfloat16"),
        b: T.Tensor((n, k), "bfloat16"),
        out: T.Tensor((batch, m, n), "float32"),
    ):
        with T.Kernel(T.ceildiv(n, 64), T.ceildiv(m, 64), batch, threads=_THREADS) as (bx, by, bz):
            a_tile = T.alloc_shared((64, 64), "bfloat16")
            b_tile = T.alloc_shared((64, 64), "bfloat16")
            out_tile = T.alloc_shared((64, 64), "float32")
            sums = T.alloc_fragment((64, 64), "float32")
            T.clear(sums)
            for step in T.Pipelined(T.ceildiv(k, 64), num_stages=3):
                T.copy(a[bz, by * 64 : by * 64 + 64, step * 64 : step * 64 + 64], a_tile)
                T.copy(b[bx * 64, step * 64], b_tile)
                T.gemm(a_tile, b_tile, sums, transpose_B=True)
            T.copy(sums, out_tile)
            T.copy(out_tile, out[bz, by * 64 : by * 64 + 64, bx * 64 : bx * 64 + 64])

    return main


@kernel(archs=_ARCHS)
def dependent():
    """Write the numbers of x in reverse, one added to each: a block reads what another wrote in the call before."""
    n = T.dynamic("n")

    @T.prim_func
    def main(x: T.Tensor((n,), "int32"), out: T.Tensor((n,), "int32")):
        with T.Kernel(T.ceildiv(n, _THREADS), threads=_THREADS) as block:
            at = block * _THREADS + T.get_thread_binding()
            if at < n:
                out[at] = x[n - 1 - at] + 1

    return main


@kernel(archs=_ARCHS)
def own_wait():
    """As `dependent`; the wait for the kernel before stands in the kernel's own source."""
    n = T.dynamic("n")

    @T.prim_func
    def main(x: T.Tensor((n,), "int32"), out: T.Tensor((n,), "int32")):
        with T.Kernel(T.ceildiv(n, _THREADS), threads=_THREADS) as block:
            at = block * _THREADS + T.get_thread_binding()
            T.pdl_sync()
            if at < n:
                out[at] = x[n - 1 - at] + 1
            T.pdl_trigger()

    return main


@kernel(archs=_ARCHS, pass_configs={"tl.disable_tma_lower": True})
def much_shared_memory():
    """Reverse each row through shared memory of a size known at launch, up to all that a block may have."""
    num_rows, num_columns = T.dynamic("num_rows"), T.dynamic("num_columns")

    @T.prim_func
    def main(x: T.Tensor((num_rows, num_columns), "float32"), out: T.Tensor((num_rows, num_columns), "float32")):
        with T.Kernel(num_rows, threads=_THREADS) as row:
            line = T.alloc_shared((num_columns,), "float32")
            thread = T.get_thread_binding()
            for i in T.serial(T.ceildiv(num_columns, _THREADS)):
                if i * _THREADS + thread < num_columns:
                    line[i * _THREADS + thread] = x[row, i * _THREADS + thread]
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_columns, _THREADS)):
                if i * _THREADS + thread < num_columns:
                    out[row, i * _THREADS + thread] = line[num_columns - 1 - i * _THREADS - thread]

    return main


@kernel(archs=_ARCHS)
def three_kernels():
    """Sum the columns of a matrix: over blocks of rows, then over these, then less the largest sum."""
    num_rows, num_columns = T.dynamic("num_rows"), T.dynamic("num_columns")

    @T.prim_func
    def main(
        x: T.Tensor((num_rows, num_columns), "int32"),
        workspace: T.Tensor((T.ceildiv(num_rows, 64), num_columns), "int32"),
        workspace_sums: T.Tensor((num_columns,), "int32"),
        out: T.Tensor((num_columns,), "int32"),
    ):
        with T.Kernel(T.ceildiv(num_rows, 64), T.ceildiv(num_columns, _THREADS), threads=_THREADS) as (bx, by):
            column = by * _THREADS + T.get_thread_binding()
            total = T.alloc_var("int32")
            total = 0
            if column < num_columns:
                for i in T.serial(64):
                    if bx * 64 + i < num_rows:
                        total += x[bx * 64 + i, column]
                workspace[bx, column] = total
        with T.Kernel(T.ceildiv(num_columns, _THREADS), threads=_THREADS) as bx:
            column = bx * _THREADS + T.get_thread_binding()
            total = T.alloc_var("int32")
            total = 0
            if column < num_columns:
                for i in T.serial(T.ceildiv(num_rows, 64)):
                    total += workspace[i, column]
                workspace_sums[column] = total
        with T.Kernel(T.ceildiv(num_columns, _THREADS), threads=_THREADS) as bx:
            column = bx * _THREADS + T.get_thread_binding()
            largest = T.alloc_var("int32")
            largest = workspace_sums[0]
            if column < num_columns:
                for i in T.serial(num_columns):
                    largest = T.max(largest, workspace_sums[i])
                out[column] = workspace_sums[column] - largest

    return main


@kernel(archs=_ARCHS)
def pointer_table():
    """Add four vectors, whose addresses come by value and are written into a table on the device."""
    n = T.dynamic("n")

    @T.prim_func
    def main(
        workspace: T.Tensor((4,), "int64"),
        out: T.Tensor((n,), "float32"),
        address_0: T.int64,
        address_1: T.int64,
        address_2: T.int64,
        address_3: T.int64,
    ):
        with T.Kernel(1, threads=32):
            if T.get_thread_binding() == 0:
                workspace[0] = address_0
                workspace[1] = address_1
                workspace[2] = address_2
                workspace[3] = address_3
        with T.Kernel(T.ceildiv(n, _THREADS), threads=_THREADS) as block:
            T.import_source('#include "kinds.cuh"\n')
            at = block * _THREADS + T.get_thread_binding()
            total = T.alloc_var("float32")
            total = 0.0
            if at < n:
                for i in T.serial(4):
                    total += T.call_extern("float32", "kinds::follow", workspace[i], at)
                out[at] = total

    return main
