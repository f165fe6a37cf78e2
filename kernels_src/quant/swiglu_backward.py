"""Gradients of SwiGLU: of gates and values, also cast to FP8, of the rows' weights, and the result once more.

A block takes a row; swiglu_backward.cuh has what it does there. More than half of the traffic is written. The weight's
gradient is a sum over the row: lanes, then warps, in a fixed order. wide: more threads a row, for few tokens.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}

_PLAIN = {"bf16": "bfloat16", "fp32": "float32"}
_TAGS = {"bf16": "tk::Bf16", "fp32": "tk::Fp32"}
_FORMS = forms("wide", "aligned", "general")

_WARP = 32
_THREADS = {"wide": 512, "aligned": 128, "general": 128}  # with eight channels each at a time
_BLOCKS_PER_SM = {"wide": 1, "aligned": 6, "general": 4}  # what registers are limited for
_WIDE_TOKENS = 256  # up to which more threads a row pay
_WIDE_HIDDEN = 1024  # beyond which they have something to do

_ALIGNED = "and_(aligned(x, 16), and_(aligned(act_x_grad, 16), and_(aligned(x_grad, 16), aligned(act_out, 16))))"


def _helper(name: str, tags: tuple[str, ...], form: str) -> str:
    return f"tk::{name}<{', '.join(tags)}, {_THREADS[form]}, {str(form != 'general').lower()}>"


@T.macro
def _sum_of_block(partial, shared, num_warps):
    """The sum of partial[0] over a block, for all of its threads."""
    thread = T.get_thread_binding()
    for i in T.unroll(5):
        partial[0] = partial[0] + T.shfl_xor(partial[0], 1 << i)
    if thread % _WARP == 0:
        shared[thread // _WARP] = partial[0]
    T.sync_threads()
    partial[0] = shared[0]
    for i in T.unroll(num_warps - 1):
        partial[0] = partial[0] + shared[i + 1]


@T.macro
def _backward(
    name, form, tensors, outputs, psum, pos_to_token_topk, topk_weights, weight_grad, act_out, row, sizes, limits,
    routed_scaling_factor,
):  # fmt: skip
    """One row. name: of the helper; tensors and outputs: its first arguments, up to act_out.

    sizes: (hidden, num_experts, alignment, num_weights); limits: (has_clamp, clamp_value).
    """
    include("swiglu_backward.cuh")
    T.annotate_min_blocks_per_sm(_BLOCKS_PER_SM[form])
    dot = T.alloc_local((1,), "float32")
    weight = T.alloc_var("float32")
    position = T.alloc_var("int32")
    padding = T.alloc_var("int32")
    shared = T.alloc_shared((_THREADS[form] // _WARP,), "float32")
    thread = T.get_thread_binding()
    padding = 0
    if not T.isnullptr(psum.data):
        padding = T.call_extern("int32", "tk::is_padding", T.access_ptr(psum[0], "r"), sizes[1], sizes[2], row)
    weight = T.float32(1)
    position = row
    if not T.isnullptr(pos_to_token_topk.data):
        position = pos_to_token_topk[row]
    if not T.isnullptr(topk_weights.data):
        weight = T.float32(0)
        if position >= 0 and position < sizes[3]:
            weight = T.call_extern("float32", "__fmul_rn", topk_weights[position], routed_scaling_factor)
    if not T.isnullptr(act_out.data):
        T.call_extern("handle", "tk::touch", T.access_ptr(act_out[0, 0], "w"))
    dot[0] = T.call_extern(
        "float32", name, *tensors, *outputs, act_out.data, row, sizes[0], padding != 0, *limits, weight
    )
    if not T.isnullptr(weight_grad.data):
        _sum_of_block(dot, shared, _THREADS[form] // _WARP)
        if thread == 0 and position >= 0 and position < sizes[3]:
            weight_grad[position] = T.call_extern("float32", "__fmul_rn", dot[0], routed_scaling_factor)


@kernel(
    axes=grid(grad=dtype_of("act_x_grad", **_PLAIN), form=_FORMS),
    accepts={"x_grad_sf": ("float32", "int32")},
    derived={
        "is_packed": "is_dtype(x_grad_sf, int32)",
        "is_aligned": f"and_(aligned(x_grad_fp8, 16), {_ALIGNED})",
    },
    pass_configs=_PASS_CONFIGS,
)
def swiglu_backward_and_per_token_cast(grad, form):
    """Write the gradients of SwiGLU of x * x_sf, e4m3 with a scale for num_per_channels (32 or 128) channels of a row.

    x_grad in bf16; x_grad_fp8 and x_grad_sf as the forward pass casts its result; weight_grad, for each weight that a
    row has; act_out, the weighted result. The last two may be null. Rows behind the end of a segment of
    psum_num_tokens_per_expert and before the start of the next, at a multiple of alignment, get zeros.
    """
    num_tokens, hidden, num_sf_columns = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_columns")
    num_groups = T.dynamic("num_groups")
    num_experts, num_weights = T.dynamic("num_experts"), T.dynamic("num_weights")
    sf_strides = T.dynamic("x_grad_sf_row_stride", "int64"), T.dynamic("x_grad_sf_column_stride", "int64")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden * 2), "float8_e4m3fn"),
        x_sf: T.Tensor((num_tokens, num_groups), "float32"),
        act_x_grad: T.Tensor((num_tokens, hidden), _PLAIN[grad]),
        psum_num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
        pos_to_token_topk: T.Tensor((num_tokens,), "int32"),
        topk_weights: T.Tensor((num_weights,), "float32"),
        x_grad: T.Tensor((num_tokens, hidden * 2), "bfloat16"),
        x_grad_fp8: T.Tensor((num_tokens, hidden * 2), "float8_e4m3fn"),
        x_grad_sf: T.StridedTensor((num_tokens, num_sf_columns), sf_strides, "uint32"),
        weight_grad: T.Tensor((num_weights,), "float32"),
        act_out: T.Tensor((num_tokens, hidden), "bfloat16"),
        alignment: T.int32,
        routed_scaling_factor: T.float32,
        has_clamp: T.bool,
        clamp_value: T.float32,
        clamp_min: T.float32,
        round_sf: T.bool,
        num_per_channels: T.int32,
        is_packed: T.bool,
        is_aligned: T.bool,
    ):
        T.assume(T.Or(num_per_channels == 32, num_per_channels == 128))
        T.assume(hidden % num_per_channels == 0)
        T.assume(hidden % 64 == 0)
        T.assume(num_groups == T.truncdiv(hidden * 2, num_per_channels))
        T.assume(num_sf_columns == T.ceildiv(hidden * 2, num_per_channels * T.if_then_else(is_packed, 4, 1)))
        T.assume(alignment > 0)
        if form != "general":
            T.assume(is_aligned)
        if form == "wide":
            T.assume(num_tokens <= _WIDE_TOKENS)
            T.assume(hidden > _WIDE_HIDDEN)
        with T.Kernel(num_tokens, threads=_THREADS[form]) as row:
            _backward(
                _helper("swiglu_backward_and_cast", (_TAGS[grad],), form), form,
                (T.access_ptr(x[0, 0], "r"), T.access_ptr(x_sf[0, 0], "r"), T.access_ptr(act_x_grad[0, 0], "r")),
                (
                    T.access_ptr(x_grad[0, 0], "w"), T.access_ptr(x_grad_fp8[0, 0], "w"),
                    T.access_ptr(x_grad_sf[0, 0], "w"), *sf_strides, num_per_channels, clamp_min, round_sf, is_packed,
                ),
                psum_num_tokens_per_expert, pos_to_token_topk, topk_weights, weight_grad, act_out, row,
                (hidden, num_experts, alignment, num_weights), (has_clamp, clamp_value), routed_scaling_factor,
            )  # fmt: skip

    return main


@kernel(
    axes=grid(kind=dtype_of("x", **_PLAIN), fmt=dtype_of("x_grad", **_PLAIN), form=_FORMS),
    derived={"is_aligned": _ALIGNED},
    pass_configs=_PASS_CONFIGS,
)
def swiglu_backward(kind, fmt, form):
    """Write the gradients of SwiGLU of x. Arguments are those of swiglu_backward_and_per_token_cast."""
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")
    num_experts, num_weights = T.dynamic("num_experts"), T.dynamic("num_weights")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden * 2), _PLAIN[kind]),
        act_x_grad: T.Tensor((num_tokens, hidden), _PLAIN[kind]),
        psum_num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
        pos_to_token_topk: T.Tensor((num_tokens,), "int32"),
        topk_weights: T.Tensor((num_weights,), "float32"),
        x_grad: T.Tensor((num_tokens, hidden * 2), _PLAIN[fmt]),
        weight_grad: T.Tensor((num_weights,), "float32"),
        act_out: T.Tensor((num_tokens, hidden), _PLAIN[fmt]),
        alignment: T.int32,
        routed_scaling_factor: T.float32,
        has_clamp: T.bool,
        clamp_value: T.float32,
        is_aligned: T.bool,
    ):
        T.assume(hidden % 64 == 0)
        T.assume(alignment > 0)
        if form != "general":
            T.assume(is_aligned)
        if form == "wide":
            T.assume(num_tokens <= _WIDE_TOKENS)
            T.assume(hidden > _WIDE_HIDDEN)
        with T.Kernel(num_tokens, threads=_THREADS[form]) as row:
            _backward(
                _helper("swiglu_backward", (_TAGS[kind], _TAGS[fmt]), form), form,
                (T.access_ptr(x[0, 0], "r"), T.access_ptr(act_x_grad[0, 0], "r")), (T.access_ptr(x_grad[0, 0], "w"),),
                psum_num_tokens_per_expert, pos_to_token_topk, topk_weights, weight_grad, act_out, row,
                (hidden, num_experts, alignment, num_weights), (has_clamp, clamp_value), routed_scaling_factor,
            )  # fmt: skip

    return main
