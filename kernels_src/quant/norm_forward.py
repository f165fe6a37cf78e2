"""RMSNorm of rows, of the sum with a residual where there is one; also cast to FP8 with a scale for 32 channels.

A block takes a row and keeps it in registers between the sum of squares and the rest. The sum has a set order, which
the reference takes too: each thread over its channels, step after step, then lanes by butterfly, then warps.
"""

import tilelang.language as T

from ..common.casting import MAX_VALUES, group_maxima, load_row, make_scales, store_row
from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_TAGS = {"bf16": "tk::Bf16", "fp32": "tk::Fp32"}
_VECTORS = {"bf16": 8, "fp32": 4}

_WARP = 32
_WARPS = 4
_THREADS = _WARP * _WARPS
_CHANNELS = 8  # of a thread in a step
_STEP = _THREADS * _CHANNELS
_STEPS = 8  # of a row: 8192 channels
_GROUP = 32  # channels that share a scale


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
def _store_scale(out_sf, mega_moe_sf, row, column, hidden, scale, options):
    """The first lane of each group stores; bytes of a packed word beyond the last group become 0."""
    if T.bitwise_and(column, _GROUP - 1) == 0:
        if column >= hidden:
            scale[0] = T.float32(0)
        T.call_extern(
            "handle",
            "tk::store_scale",
            T.access_ptr(out_sf[0, 0], "w"),
            *options[0],
            options[1],
            row,
            T.truncdiv(column, _GROUP),
            options[4],
            scale[0],
        )
        if not T.isnullptr(mega_moe_sf.data):
            if column < hidden:
                T.call_extern(
                    "handle",
                    "tk::store_mega_moe_scale",
                    T.access_ptr(mega_moe_sf[0, 0], "w"),
                    options[5],
                    options[6],
                    row,
                    T.truncdiv(column, _GROUP),
                    scale[0],
                )


@T.macro
def _store_quantised(y, out, out_sf, out_bf16, mega_moe_sf, row, chunk, hidden, kind, form, options):
    """options: (strides of out_sf, num_sf_columns, clamp_min, round_sf, is_packed, stride and block of mega_moe_sf)."""
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    factor = T.alloc_local((1,), "float32")
    target = T.alloc_local((_CHANNELS,), "float8_e4m3fn")
    rounded = T.alloc_local((_CHANNELS,), "bfloat16")
    name = f"tk::largest_magnitude<{_TAGS[kind]}, {_CHANNELS}>"
    largest[0] = T.call_extern("float32", name, T.address_of(y[0]))
    group_maxima(1, _CHANNELS, largest, _GROUP)
    make_scales(1, largest, options[2], MAX_VALUES["e4m3"], options[3], 0, scale, factor)
    if chunk * _CHANNELS < hidden:
        name = f"tk::scale_to_e4m3<{_TAGS[kind]}, {_CHANNELS}>"
        T.call_extern("handle", name, T.address_of(y[0]), factor[0], T.address_of(target[0]))
        store_row(target, out, row, chunk, _CHANNELS, _CHANNELS if form == "aligned" else 1)
        if not T.isnullptr(out_bf16.data):
            for i in T.unroll(_CHANNELS):
                rounded[i] = T.cast(y[i], "bfloat16")
            store_row(rounded, out_bf16, row, chunk, _CHANNELS, _CHANNELS if form == "aligned" else 1)
    _store_scale(out_sf, mega_moe_sf, row, chunk * _CHANNELS, hidden, scale, options)


