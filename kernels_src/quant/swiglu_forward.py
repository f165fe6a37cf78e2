"""SwiGLU of rows that hold gates, then values to gate: to bf16 or fp32, or to FP8 with a scale for each group.

A warp takes a row, or a share of one in a small batch, and goes over it in tiles; a thread holds neighbouring channels,
and the lanes that share a scale find its largest magnitude by butterfly. Beside memory instructions bound the kernel,
27 a channel, 41 would take as long as the bytes on an H200: hence all of a row stands in swiglu_row.cuh. Scales of
whole rows take a second walk over the row.
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

_WARP = 32
_WARPS = 8
_THREADS = _WARP * _WARPS
_BLOCKS_PER_SM = 4  # what registers are limited for

_ALIGNED = "and_(aligned(x, 16), aligned(out, 16))"


def _channels(kind: str, fmt: str) -> int:
    """Of a thread. With 16 what is done for a group and for a store costs half as much a channel; fp32 fills 16 bytes
    with half as many."""
    return 8 if "fp32" in (kind, fmt) else 16


def _num_blocks(num_tokens, num_parts):
    return T.ceildiv(num_tokens * num_parts, _WARPS)


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
def _add_counts(clamped_count, counts, num_counts):
    """Add the counts of all threads of a block: what was above, above and below the limit, and how many there were."""
    shared = T.alloc_shared((4 * _WARPS,), "int32")
    thread = T.get_thread_binding()
    for i in T.unroll(4):
        total = T.call_extern("int32", "__reduce_add_sync", T.uint32(0xFFFFFFFF), counts[i])
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
def _forward(
    x, psum, pos_to_expert, pos_to_token_topk, topk_weights, clamped_count, block, name, outputs, sizes, limits,
    routed_scaling_factor,
):  # fmt: skip
    """One block. name: of the helper that takes a row; outputs: its arguments between those on x and on the row.

    sizes: (num_tokens, hidden, stride of x, num_experts, alignment, num_weights, num_counts, num_parts); limits:
    (has_clamp, clamp_value).
    """
    include("swiglu_row.cuh")
    T.annotate_min_blocks_per_sm(_BLOCKS_PER_SM)
    weight = T.alloc_local((1,), "float32")
    has_weight = T.alloc_local((1,), "bool")
    is_valid = T.alloc_local((1,), "int32")
    counts = T.alloc_local((4,), "int32")
    item = T.alloc_var("int32")
    row = T.alloc_var("int32")
    part = T.alloc_var("int32")
    thread = T.get_thread_binding()
    for i in T.unroll(4):
        counts[i] = 0
    item = block * _WARPS + thread // _WARP
    if item < sizes[0] * sizes[7]:
        row = T.truncdiv(item, sizes[7])
        part = T.truncmod(item, sizes[7])
        _find_row(psum, pos_to_expert, row, sizes[3], sizes[4], is_valid)
        if is_valid[0] != 0:
            _load_weight(topk_weights, pos_to_token_topk, row, sizes[5], routed_scaling_factor, has_weight, weight)
            T.call_extern(
                "handle",
                name,
                T.access_ptr(x[0, 0], "r"),
                sizes[2],
                *outputs,
                row,
                sizes[1],
                part,
                sizes[7],
                limits[0],
                limits[1],
                has_weight[0],
                weight[0],
                T.if_then_else(T.isnullptr(clamped_count.data), False, True),
                T.address_of(counts[0]),
            )
    if not T.isnullptr(clamped_count.data):
        _add_counts(clamped_count, counts, sizes[6])


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), form=forms("aligned", "general", "rows_aligned", "rows_general")),
    accepts={"out_sf": ("float32", "int32")},
    derived={"is_packed": "is_dtype(out_sf, int32)", "is_aligned": _ALIGNED},
    pass_configs=_PASS_CONFIGS,
)
def swiglu_forward_and_per_token_cast(kind, form):
    """Cast SwiGLU of x to out, e4m3, with a scale for every num_per_channels channels of a row in out_sf.

    num_per_channels is 32, 128, or 0 for whole rows. Rows are those of the segments that end before
    psum_num_tokens_per_expert[e] and start at multiples of alignment, or those for which pos_to_expert is not negative.
    They are weighted by topk_weights, at pos_to_token_topk where given. A warp takes one of num_parts parts of a row.
    """
    is_aligned_form, has_groups = form.endswith("aligned"), not form.startswith("rows")
    vector = {"bf16": 8, "fp32": 4}[kind] if is_aligned_form else 1
    helper = "swiglu_row_to_e4m3" if has_groups else "swiglu_row_to_e4m3_with_one_scale"
    name = f"tk::{helper}<{_TAGS[kind]}, {_channels(kind, 'e4m3')}, {str(is_aligned_form).lower()}>"
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
        is_packed: T.bool,
        is_aligned: T.bool,
    ):
        if has_groups:
            T.assume(T.Or(num_per_channels == 32, num_per_channels == 128))
            T.assume(hidden % num_per_channels == 0)
            T.assume(num_sf_columns == T.ceildiv(hidden, num_per_channels * T.if_then_else(is_packed, 4, 1)))
        else:
            T.assume(num_per_channels == 0)
            T.assume(num_sf_columns == 1)
            T.assume(num_parts == 1)
        T.assume(hidden % 64 == 0)
        T.assume(x_stride % vector == 0)
        T.assume(alignment > 0)
        T.assume(num_parts > 0)
        if is_aligned_form:
            T.assume(is_aligned)
        with T.Kernel(_num_blocks(num_tokens, num_parts), threads=_THREADS) as block:
            _forward(
                x, psum_num_tokens_per_expert, pos_to_expert, pos_to_token_topk, topk_weights, clamped_count, block,
                name,
                (
                    T.access_ptr(out[0, 0], "w"), T.access_ptr(out_sf[0, 0], "w"), *out_sf_strides, num_sf_columns,
                    is_packed, num_per_channels, clamp_min, round_sf,
                ),
                (num_tokens, hidden, x_stride, num_experts, alignment, num_weights, num_counts, num_parts),
                (has_clamp, clamp_value), routed_scaling_factor,
            )  # fmt: skip

    return main


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), fmt=dtype_of("out", **_DTYPES), form=forms("aligned", "general")),
    derived={"is_aligned": _ALIGNED},
    pass_configs=_PASS_CONFIGS,
)
def swiglu_forward(kind, fmt, form):
    """Write SwiGLU of x to out. Arguments are those of swiglu_forward_and_per_token_cast."""
    is_aligned_form = form == "aligned"
    vector = {"bf16": 8, "fp32": 4}[kind] if is_aligned_form else 1
    name = f"tk::swiglu_row<{_TAGS[kind]}, {_TAGS[fmt]}, {_channels(kind, fmt)}, {str(is_aligned_form).lower()}>"
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
        is_aligned: T.bool,
    ):
        T.assume(hidden % 64 == 0)
        T.assume(x_stride % vector == 0)
        T.assume(alignment > 0)
        T.assume(num_parts > 0)
        if is_aligned_form:
            T.assume(is_aligned)
        with T.Kernel(_num_blocks(num_tokens, num_parts), threads=_THREADS) as block:
            _forward(
                x, psum_num_tokens_per_expert, pos_to_expert, pos_to_token_topk, topk_weights, clamped_count, block,
                name, (T.access_ptr(out[0, 0], "w"),),
                (num_tokens, hidden, x_stride, num_experts, alignment, num_weights, num_counts, num_parts),
                (has_clamp, clamp_value), routed_scaling_factor,
            )  # fmt: skip

    return main
