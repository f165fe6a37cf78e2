"""SwiGLU of rows that hold gates, then values to gate: to bf16 or fp32, or to FP8 with a scale for each group.

A warp takes a row, or a share of one in a small batch, and goes over it in tiles; a thread holds neighbouring channels,
and the lanes that share a scale find its largest magnitude by butterfly. What bounds the kernel beside memory is
instructions, hence the division written out in swiglu.cuh. The number of blocks is the caller's: where clamped numbers
are counted, few blocks add to the same counters.
"""

import tilelang.language as T

from ..common.casting import (
    MAX_VALUES,
    exact_log2,
    group_maxima,
    make_scales,
    store_row,
)
from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_TAGS = {"bf16": "tk::Bf16", "fp32": "tk::Fp32"}
_VECTORS = {"bf16": 8, "fp32": 4, "e4m3": 16}  # elements of 16 bytes

_WARP = 32
_WARPS = 8
_THREADS = _WARP * _WARPS
_BLOCKS_PER_SM = 4  # what registers are limited for


class _Shape:
    """Channels of a thread, and the widths of its accesses to x and out."""

    def __init__(self, kind: str, fmt: str, form: str) -> None:
        self.kind = kind
        # With 16 what is done for a group and for a store costs half as much a channel, where registers allow it
        self.channels = 8 if "fp32" in (kind, fmt) else 16
        self.x_vector = _VECTORS[kind] if form == "aligned" else 1
        self.out_vector = min(_VECTORS[fmt], self.channels) if form == "aligned" else 1