@T.macro
def _forward(
    x, weight, residual, out, out_sf, out_bf16, residual_out, rstd, mega_moe_sf, row, kind, form, hidden, eps,
    out_scale, options,
):  # fmt: skip
    """One row. out_sf, out_bf16, mega_moe_sf and options: None, or those of _store_quantised."""
    include("norm.cuh")
    vector = _VECTORS[kind] if form == "aligned" else 1
    rows = T.alloc_local((_STEPS * _CHANNELS,), _DTYPES[kind])
    other = T.alloc_local((_CHANNELS,), _DTYPES[kind])
    y = T.alloc_local((_CHANNELS,), _DTYPES[kind])
    total = T.alloc_local((1,), "float32")
    has_weight = T.alloc_local((1,), "bool")
    shared = T.alloc_shared((_WARPS,), "float32")
    thread = T.get_thread_binding()
    total[0] = T.float32(0)
    for step in T.unroll(_STEPS):
        chunk = step * _THREADS + thread
        for i in T.unroll(_CHANNELS):
            rows[step * _CHANNELS + i] = T.cast(0, _DTYPES[kind])
        if chunk * _CHANNELS < hidden:
            load_row(x, row, chunk, _CHANNELS, vector, rows, step * _CHANNELS)
    if not T.isnullptr(residual.data):
        for step in T.unroll(_STEPS):
            chunk = step * _THREADS + thread
            if chunk * _CHANNELS < hidden:
                load_row(residual, row, chunk, _CHANNELS, vector, other, 0)
                T.call_extern(
                    "handle",
                    f"tk::add_residual<{_TAGS[kind]}>",
                    T.address_of(rows[step * _CHANNELS]),
                    T.address_of(other[0]),
                )
                if not T.isnullptr(residual_out.data):
                    for i in T.unroll(_CHANNELS):
                        other[i] = rows[step * _CHANNELS + i]
                    store_row(other, residual_out, row, chunk, _CHANNELS, vector)
    for step in T.unroll(_STEPS):
        if step * _STEP < hidden:
            name = f"tk::add_squares<{_TAGS[kind]}>"
            total[0] = T.call_extern("float32", name, T.address_of(rows[step * _CHANNELS]), total[0])
    _sum_of_block(total, shared)
    total[0] = T.call_extern("float32", "tk::reciprocal_rms", total[0], hidden, eps)
    if not T.isnullptr(rstd.data):
        if thread == 0:
            rstd[row] = total[0]
    for step in T.unroll(_STEPS):
        if step * _STEP < hidden:
            chunk = step * _THREADS + thread
            has_weight[0] = T.bool(False)
            if not T.isnullptr(weight.data):
                has_weight[0] = T.bool(True)
                if chunk * _CHANNELS < hidden:
                    for i in T.unroll(_CHANNELS // vector):
                        for j in T.vectorized(vector):
                            other[i * vector + j] = weight[chunk * _CHANNELS + i * vector + j]
            T.call_extern(
                "handle",
                f"tk::normalise<{_TAGS[kind]}>",
                T.address_of(rows[step * _CHANNELS]),
                T.address_of(other[0]),
                has_weight[0],
                total[0],
                out_scale,
                T.address_of(y[0]),
            )
            if options is None:
                if chunk * _CHANNELS < hidden:
                    store_row(y, out, row, chunk, _CHANNELS, vector)
            else:
                _store_quantised(y, out, out_sf, out_bf16, mega_moe_sf, row, chunk, hidden, kind, form, options)


@kernel(axes=grid(kind=dtype_of("x", **_DTYPES), form=forms("aligned", "general")), pass_configs=_PASS_CONFIGS)
def norm_forward(kind, form):
    """Write (z * rstd) * (weight * out_scale) to out, where z = x + residual and rstd = 1 / sqrt(mean(z^2) + eps).

    z goes to residual_out and rstd to rstd, where they are given. weight, residual, residual_out and rstd may be null.
    """
    vector = _VECTORS[kind] if form == "aligned" else 1
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")
    names = ("x", "residual", "out", "residual_out")
    strides = [T.dynamic(f"{name}_stride", "int64") for name in names]

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (strides[0], 1), _DTYPES[kind]),
        weight: T.Tensor((hidden,), _DTYPES[kind]),
        residual: T.StridedTensor((num_tokens, hidden), (strides[1], 1), _DTYPES[kind]),
        out: T.StridedTensor((num_tokens, hidden), (strides[2], 1), _DTYPES[kind]),
        residual_out: T.StridedTensor((num_tokens, hidden), (strides[3], 1), _DTYPES[kind]),
        rstd: T.Tensor((num_tokens,), "float32"),
        eps: T.float32,
        out_scale: T.float32,
    ):
        T.assume(hidden % 16 == 0)
        T.assume(hidden <= _STEPS * _STEP)
        T.assume(strides[0] % vector == 0)
        T.assume(strides[1] % vector == 0)
        T.assume(strides[2] % vector == 0)
        T.assume(strides[3] % vector == 0)
        with T.Kernel(num_tokens, threads=_THREADS) as row:
            _forward(
                x, weight, residual, out, None, None, residual_out, rstd, None, row, kind, form, hidden, eps,
                out_scale, None,
            )  # fmt: skip

    return main


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), form=forms("aligned", "general")),
    accepts={"out_sf": ("float32", "int32")},
    derived={"is_packed": "is_dtype(out_sf, int32)"},
    pass_configs=_PASS_CONFIGS,
)
def norm_forward_and_per_token_cast(kind, form):
    """Cast what norm_forward computes, rounded to x's dtype, to out, e4m3 with a scale for every 32 channels in out_sf.

    out_bf16 receives the rounded result too, mega_moe_sf the exponents of the scales, in blocks of mega_moe_block_m
    tokens; both may be null.
    """
    vector = _VECTORS[kind] if form == "aligned" else 1
    fp8_vector = _CHANNELS if form == "aligned" else 1
    num_tokens, hidden, num_sf_columns = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_columns")
    names = ("x", "residual", "out", "residual_out", "out_bf16", "out_sf_row", "out_sf_column", "mega_moe_sf")
    strides = [T.dynamic(f"{name}_stride", "int64") for name in names]
    num_words = T.dynamic("num_words")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (strides[0], 1), _DTYPES[kind]),
        weight: T.Tensor((hidden,), _DTYPES[kind]),
        residual: T.StridedTensor((num_tokens, hidden), (strides[1], 1), _DTYPES[kind]),
        out: T.StridedTensor((num_tokens, hidden), (strides[2], 1), "float8_e4m3fn"),
        out_sf: T.StridedTensor((num_tokens, num_sf_columns), (strides[5], strides[6]), "uint32"),
        out_bf16: T.StridedTensor((num_tokens, hidden), (strides[4], 1), "bfloat16"),
        residual_out: T.StridedTensor((num_tokens, hidden), (strides[3], 1), _DTYPES[kind]),
        rstd: T.Tensor((num_tokens,), "float32"),
        mega_moe_sf: T.StridedTensor((num_tokens, num_words), (1, strides[7]), "int32"),
        eps: T.float32,
        out_scale: T.float32,
        clamp_min: T.float32,
        round_sf: T.bool,
        mega_moe_block_m: T.int32,
        is_packed: T.bool,
    ):
        T.assume(hidden % _GROUP == 0)
        T.assume(hidden <= _STEPS * _STEP)
        T.assume(num_sf_columns == T.ceildiv(hidden, _GROUP * T.if_then_else(is_packed, 4, 1)))
        T.assume(mega_moe_block_m > 0)
        T.assume(strides[0] % vector == 0)
        T.assume(strides[1] % vector == 0)
        T.assume(strides[2] % fp8_vector == 0)
        T.assume(strides[3] % vector == 0)
        T.assume(strides[4] % fp8_vector == 0)
        with T.Kernel(num_tokens, threads=_THREADS) as row:
            _forward(
                x, weight, residual, out, out_sf, out_bf16, residual_out, rstd, mega_moe_sf, row, kind, form, hidden,
                eps, out_scale,
                ((strides[5], strides[6]), num_sf_columns, clamp_min, round_sf, is_packed, strides[7],
                 mega_moe_block_m),
            )  # fmt: skip

    return main
