"""Gradients of RMSNorm: of its input row by row, and of its weight as a sum over the rows.

A block takes every num_parts-th row and sums up its share of the weight's gradient in registers; a second launch adds
the shares. No barrier over the grid: the launch needs no more blocks than fit, nor any that run together.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_TAGS = {"bf16": "tk::Bf16", "fp32": "tk::Fp32"}

_THREADS = 256  # and eight channels of each in a step: norm.cuh
_COLUMNS, _SUM_WARPS = 32, 32  # of the weight's gradient that a block sums up; in as many parts
# Steps, and blocks on an SM that registers are limited for. small and medium: rows of one step and of two.
_PLAN = {
    "bf16": {"small": (1, 4), "medium": (2, 3), "large": (4, 2), "general": (4, 2)},
    "fp32": {"small": (1, 4), "medium": (2, 2), "large": (4, 1), "general": (4, 1)},
}

_ALIGNED = (
    "and_(aligned(x, 16), and_(aligned(out_grad, 16), and_(aligned(weight, 16), aligned(residual_out_grad, 16))))"
)


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), form=forms("small", "medium", "large", "general")),
    accepts={"weight_grad": ("float32", "bfloat16")},
    derived={"is_bf16": "is_dtype(weight_grad, bfloat16)", "is_aligned": _ALIGNED},
    pass_configs=_PASS_CONFIGS,
)
def norm_backward(kind, form):
    """Write the gradient of x, and of the weight to weight_grad, added to what is there if accumulate.

    x_grad = (wg - xh * mean(xh * wg)) * rstd + residual_out_grad, xh = x * rstd, wg = out_grad * out_scale * weight;
    weight_grad is the sum over the rows of xh * out_grad * out_scale. weight, with weight_grad, and residual_out_grad
    may be null. workspace has a row for each block of the first launch.
    """
    is_aligned_form = form != "general"
    steps, blocks_per_sm = _PLAN[kind][form]
    vector = {"bf16": 8, "fp32": 4}[kind] if is_aligned_form else 1
    num_tokens, hidden, num_parts = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_parts")
    strides = [T.dynamic(f"{name}_stride", "int64") for name in ("out_grad", "x", "residual_out_grad")]

    @T.prim_func
    def main(
        out_grad: T.StridedTensor((num_tokens, hidden), (strides[0], 1), _DTYPES[kind]),
        x: T.StridedTensor((num_tokens, hidden), (strides[1], 1), _DTYPES[kind]),
        weight: T.Tensor((hidden,), _DTYPES[kind]),
        rstd: T.Tensor((num_tokens,), "float32"),
        residual_out_grad: T.StridedTensor((num_tokens, hidden), (strides[2], 1), _DTYPES[kind]),
        x_grad: T.Tensor((num_tokens, hidden), _DTYPES[kind]),
        weight_grad: T.Tensor((hidden,), "uint8"),
        workspace: T.Tensor((num_parts, hidden), "float32"),
        out_scale: T.float32,
        accumulate: T.bool,
        is_bf16: T.bool,
        is_aligned: T.bool,
    ):
        T.assume(hidden % 32 == 0)
        T.assume(hidden <= steps * 8 * _THREADS)
        T.assume(num_parts > 0)
        T.assume(strides[0] % vector == 0)
        T.assume(strides[1] % vector == 0)
        T.assume(strides[2] % vector == 0)
        if is_aligned_form:
            T.assume(is_aligned)
        with T.Kernel(num_parts, threads=_THREADS) as block:
            include("norm.cuh")
            T.annotate_min_blocks_per_sm(blocks_per_sm)
            shared = T.alloc_shared((2 * _THREADS // 32,), "float32")
            T.call_extern(
                "handle",
                f"tk::norm_backward_rows<{_TAGS[kind]}, {steps}, {str(is_aligned_form).lower()}>",
                T.access_ptr(x[0, 0], "r"),
                strides[1],
                T.access_ptr(out_grad[0, 0], "r"),
                strides[0],
                weight.data,
                T.if_then_else(T.isnullptr(weight.data), False, True),
                T.access_ptr(rstd[0], "r"),
                residual_out_grad.data,
                strides[2],
                T.if_then_else(T.isnullptr(residual_out_grad.data), False, True),
                T.access_ptr(x_grad[0, 0], "w"),
                T.access_ptr(workspace[0, 0], "w"),
                num_tokens,
                hidden,
                out_scale,
                block,
                num_parts,
                T.address_of(shared[0]),
            )
        with T.Kernel(T.ceildiv(hidden, _COLUMNS), threads=32 * _SUM_WARPS) as block:
            include("norm.cuh")
            shared = T.alloc_shared((32 * _SUM_WARPS,), "float32")
            if not T.isnullptr(weight_grad.data):
                T.call_extern(
                    "handle",
                    f"tk::sum_weight_grad<{_SUM_WARPS}>",
                    T.access_ptr(workspace[0, 0], "r"),
                    num_parts,
                    hidden,
                    block * _COLUMNS,
                    T.access_ptr(weight_grad[0], "rw"),
                    is_bf16,
                    accumulate,
                    T.address_of(shared[0]),
                )

    return main