def _num_tiles(hidden, channels):
    """Tiles of a row: so many that there are threads for every byte of a packed word of scales of 128 channels."""
    return T.ceildiv(hidden, 512) * (512 // (channels * _WARP))


def _num_blocks(num_tokens, num_parts, max_blocks):
    return T.min(T.ceildiv(num_tokens * num_parts, _WARPS), max_blocks)


@T.macro
def _find_row(psum, pos_to_expert, row, num_experts, alignment, is_valid):
    """Whether the row belongs to an expert."""
    is_valid[0] = 1
    if not T.isnullptr(psum.data):
        is_valid[0] = T.call_extern(
            "int32", "tk::is_in_segment", T.access_ptr(psum[0], "r"), num_experts, alignment, row
        )
    if not T.isnullptr(pos_to_expert.data):
        if pos_to_expert[row] < 0:
            is_valid[0] = 0


@T.macro
def _load_weight(topk_weights, pos_to_token_topk, row, num_weights, routed_scaling_factor, has_weight, weight):
    """What the row is multiplied by; 0 where its position is negative."""
    has_weight[0] = T.bool(False)
    weight[0] = T.float32(1)
    if not T.isnullptr(topk_weights.data):
        has_weight[0] = T.bool(True)
        if T.isnullptr(pos_to_token_topk.data):
            weight[0] = topk_weights[row]
        else:
            position = pos_to_token_topk[row]
            weight[0] = T.float32(0)
            if position >= 0 and position < num_weights:
                weight[0] = topk_weights[position]
        weight[0] = T.call_extern("float32", "__fmul_rn", weight[0], routed_scaling_factor)


@T.macro
def _load(x, row, chunk, start, channels, vector, target):
    """target[i] = x[row, start + chunk * channels + i]."""
    for i in T.unroll(channels // vector):
        for j in T.vectorized(vector):
            target[i * vector + j] = x[row, start + chunk * channels + i * vector + j]


@T.macro
def _count(gates, ups, shape, clamp_value, counts, totals):
    T.call_extern(
        "handle",
        f"tk::count_clamped<{_TAGS[shape.kind]}, {shape.channels}>",
        T.address_of(gates[0]),
        T.address_of(ups[0]),
        clamp_value,
        T.address_of(counts[0]),
    )
    totals[3] += shape.channels


@T.macro
def _add_counts(clamped_count, totals, num_counts):
    """Add the counts of all threads of a block: what was above, above and below the limit, and how many there were."""
    shared = T.alloc_shared((4 * _WARPS,), "int32")
    thread = T.get_thread_binding()
    for i in T.unroll(4):
        total = T.call_extern("int32", "__reduce_add_sync", T.uint32(0xFFFFFFFF), totals[i])
        if thread % _WARP == 0:
            shared[i * _WARPS + thread // _WARP] = total
    T.sync_threads()
    if thread < 4 and thread < num_counts:
        added = T.alloc_var("int64")
        added = T.int64(0)
        for i in T.unroll(_WARPS):
            added = added + T.cast(shared[thread * _WARPS + i], "int64")
        T.atomic_add(clamped_count[thread], added)


@T.macro
def _store_values(out, values, fmt, shape, row, chunk):
    target = T.alloc_local((shape.channels,), _DTYPES[fmt])
    for i in T.unroll(shape.channels):
        target[i] = T.cast(values[i], _DTYPES[fmt])
    store_row(target, out, row, chunk, shape.channels, shape.out_vector)


@T.macro
def _store_quantised(out, out_sf, values, shape, row, chunk, hidden, options):
    """options: (strides of out_sf, num_sf_columns, num_per_channels, clamp_min, round_sf, is_packed)."""
    largest = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    factor = T.alloc_local((1,), "float32")
    target = T.alloc_local((shape.channels,), "float8_e4m3fn")
    largest[0] = T.call_extern("float32", f"tk::largest_magnitude<tk::Fp32, {shape.channels}>", T.address_of(values[0]))
    group_maxima(1, shape.channels, largest, options[2])
    make_scales(1, largest, options[3], MAX_VALUES["e4m3"], options[4], 0, scale, factor)
    column = chunk * shape.channels
    if column < hidden:
        name = f"tk::scale_to_e4m3<tk::Fp32, {shape.channels}>"
        T.call_extern("handle", name, T.address_of(values[0]), factor[0], T.address_of(target[0]))
        store_row(target, out, row, chunk, shape.channels, shape.out_vector)
    # The first lane of each group stores; bytes of a packed word beyond the last group become 0
    if T.bitwise_and(column, options[2] - 1) == 0:
        if column >= hidden:
            scale[0] = T.float32(0)
        group = T.shift_right(column, exact_log2(options[2]))
        T.call_extern(
            "handle",
            "tk::store_scale",
            T.access_ptr(out_sf[0, 0], "w"),
            *options[0],
            options[1],
            row,
            group,
            options[5],
            scale[0],
        )


@T.macro
def _forward(
    x, psum, pos_to_expert, pos_to_token_topk, topk_weights, out, out_sf, clamped_count, block, num_blocks, fmt, shape,
    sizes, limits, routed_scaling_factor, options,
):  # fmt: skip
    """One block. sizes: (num_tokens, hidden, num_experts, alignment, num_weights, num_counts, num_parts).

    limits: (has_clamp, clamp_value). out_sf and options: None, or those of _store_quantised.
    """
    include("swiglu.cuh")
    T.annotate_min_blocks_per_sm(_BLOCKS_PER_SM)
    gates = T.alloc_local((shape.channels,), _DTYPES[shape.kind])
    ups = T.alloc_local((shape.channels,), _DTYPES[shape.kind])
    values = T.alloc_local((shape.channels,), "float32")
    weight = T.alloc_local((1,), "float32")
    has_weight = T.alloc_local((1,), "bool")
    is_valid = T.alloc_local((1,), "int32")
    counts = T.alloc_local((3,), "int32")
    totals = T.alloc_local((4,), "int32")
    row = T.alloc_var("int32")
    part = T.alloc_var("int32")
    thread = T.get_thread_binding()
    for i in T.unroll(3):
        counts[i] = 0
    for i in T.unroll(4):
        totals[i] = 0
    first = block * _WARPS + thread // _WARP
    stride = num_blocks * _WARPS
    for step in T.serial(T.truncdiv(sizes[0] * sizes[6] - first + stride - 1, stride)):
        row = T.truncdiv(first + step * stride, sizes[6])
        part = T.truncmod(first + step * stride, sizes[6])
        _find_row(psum, pos_to_expert, row, sizes[2], sizes[3], is_valid)
        if is_valid[0] != 0:
            _load_weight(topk_weights, pos_to_token_topk, row, sizes[4], routed_scaling_factor, has_weight, weight)
            for tile in T.serial(T.truncdiv(_num_tiles(sizes[1], shape.channels) - part + sizes[6] - 1, sizes[6])):
                chunk = (part + tile * sizes[6]) * _WARP + thread % _WARP
                # Threads beyond the row read its last channels
                x_chunk = T.min(chunk, T.truncdiv(sizes[1], shape.channels) - 1)
                _load(x, row, x_chunk, 0, shape.channels, shape.x_vector, gates)
                # hidden, written so that accesses are seen to be aligned
                half = T.truncdiv(sizes[1], 64) * 64
                _load(x, row, x_chunk, half, shape.channels, shape.x_vector, ups)
                if not T.isnullptr(clamped_count.data):
                    if chunk * shape.channels < sizes[1]:
                        _count(gates, ups, shape, limits[1], counts, totals)
                T.call_extern(
                    "handle",
                    f"tk::swiglu<{_TAGS[shape.kind]}, {shape.channels}>",
                    T.address_of(gates[0]),
                    T.address_of(ups[0]),
                    limits[0],
                    limits[1],
                    has_weight[0],
                    weight[0],
                    T.address_of(values[0]),
                )
                if options is not None:
                    _store_quantised(out, out_sf, values, shape, row, chunk, sizes[1], options)
                else:
                    if chunk * shape.channels < sizes[1]:
                        _store_values(out, values, fmt, shape, row, chunk)
            if not T.isnullptr(clamped_count.data):
                T.call_extern("handle", "tk::flush_counts", T.address_of(counts[0]), T.address_of(totals[0]))
    if not T.isnullptr(clamped_count.data):
        _add_counts(clamped_count, totals, sizes[5])


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), form=forms("aligned", "general")),
    accepts={"out_sf": ("float32", "int32")},
    derived={"is_packed": "is_dtype(out_sf, int32)"},
    pass_configs=_PASS_CONFIGS,
)
def swiglu_forward_and_per_token_cast(kind, form):
    """Cast SwiGLU of x to out, e4m3, with a scale for every num_per_channels (32 or 128) channels of a row in out_sf.

    Rows are those of the segments that end before psum_num_tokens_per_expert[e] and start at multiples of alignment, or
    those for which pos_to_expert is not negative. They are weighted by topk_weights, at pos_to_token_topk where given.
    A warp takes one of num_parts parts of a row; blocks are at most max_blocks.
    """
    shape = _Shape(kind, "e4m3", form)
    num_tokens, hidden, num_sf_columns = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_columns")
    num_experts, num_weights, num_counts = T.dynamic("num_experts"), T.dynamic("num_weights"), T.dynamic("num_counts")
    x_stride = T.dynamic("x_stride", "int64")
    out_sf_strides = T.dynamic("out_sf_row_stride", "int64"), T.dynamic("out_sf_column_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden * 2), (x_stride, 1), _DTYPES[kind]),
        psum_num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
        pos_to_expert: T.Tensor((num_tokens,), "int32"),
        pos_to_token_topk: T.Tensor((num_tokens,), "int32"),
        topk_weights: T.Tensor((num_weights,), "float32"),
        out: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        out_sf: T.StridedTensor((num_tokens, num_sf_columns), out_sf_strides, "uint32"),
        clamped_count: T.Tensor((num_counts,), "int64"),
        alignment: T.int32,
        routed_scaling_factor: T.float32,
        has_clamp: T.bool,
        clamp_value: T.float32,
        clamp_min: T.float32,
        round_sf: T.bool,
        num_per_channels: T.int32,
        num_parts: T.int32,
        max_blocks: T.int32,
        is_packed: T.bool,
    ):
        T.assume(T.Or(num_per_channels == 32, num_per_channels == 128))
        T.assume(hidden % num_per_channels == 0)
        T.assume(hidden % 64 == 0)
        T.assume(num_sf_columns == T.ceildiv(hidden, num_per_channels * T.if_then_else(is_packed, 4, 1)))
        T.assume(x_stride % shape.x_vector == 0)
        T.assume(alignment > 0)
        T.assume(num_parts > 0)
        T.assume(max_blocks > 0)
        with T.Kernel(_num_blocks(num_tokens, num_parts, max_blocks), threads=_THREADS) as block:
            _forward(
                x, psum_num_tokens_per_expert, pos_to_expert, pos_to_token_topk, topk_weights, out, out_sf,
                clamped_count, block, _num_blocks(num_tokens, num_parts, max_blocks), "e4m3", shape,
                (num_tokens, hidden, num_experts, alignment, num_weights, num_counts, num_parts),
                (has_clamp, clamp_value), routed_scaling_factor,
                (out_sf_strides, num_sf_columns, num_per_channels, clamp_min, round_sf, is_packed),
            )  # fmt: skip

    return main


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), fmt=dtype_of("out", **_DTYPES), form=forms("aligned", "general")),
    pass_configs=_PASS_CONFIGS,
)
def swiglu_forward(kind, fmt, form):
    """Write SwiGLU of x to out. Arguments are those of swiglu_forward_and_per_token_cast."""
    shape = _Shape(kind, fmt, form)
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")
    num_experts, num_weights, num_counts = T.dynamic("num_experts"), T.dynamic("num_weights"), T.dynamic("num_counts")
    x_stride = T.dynamic("x_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden * 2), (x_stride, 1), _DTYPES[kind]),
        psum_num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
        pos_to_expert: T.Tensor((num_tokens,), "int32"),
        pos_to_token_topk: T.Tensor((num_tokens,), "int32"),
        topk_weights: T.Tensor((num_weights,), "float32"),
        out: T.Tensor((num_tokens, hidden), _DTYPES[fmt]),
        clamped_count: T.Tensor((num_counts,), "int64"),
        alignment: T.int32,
        routed_scaling_factor: T.float32,
        has_clamp: T.bool,
        clamp_value: T.float32,
        num_parts: T.int32,
        max_blocks: T.int32,
    ):
        T.assume(hidden % 64 == 0)
        T.assume(x_stride % shape.x_vector == 0)
        T.assume(alignment > 0)
        T.assume(num_parts > 0)
        T.assume(max_blocks > 0)
        with T.Kernel(_num_blocks(num_tokens, num_parts, max_blocks), threads=_THREADS) as block:
            _forward(
                x, psum_num_tokens_per_expert, pos_to_expert, pos_to_token_topk, topk_weights, out, None,
                clamped_count, block, _num_blocks(num_tokens, num_parts, max_blocks), fmt, shape,
                (num_tokens, hidden, num_experts, alignment, num_weights, num_counts, num_parts),
                (has_clamp, clamp_value), routed_scaling_factor, None,
            )  # fmt: skip

    return main
