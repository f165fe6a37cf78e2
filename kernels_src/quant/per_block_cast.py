"""Casts of a matrix to FP8 or FP4 with a scale for each block of 32 or 128 tokens by 32 or 128 channels.

A block of threads takes 128 x 128 channels and keeps them in registers, a warp 16 tokens of them: the maximum goes
over a thread's channels, the lanes of the block's columns, the tokens of the warp, and where a block is taller through
shared memory. All channels of a thread share one scale. Block sizes and kinds of scales are uniform branches at run
time.
"""

import tilelang.language as T

from ..common.casting import (
    MAX_VALUES,
    SCALE_DTYPES,
    SOURCES,
    TARGETS,
    convert,
    elements,
    exact_log2,
    group_maxima,
    largest_magnitude,
    load_row,
    make_scales,
    nearest,
    reciprocal,
    scale_kind,
    store_row,
    store_scales,
)
from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
}

_PLAIN = dtype_of("x", bf16="bfloat16", fp32="float32")
_FORMATS = dtype_of("out", e4m3="float8_e4m3fn", e2m1="int8")

_TILE = 128
_WARP_ROWS = 16
_NUM_WARPS = _TILE // _WARP_ROWS
_THREADS = 32 * _NUM_WARPS
_NARROW = 32  # channels or tokens of the smaller blocks
_CHANNELS = {"bf16": 16, "fp32": 8}  # neighbours that a thread holds of a token
# Blocks of threads that have to fit a multiprocessor: left alone, ptxas converts several tokens at once in up to 172
# registers where 64 to 80 will do.
_BLOCKS_PER_SM = {("bf16", "e4m3"): 4, ("bf16", "e2m1"): 4, ("fp32", "e4m3"): 2, ("fp32", "e2m1"): 2}


