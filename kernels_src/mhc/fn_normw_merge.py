"""Norm weights taken into the matrix of pre-norm: each row of it times the weights; and the gradients."""

import tilelang.language as T

from ..declare import kernel

_THREADS = 128
_PASS_CONFIGS = {"tl.disable_safe_memory_legalize": True}  # bounds are tested by hand


@kernel(pass_configs=_PASS_CONFIGS)
def mhc_fn_normw_merge_fwd():
    """Write each row of fn times normw to out_fn. A thread per column."""
    num_rows, num_columns = T.dynamic("num_rows"), T.dynamic("num_columns")

    @T.prim_func
    def main(
        fn: T.Tensor((num_rows, num_columns), "float32"),
        normw: T.Tensor((num_columns,), "float32"),
        out_fn: T.Tensor((num_rows, num_columns), "float32"),
    ):
        with T.Kernel(T.ceildiv(num_columns, _THREADS) * num_rows, threads=_THREADS) as block:
            row = T.alloc_var("int32")
            column = T.alloc_var("int32")
            row = T.truncdiv(block, T.ceildiv(num_columns, _THREADS))
            column = T.truncmod(block, T.ceildiv(num_columns, _THREADS)) * _THREADS + T.get_thread_binding()
            if column < num_columns:
                out_fn[row, column] = fn[row, column] * normw[column]

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
            grad = T.alloc_var("float32")
            total = T.alloc_var("float32")
            if column < num_columns:
                weight = normw[column]
                total = T.float32(0)
                for row in T.serial(num_rows):
                    grad = out_fn_grad[row, column]
                    total = total + grad * fn[row, column]
                    fn_grad[row, column] = fn_grad[row, column] + grad * weight
                normw_grad[column] = normw_grad[column] + total

    return main
