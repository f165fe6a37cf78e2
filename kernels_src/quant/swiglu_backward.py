"""Gradients of SwiGLU: of gates and values, also cast to FP8, of the rows' weights, and the result once more.

A block takes a row, a thread eight neighbouring channels of both halves at a time. More than half of the traffic is
written. The weight's gradient is a sum over the row: lanes, then warps, in a fixed order.
"""

import tilelang.language as T

from ..common.casting import MAX_VALUES, exact_log2, group_maxima, make_scales, store_row
from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "e4m3": "float8_e4m3fn"}
_PLAIN = {"bf16": "bfloat16", "fp32": "float32"}
_TAGS = {"bf16": "tk::Bf16", "fp32": "tk::Fp32", "e4m3": "tk::E4m3"}
_VECTORS = {"bf16": 8, "fp32": 4, "e4m3": 8}  # elements of one access: 16 bytes, or a thread's channels

_WARP = 32
_WARPS = 4
_THREADS = _WARP * _WARPS
_BLOCKS_PER_SM = 6  # what registers are limited for
_CHANNELS = 8  # of a thread


class _Shape:
    """The kinds of x, of the gradient that comes in and of those that go out, and the widths of accesses to them."""

    def __init__(self, kind: str, grad: str, out: str, form: str) -> None:
        self.kind, self.grad, self.out = kind, grad, out
        self.x_vector, self.grad_vector, self.out_vector = (
            _VECTORS[each] if form == "aligned" else 1 for each in (kind, grad, out)
        )
        self.fp8_vector = _VECTORS["e4m3"] if form == "aligned" else 1


