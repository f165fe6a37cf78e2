"""Norm weights taken into the matrix of pre-norm: each row of it times the weights; and the gradients."""

import tilelang.language as T

from ..declare import forms, grid, kernel

_THREADS = 128
_IN_FLIGHT = 8  # rows of a thread
_PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # bounds are tested by hand


@kernel(axes=grid(form=forms("aligned", "general")), pass_configs=_PASS_CONFIGS)
def mhc_fn_normw_merge_fwd(form):
    """Write each row of fn times normw to out_fn."""
    num_rows, num_columns = T.dynamic("num_rows"), T.dynamic("num_columns")
    numbers = 4 if form == "aligned" else 1  # of a thread

    @T.prim_func
    def main(
        fn: T.Tensor((num_rows, num_columns), "float32"),
        normw: T.Tensor((num_columns,), "float32"),
        out_fn: T.Tensor((num_rows, num_columns), "float32"),
    ):
        if form == "aligned":
            T.assume(num_columns % numbers == 0)
        with T.Kernel(T.ceildiv(num_columns, _THREADS * numbers) * num_rows, threads=_THREADS) as block:
            row = T.alloc_var("int32")
            chunk = T.alloc_var("int32")
            row = T.truncdiv(block, T.ceildiv(num_columns, _THREADS * numbers))
            chunk = T.truncmod(block, T.ceildiv(num_columns, _THREADS * numbers)) * _THREADS + T.get_thread_binding()
            if chunk * numbers < num_columns:
                for i in T.vectorized(numbers):
                    out_fn[row, chunk * numbers + i] = fn[row, chunk * numbers + i] * normw[chunk * numbers + i]

    return main


@kernel(pass_configs=_PASS_CONFIGS)
def mhc_fn_normw_merge_bwd():
    """Add out_fn_grad * normw to fn_grad, and to normw_grad the sum over the rows of out_fn_grad * fn."""
    num_rows, num_columns = T.dynamic("num_rows"), T.dynamic("num_columns")

    @T.prim_func
    def main(
        fn: T.Tensor((num_rows, num_columns), "float32"),
        normw: T.Tensor((num_columns,), "float32"),
        out_fn_grad: T.Tensor((num_rows, num_columns), "float32"),
        fn_grad: T.Tensor((num_rows, num_columns), "float32"),
        normw_grad: T.Tensor((num_columns,), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_columns, _THREADS), threads=_THREADS) as block:
            column = block * _THREADS + T.get_thread_binding()
            weight = T.alloc_var("float32")
            total = T.alloc_var("float32")
            grads = T.alloc_local((_IN_FLIGHT,), "float32")
            values = T.alloc_local((_IN_FLIGHT,), "float32")
            sums = T.alloc_local((_IN_FLIGHT,), "float32")
            if column < num_columns:
                weight = normw[column]
                total = normw_grad[column]
                for first in T.serial(T.ceildiv(num_rows, _IN_FLIGHT)):
                    for i in T.unroll(_IN_FLIGHT):
                        row = first * _IN_FLIGHT + i
                        if row < num_rows:
                            grads[i] = out_fn_grad[row, column]
                            values[i] = fn[row, column]
                            sums[i] = fn_grad[row, column]
                    for i in T.unroll(_IN_FLIGHT):
                        row = first * _IN_FLIGHT + i
                        if row < num_rows:
                            fn_grad[row, column] = sums[i] + grads[i] * weight
                            total = total + grads[i] * values[i]
                normw_grad[column] = total

    return main
