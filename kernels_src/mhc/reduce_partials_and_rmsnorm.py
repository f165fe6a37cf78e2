"""Sums of the parts of a product of pre-norm and its normalisation by the root mean square; and the gradients."""

import tilelang.language as T

from ..common.device import aligned, include
from ..declare import forms, grid, kernel

_THREADS = 128
_LANES = 8  # that share a token's gradients
_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
}


def _rms_factor(sqrsum, size, eps):
    return T.call_extern("float32", "tk::rms_factor", sqrsum, size, eps)


@kernel(axes=grid(form=forms("aligned", "general")), pass_configs=_PASS_CONFIGS)
def mhc_reduce_partials_and_rmsnorm_fwd(form):
    """Write the sums over the parts, and out = the sum over the groups of out_mul / rms(group)."""
    n_splits, num_tokens, num_groups = T.dynamic("n_splits"), T.dynamic("num_tokens"), T.dynamic("num_groups")
    num_columns = T.dynamic("num_columns")
    numbers = 4 if form == "aligned" else 1

    @T.prim_func
    def main(
        out_mul_splitted: T.Tensor((n_splits, num_tokens, num_groups, num_columns), "float32"),
        sqrsum_splitted: T.Tensor((n_splits, num_tokens, num_groups), "float32"),
        out_mul: T.Tensor((num_tokens, num_groups, num_columns), "float32"),
        sqrsum: T.Tensor((num_tokens, num_groups), "float32"),
        out: T.Tensor((num_tokens, num_columns), "float32"),
        rms_group_size: T.int32,
        rms_eps: T.float32,
    ):
        if form == "aligned":
            T.assume(num_columns % numbers == 0)
        with T.Kernel(T.ceildiv(num_tokens * T.truncdiv(num_columns, numbers), _THREADS), threads=_THREADS) as block:
            include("aligned.cuh", "rms.cuh")
            index = block * _THREADS + T.get_thread_binding()
            if index < num_tokens * T.truncdiv(num_columns, numbers):
                T.call_extern(
                    "handle",
                    f"tk::ReducePartials<{numbers}>::run",
                    aligned(4 * numbers, T.access_ptr(out_mul_splitted[0, 0, 0, 0], "r")),
                    T.access_ptr(sqrsum_splitted[0, 0, 0], "r"),
                    aligned(4 * numbers, T.access_ptr(out_mul[0, 0, 0], "w")),
                    T.access_ptr(sqrsum[0, 0], "w"),
                    aligned(4 * numbers, T.access_ptr(out[0, 0], "w")),
                    T.truncdiv(index, T.truncdiv(num_columns, numbers)),
                    T.truncmod(index, T.truncdiv(num_columns, numbers)) * numbers,
                    num_tokens,
                    num_groups,
                    num_columns,
                    n_splits,
                    rms_group_size,
                    rms_eps,
                )

    return main


@kernel(pass_configs=_PASS_CONFIGS)
def mhc_reduce_partials_and_rmsnorm_bwd():
    """Write the gradients of out_mul and of sqrsum from that of out. Eight neighbouring threads per token and group."""
    num_tokens, num_groups, num_columns = T.dynamic("num_tokens"), T.dynamic("num_groups"), T.dynamic("num_columns")

    @T.prim_func
    def main(
        out_grad: T.Tensor((num_tokens, num_columns), "float32"),
        out_mul: T.Tensor((num_tokens, num_groups, num_columns), "float32"),
        sqrsum: T.Tensor((num_tokens, num_groups), "float32"),
        out_mul_grad: T.Tensor((num_tokens, num_groups, num_columns), "float32"),
        sqrsum_grad: T.Tensor((num_tokens, num_groups), "float32"),
        rms_group_size: T.int32,
        rms_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens * num_groups, _THREADS // _LANES), threads=_THREADS) as block:
            include("rms.cuh")
            index = block * (_THREADS // _LANES) + T.get_thread_binding() // _LANES
            place = T.get_thread_binding() % _LANES
            token = T.alloc_var("int32")
            group = T.alloc_var("int32")
            squares = T.alloc_var("float32")
            factor = T.alloc_var("float32")
            dot = T.alloc_var("float32")
            dot = T.float32(0)
            squares = T.float32(0)
            factor = T.float32(0)
            token = T.truncdiv(index, num_groups)
            group = T.truncmod(index, num_groups)
            if index < num_tokens * num_groups:
                squares = sqrsum[token, group]
                factor = _rms_factor(squares, rms_group_size, rms_eps)
                for step in T.serial(T.ceildiv(num_columns, _LANES)):
                    if step * _LANES + place < num_columns:
                        dot = (
                            dot + out_grad[token, step * _LANES + place] * out_mul[token, group, step * _LANES + place]
                        )
                        out_mul_grad[token, group, step * _LANES + place] = (
                            out_grad[token, step * _LANES + place] * factor
                        )
            dot = T.call_extern("float32", f"tk::sum_of_lanes<{_LANES}>", dot)
            if index < num_tokens * num_groups and place == 0:
                sqrsum_grad[token, group] = T.call_extern(
                    "float32", "tk::sqrsum_grad", dot, factor, squares, rms_group_size, rms_eps
                )

    return main