@T.macro
def _load(source, row, chunk, start, vector, target):
    """target[i] = source[row, start + chunk * _CHANNELS + i]."""
    for i in T.unroll(_CHANNELS // vector):
        for j in T.vectorized(vector):
            target[i * vector + j] = source[row, start + chunk * _CHANNELS + i * vector + j]


@T.macro
def _store(values, target, row, chunk, dtype, vector):
    """target[row, chunk * _CHANNELS + i] = values[i], rounded."""
    rounded = T.alloc_local((_CHANNELS,), dtype)
    for i in T.unroll(_CHANNELS):
        rounded[i] = T.cast(values[i], dtype)
    store_row(rounded, target, row, chunk, _CHANNELS, vector)


@T.macro
def _store_quantised(values, out, out_sf, row, column, start, num_groups, is_valid, shape, hidden, options):
    """One half of a row, `start` columns and `num_groups` groups from its start. Rows of no expert get scales of zero.

    options: (strides of out_sf, num_sf_columns, num_per_channels, clamp_min, round_sf, is_packed).
    """
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    factor = T.alloc_local((1,), "float32")
    target = T.alloc_local((_CHANNELS,), "float8_e4m3fn")
    name = f"tk::largest_magnitude<tk::Fp32, {_CHANNELS}>"
    largest[0] = T.call_extern("float32", name, T.address_of(values[0]))
    group_maxima(1, _CHANNELS, largest, options[2])
    make_scales(1, largest, options[3], MAX_VALUES["e4m3"], options[4], 0, scale, factor)
    if column < hidden:
        name = f"tk::scale_to_e4m3<tk::Fp32, {_CHANNELS}>"
        T.call_extern("handle", name, T.address_of(values[0]), factor[0], T.address_of(target[0]))
        store_row(target, out, row, T.truncdiv(start + column, _CHANNELS), _CHANNELS, shape.fp8_vector)
        if T.bitwise_and(column, options[2] - 1) == 0:
            if is_valid == 0:
                scale[0] = T.float32(0)
            T.call_extern(
                "handle",
                "tk::store_scale",
                T.access_ptr(out_sf[0, 0], "w"),
                *options[0],
                options[1],
                row,
                num_groups + T.shift_right(column, exact_log2(options[2])),
                options[5],
                scale[0],
            )


@T.macro
def _sum_of_block(partial, shared):
    """The sum of partial[0] over a block, for all of its threads."""
    thread = T.get_thread_binding()
    for i in T.unroll(5):
        partial[0] = partial[0] + T.shfl_xor(partial[0], 1 << i)
    if thread % _WARP == 0:
        shared[thread // _WARP] = partial[0]
    T.sync_threads()
    partial[0] = shared[0]
    for i in T.unroll(_WARPS - 1):
        partial[0] = partial[0] + shared[i + 1]


@T.macro
def _backward(
    x, x_sf, act_x_grad, psum, pos_to_token_topk, topk_weights, x_grad, x_grad_fp8, x_grad_sf, weight_grad, act_out,
    row, shape, sizes, limits, routed_scaling_factor, options,
):  # fmt: skip
    """One row. sizes: (hidden, num_experts, alignment, num_weights); limits: (has_clamp, clamp_value).

    x_sf, x_grad_fp8, x_grad_sf and options: None, or those of _store_quantised.
    """
    include("swiglu.cuh")
    T.annotate_min_blocks_per_sm(_BLOCKS_PER_SM)
    gates = T.alloc_local((_CHANNELS,), _DTYPES[shape.kind])
    ups = T.alloc_local((_CHANNELS,), _DTYPES[shape.kind])
    grads = T.alloc_local((_CHANNELS,), _DTYPES[shape.grad])
    gate_grads = T.alloc_local((_CHANNELS,), "float32")
    up_grads = T.alloc_local((_CHANNELS,), "float32")
    results = T.alloc_local((_CHANNELS,), "float32")
    dot = T.alloc_local((1,), "float32")
    gate_scale = T.alloc_var("float32")
    up_scale = T.alloc_var("float32")
    weight = T.alloc_var("float32")
    position = T.alloc_var("int32")
    is_valid = T.alloc_var("int32")
    shared = T.alloc_shared((_WARPS,), "float32")
    thread = T.get_thread_binding()
    dot[0] = T.float32(0)
    is_valid = 1
    if not T.isnullptr(psum.data):
        is_valid = 1 - T.call_extern("int32", "tk::is_padding", T.access_ptr(psum[0], "r"), sizes[1], sizes[2], row)
    weight = T.float32(1)
    position = row
    if not T.isnullptr(pos_to_token_topk.data):
        position = pos_to_token_topk[row]
    if not T.isnullptr(topk_weights.data):
        weight = T.float32(0)
        if position >= 0 and position < sizes[3]:
            weight = T.call_extern("float32", "__fmul_rn", topk_weights[position], routed_scaling_factor)

    for tile in T.serial(T.truncdiv(sizes[0] + _THREADS * _CHANNELS - 1, _THREADS * _CHANNELS)):
        chunk = tile * _THREADS + thread
        # hidden, written so that accesses are seen to be aligned
        half = T.truncdiv(sizes[0], 64) * 64
        for i in T.unroll(_CHANNELS):
            gate_grads[i] = T.float32(0)
            up_grads[i] = T.float32(0)
            results[i] = T.float32(0)
        if is_valid != 0 and chunk * _CHANNELS < sizes[0]:
            _load(x, row, chunk, 0, shape.x_vector, gates)
            _load(x, row, chunk, half, shape.x_vector, ups)
            _load(act_x_grad, row, chunk, 0, shape.grad_vector, grads)
            gate_scale = T.float32(1)
            up_scale = T.float32(1)
            if options is not None:
                group = T.shift_right(chunk * _CHANNELS, exact_log2(options[2]))
                gate_scale = x_sf[row, group]
                up_scale = x_sf[row, T.shift_right(sizes[0], exact_log2(options[2])) + group]
            T.call_extern(
                "handle",
                f"tk::swiglu_gradient<{_TAGS[shape.kind]}, {_TAGS[shape.grad]}>",
                T.address_of(gates[0]),
                T.address_of(ups[0]),
                gate_scale,
                up_scale,
                T.address_of(grads[0]),
                limits[0],
                limits[1],
                weight,
                T.address_of(gate_grads[0]),
                T.address_of(up_grads[0]),
                T.address_of(results[0]),
                T.address_of(dot[0]),
            )
        if chunk * _CHANNELS < sizes[0]:
            _store(gate_grads, x_grad, row, chunk, _DTYPES[shape.out], shape.out_vector)
            _store(up_grads, x_grad, row, T.truncdiv(half, _CHANNELS) + chunk, _DTYPES[shape.out], shape.out_vector)
            if not T.isnullptr(act_out.data):
                _store(results, act_out, row, chunk, _DTYPES[shape.out], shape.out_vector)
        if options is not None:
            num_groups = T.shift_right(sizes[0], exact_log2(options[2]))
            column = chunk * _CHANNELS
            _store_quantised(gate_grads, x_grad_fp8, x_grad_sf, row, column, 0, 0, is_valid, shape, sizes[0], options)
            _store_quantised(
                up_grads, x_grad_fp8, x_grad_sf, row, column, half, num_groups, is_valid, shape, sizes[0], options
            )

    if not T.isnullptr(weight_grad.data):
        _sum_of_block(dot, shared)
        if thread == 0 and position >= 0 and position < sizes[3]:
            weight_grad[position] = T.call_extern("float32", "__fmul_rn", dot[0], routed_scaling_factor)


@kernel(
    axes=grid(grad=dtype_of("act_x_grad", **_PLAIN), form=forms("aligned", "general")),
    accepts={"x_grad_sf": ("float32", "int32")},
    derived={"is_packed": "is_dtype(x_grad_sf, int32)"},
    pass_configs=_PASS_CONFIGS,
)
def swiglu_backward_and_per_token_cast(grad, form):
    """Write the gradients of SwiGLU of x * x_sf, e4m3 with a scale for num_per_channels (32 or 128) channels of a row.

    x_grad in bf16; x_grad_fp8 and x_grad_sf as the forward pass casts its result; weight_grad, for each weight that a
    row has; act_out, the weighted result. The last two may be null. Rows behind the end of a segment of
    psum_num_tokens_per_expert and before the start of the next, at a multiple of alignment, get zeros.
    """
    shape = _Shape("e4m3", grad, "bf16", form)
    num_tokens, hidden, num_sf_columns = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_columns")
    num_groups = T.dynamic("num_groups")
    num_experts, num_weights = T.dynamic("num_experts"), T.dynamic("num_weights")
    sf_strides = T.dynamic("x_grad_sf_row_stride", "int64"), T.dynamic("x_grad_sf_column_stride", "int64")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden * 2), "float8_e4m3fn"),
        x_sf: T.Tensor((num_tokens, num_groups), "float32"),
        act_x_grad: T.Tensor((num_tokens, hidden), _DTYPES[grad]),
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
    ):
        T.assume(T.Or(num_per_channels == 32, num_per_channels == 128))
        T.assume(hidden % num_per_channels == 0)
        T.assume(hidden % 64 == 0)
        T.assume(num_groups == T.truncdiv(hidden * 2, num_per_channels))
        T.assume(num_sf_columns == T.ceildiv(hidden * 2, num_per_channels * T.if_then_else(is_packed, 4, 1)))
        T.assume(alignment > 0)
        with T.Kernel(num_tokens, threads=_THREADS) as row:
            _backward(
                x, x_sf, act_x_grad, psum_num_tokens_per_expert, pos_to_token_topk, topk_weights, x_grad, x_grad_fp8,
                x_grad_sf, weight_grad, act_out, row, shape, (hidden, num_experts, alignment, num_weights),
                (has_clamp, clamp_value), routed_scaling_factor,
                (sf_strides, num_sf_columns, num_per_channels, clamp_min, round_sf, is_packed),
            )  # fmt: skip

    return main