class _Shape:
    """The sizes of a variant: a thread's channels and tokens, their elements and access widths in x and out."""

    def __init__(self, kind: str, fmt: str, form: str) -> None:
        x_dtype, _, x_bits = SOURCES[kind]
        out_dtype, _, out_bits = TARGETS[fmt]
        is_aligned = form == "aligned"
        self.channels = _CHANNELS[kind] if is_aligned else 8
        self.across = _TILE // self.channels  # lanes of a token
        self.down = 32 // self.across  # tokens of a warp at a time
        self.tokens = _WARP_ROWS // self.down
        self.x_elements = elements(self.channels, x_bits, x_dtype)
        self.out_elements = elements(self.channels, out_bits, out_dtype)
        self.x_vector = min(self.x_elements, elements(128 // x_bits, x_bits, x_dtype)) if is_aligned else 1
        self.out_vector = min(self.out_elements, 16) if is_aligned else 1
        self.blocks_per_sm = _BLOCKS_PER_SM[kind, fmt] if is_aligned else 2


def _num_sf_columns(hidden, block_cols, kind):
    """Columns of a scale tensor, packed four to an int32 or not."""
    return T.ceildiv(hidden, block_cols * T.if_then_else(kind == 1, 4, 1))


def _is_block_size(size):
    return T.Or(size == _NARROW, size == _TILE)


def _num_tiles(num_tokens, hidden):
    """Blocks of threads, neighbours along a row."""
    return T.ceildiv(hidden, _TILE) * T.ceildiv(num_tokens, _TILE)


def _place(shape, tile_row, tile_col, hidden):
    """A thread's first token, its channels in units of shape.channels, and those that it reads.

    Threads whose first token is beyond the matrix read nothing. Others read its last channels or tokens instead of what
    is beyond, which are in their block if any of it exists, and write nothing for them.
    """
    thread = T.get_thread_binding()
    first_row = tile_row * _TILE + thread // 32 * _WARP_ROWS + thread % 32 // shape.across
    chunk = tile_col * shape.across + thread % shape.across
    return first_row, chunk, T.min(chunk, T.truncdiv(hidden, shape.channels) - 1)


@T.macro
def _load_tokens(x, source, shape, first_row, x_chunk, num_tokens):
    for token in T.unroll(shape.tokens):
        row = T.min(first_row + token * shape.down, num_tokens - 1)
        load_row(x, row, x_chunk, shape.x_elements, shape.x_vector, source, token * shape.x_elements)


@T.macro
def _find_maximum(x, kind, source, shape, first_row, x_chunk, num_tokens, block_rows, block_cols, shared, largest):
    """Load a thread's channels; largest[0] = the largest magnitude of their block."""
    thread = T.get_thread_binding()
    warp = thread // 32
    part = thread % shape.across * shape.channels // _NARROW  # of a row of the tile
    largest[0] = T.float32(0)
    if first_row < num_tokens:
        _load_tokens(x, source, shape, first_row, x_chunk, num_tokens)
        for token in T.unroll(shape.tokens):
            largest[0] = T.max(largest[0], largest_magnitude(kind, shape.channels, source, token * shape.x_elements))
    group_maxima(1, shape.channels, largest, block_cols)
    for i in T.unroll(5):
        if (1 << i) >= shape.across:
            largest[0] = T.max(largest[0], T.shfl_xor(largest[0], 1 << i))
    if thread % 32 < shape.across:
        shared[warp, part] = largest[0]
    T.sync_threads()
    if block_rows == _TILE:
        for other in T.unroll(_NUM_WARPS):
            largest[0] = T.max(largest[0], shared[other, part])
    else:
        for i in T.unroll(_NARROW // _WARP_ROWS):
            other = warp // (_NARROW // _WARP_ROWS) * (_NARROW // _WARP_ROWS) + i
            largest[0] = T.max(largest[0], shared[other, part])


@T.macro
def _store_block_scale(
    scales, out_sf, out_sf_strides, shape, num_sf_rows, num_sf_columns, first_row, chunk, hidden, block_rows,
    block_cols, out_sf_kind,
):  # fmt: skip
    """The first thread of each block stores; bytes of a packed word beyond the last block become 0."""
    lane = T.get_thread_binding() % 32
    column = chunk * shape.channels
    last = T.alloc_var("bool")
    group = T.alloc_var("int32")
    if lane < shape.across and T.bitwise_and(first_row, block_rows - 1) == 0:
        group = T.shift_right(column, exact_log2(block_cols))
        last = block_cols == _TILE and lane > 0 and lane < 4 and (column // _TILE + 1) * _TILE >= hidden
        if last or column >= hidden:
            scales[0] = T.float32(0)
        if last:
            group += lane
        if last or T.bitwise_and(column, block_cols - 1) == 0:
            row = T.shift_right(first_row, exact_log2(block_rows))
            store_scales(1, out_sf, out_sf_strides, num_sf_columns, row, 0, num_sf_rows, group, out_sf_kind, scales)


@T.macro
def _convert_tokens(name, source, target, out, shape, factor, first_row, chunk, num_tokens):
    for token in T.unroll(shape.tokens):
        row = first_row + token * shape.down
        convert(name, source, token * shape.x_elements, target, factor)
        if row < num_tokens:
            store_row(target, out, row, chunk, shape.out_elements, shape.out_vector)


@kernel(
    axes=grid(kind=_PLAIN, fmt=_FORMATS, form=forms("aligned", "general")),
    accepts={"out_sf": SCALE_DTYPES[:2]},
    derived={"out_sf_kind": scale_kind("out_sf")},
    pass_configs=_PASS_CONFIGS,
)
def per_block_cast(kind, fmt, form):
    """Cast x to out with a scale for every block of block_rows x block_cols, each 32 or 128, written to out_sf."""
    shape = _Shape(kind, fmt, form)
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")
    num_sf_rows, num_sf_columns = T.dynamic("num_sf_rows"), T.dynamic("num_sf_columns")
    x_stride = T.dynamic("x_stride", "int64")
    out_sf_strides = T.dynamic("out_sf_row_stride", "int64"), T.dynamic("out_sf_column_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), SOURCES[kind][0]),
        out: T.Tensor((num_tokens, hidden if fmt == "e4m3" else hidden // 2), TARGETS[fmt][0]),
        out_sf: T.StridedTensor((num_sf_rows, num_sf_columns), out_sf_strides, "uint8"),
        clamp_min: T.float32,
        round_sf: T.bool,
        block_rows: T.int32,
        block_cols: T.int32,
        out_sf_kind: T.int32,
    ):
        T.assume(_is_block_size(block_rows))
        T.assume(_is_block_size(block_cols))
        T.assume(hidden % 64 == 0)
        T.assume(T.ceildiv(num_tokens, block_rows) == num_sf_rows)
        T.assume(_num_sf_columns(hidden, block_cols, out_sf_kind) == num_sf_columns)
        T.assume(x_stride % shape.x_vector == 0)
        with T.Kernel(_num_tiles(num_tokens, hidden), threads=_THREADS) as block:
            include("cast.cuh", "scale.cuh")
            T.annotate_min_blocks_per_sm(shape.blocks_per_sm)
            source = T.alloc_local((shape.tokens * shape.x_elements,), SOURCES[kind][0])
            target = T.alloc_local((shape.out_elements,), TARGETS[fmt][0])
            largest = T.alloc_local((1,), "float32")
            scales = T.alloc_local((1,), "float32")
            factors = T.alloc_local((1,), "float32")
            shared = T.alloc_shared((_NUM_WARPS, _TILE // _NARROW), "float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(hidden, _TILE))
            tile_col = T.truncmod(block, T.ceildiv(hidden, _TILE))
            first_row, chunk, x_chunk = _place(shape, tile_row, tile_col, hidden)
            _find_maximum(
                x, kind, source, shape, first_row, x_chunk, num_tokens, block_rows, block_cols, shared, largest
            )
            make_scales(1, largest, clamp_min, MAX_VALUES[fmt], round_sf, out_sf_kind, scales, factors)
            _store_block_scale(
                scales, out_sf, out_sf_strides, shape, num_sf_rows, num_sf_columns, first_row, chunk, hidden,
                block_rows, block_cols, out_sf_kind,
            )  # fmt: skip
            if chunk * shape.channels < hidden:
                name = nearest(kind, fmt, shape.channels)
                if kind == "bf16" and fmt == "e2m1":
                    if round_sf:
                        by_power = f"tk::convert_bf16_to_e2m1_by_power<{shape.channels}>"
                        _convert_tokens(by_power, source, target, out, shape, factors[0], first_row, chunk, num_tokens)
                    else:
                        _convert_tokens(name, source, target, out, shape, factors[0], first_row, chunk, num_tokens)
                else:
                    _convert_tokens(name, source, target, out, shape, factors[0], first_row, chunk, num_tokens)

    return main


@kernel(
    axes=grid(kind=_PLAIN, form=forms("aligned", "general")),
    accepts={"out_sf": SCALE_DTYPES[:2]},
    derived={"out_sf_kind": scale_kind("out_sf")},
    pass_configs=_PASS_CONFIGS,
)
def per_block_cast_with_sf_only(kind, form):
    """Write to out_sf the scales that per_block_cast would make for a format whose largest number is max_value."""
    shape = _Shape(kind, "e4m3", form)
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")
    num_sf_rows, num_sf_columns = T.dynamic("num_sf_rows"), T.dynamic("num_sf_columns")
    x_stride = T.dynamic("x_stride", "int64")
    out_sf_strides = T.dynamic("out_sf_row_stride", "int64"), T.dynamic("out_sf_column_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), SOURCES[kind][0]),
        out_sf: T.StridedTensor((num_sf_rows, num_sf_columns), out_sf_strides, "uint8"),
        max_value: T.float32,
        clamp_min: T.float32,
        round_sf: T.bool,
        block_rows: T.int32,
        block_cols: T.int32,
        out_sf_kind: T.int32,
    ):
        T.assume(_is_block_size(block_rows))
        T.assume(_is_block_size(block_cols))
        T.assume(hidden % 64 == 0)
        T.assume(T.ceildiv(num_tokens, block_rows) == num_sf_rows)
        T.assume(_num_sf_columns(hidden, block_cols, out_sf_kind) == num_sf_columns)
        T.assume(x_stride % shape.x_vector == 0)
        with T.Kernel(_num_tiles(num_tokens, hidden), threads=_THREADS) as block:
            include("cast.cuh", "scale.cuh")
            T.annotate_min_blocks_per_sm(shape.blocks_per_sm)
            source = T.alloc_local((shape.tokens * shape.x_elements,), SOURCES[kind][0])
            largest = T.alloc_local((1,), "float32")
            scales = T.alloc_local((1,), "float32")
            factors = T.alloc_local((1,), "float32")
            shared = T.alloc_shared((_NUM_WARPS, _TILE // _NARROW), "float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(hidden, _TILE))
            tile_col = T.truncmod(block, T.ceildiv(hidden, _TILE))
            first_row, chunk, x_chunk = _place(shape, tile_row, tile_col, hidden)
            _find_maximum(
                x, kind, source, shape, first_row, x_chunk, num_tokens, block_rows, block_cols, shared, largest
            )
            make_scales(1, largest, clamp_min, max_value, round_sf, out_sf_kind, scales, factors)
            _store_block_scale(
                scales, out_sf, out_sf_strides, shape, num_sf_rows, num_sf_columns, first_row, chunk, hidden,
                block_rows, block_cols, out_sf_kind,
            )  # fmt: skip

    return main


@kernel(axes=grid(kind=_PLAIN, fmt=_FORMATS, form=forms("aligned", "general")), pass_configs=_PASS_CONFIGS)
def per_block_cast_with_precomputed_sf(kind, fmt, form):
    """Cast x to out with the scales sf of every block of block_rows x block_cols: out = convert(x * (1 / sf))."""
    shape = _Shape(kind, fmt, form)
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")
    num_sf_rows, num_sf_columns = T.dynamic("num_sf_rows"), T.dynamic("num_sf_columns")
    x_stride, sf_stride = T.dynamic("x_stride", "int64"), T.dynamic("sf_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), SOURCES[kind][0]),
        sf: T.StridedTensor((num_sf_rows, num_sf_columns), (sf_stride, 1), "float32"),
        out: T.Tensor((num_tokens, hidden if fmt == "e4m3" else hidden // 2), TARGETS[fmt][0]),
        block_rows: T.int32,
        block_cols: T.int32,
    ):
        T.assume(_is_block_size(block_rows))
        T.assume(_is_block_size(block_cols))
        T.assume(hidden % 64 == 0)
        T.assume(T.ceildiv(num_tokens, block_rows) == num_sf_rows)
        T.assume(_num_sf_columns(hidden, block_cols, 0) == num_sf_columns)
        T.assume(x_stride % shape.x_vector == 0)
        with T.Kernel(_num_tiles(num_tokens, hidden), threads=_THREADS) as block:
            include("cast.cuh", "scale.cuh")
            T.annotate_min_blocks_per_sm(shape.blocks_per_sm)
            source = T.alloc_local((shape.tokens * shape.x_elements,), SOURCES[kind][0])
            target = T.alloc_local((shape.out_elements,), TARGETS[fmt][0])
            scale = T.alloc_var("float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(hidden, _TILE))
            tile_col = T.truncmod(block, T.ceildiv(hidden, _TILE))
            first_row, chunk, x_chunk = _place(shape, tile_row, tile_col, hidden)
            _load_tokens(x, source, shape, first_row, x_chunk, num_tokens)
            row = T.shift_right(T.min(first_row, num_tokens - 1), exact_log2(block_rows))
            scale = sf[row, T.shift_right(x_chunk * shape.channels, exact_log2(block_cols))]
            if chunk * shape.channels < hidden:
                name = nearest(kind, fmt, shape.channels)
                factor = reciprocal(scale)
                _convert_tokens(name, source, target, out, shape, factor, first_row, chunk, num_tokens)

    return main