@kernel(
    axes=grid(kind=dtype_of("x", **_PLAIN), fmt=dtype_of("x_grad", **_PLAIN), form=forms("aligned", "general")),
    pass_configs=_PASS_CONFIGS,
)
def swiglu_backward(kind, fmt, form):
    """Write the gradients of SwiGLU of x. Arguments are those of swiglu_backward_and_per_token_cast."""
    shape = _Shape(kind, kind, fmt, form)
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")
    num_experts, num_weights = T.dynamic("num_experts"), T.dynamic("num_weights")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden * 2), _DTYPES[kind]),
        act_x_grad: T.Tensor((num_tokens, hidden), _DTYPES[kind]),
        psum_num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
        pos_to_token_topk: T.Tensor((num_tokens,), "int32"),
        topk_weights: T.Tensor((num_weights,), "float32"),
        x_grad: T.Tensor((num_tokens, hidden * 2), _DTYPES[fmt]),
        weight_grad: T.Tensor((num_weights,), "float32"),
        act_out: T.Tensor((num_tokens, hidden), _DTYPES[fmt]),
        alignment: T.int32,
        routed_scaling_factor: T.float32,
        has_clamp: T.bool,
        clamp_value: T.float32,
    ):
        T.assume(hidden % 64 == 0)
        T.assume(alignment > 0)
        with T.Kernel(num_tokens, threads=_THREADS) as row:
            _backward(
                x, None, act_x_grad, psum_num_tokens_per_expert, pos_to_token_topk, topk_weights, x_grad, None, None,
                weight_grad, act_out, row, shape, (hidden, num_experts, alignment, num_weights),
                (has_clamp, clamp_value), routed_scaling_factor, None,
            )  # fmt: skip

    return main
