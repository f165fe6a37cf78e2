"""Casts of a matrix to FP8, FP4 or e5m6 with a scale for each group of channels of a token, and their two halves.

A thread holds neighbouring channels of some tokens; the lanes that share a group find its largest magnitude by
butterfly. Whole rows (num_per_channels 0) take a block each. Group size, kinds of scales and rounding of scales are
uniform branches at run time, each taken once for all tokens of a thread; stochastic rounding is an axis because its
registers halve the speed of the rest. Forms differ in access width: aligned reads and writes up to 16 bytes at once,
narrow is for 32 channels that do not share their scales, general takes any stride and address. On an H200 the
aligned forms to e4m3 take the time of a same-size copy (95 to 105 %), bf16 to e2m1 110 % of it with rounded scales
(two bf16 channels at a time) and 123 % without.
"""

import tilelang.language as T

from ..common.casting import (
    MAX_VALUES,
    SCALE_DTYPES,
    SOURCES,
    TARGETS,
    convert,
    decode_scale,
    divide,
    elements,
    exact_log2,
    group_maxima,
    largest_magnitude,
    load_row,
    load_scale,
    make_scales,
    nearest,
    reciprocal,
    scale_kind,
    stochastic_rounding,
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
_ANY = dtype_of("x", bf16="bfloat16", fp32="float32", e4m3="float8_e4m3fn", e2m1="int8")

# Groups: (source, format) -> channels and tokens of a thread. What decides is how many threads fit a multiprocessor:
# with a second token bf16 to e2m1 grows from 80 to 158 registers and takes 63 us instead of 43 (8001 x 7168), one token
# of e4m3 to e4m3 takes 39 instead of 31. A block is 512 channels across, which is a packed word of scales for groups of
# 128. Its 128 threads were 4 % faster than 256 for bf16 to e2m1, equal elsewhere.
_PLAN = {
    ("bf16", "e4m3"): (16, 2),
    ("bf16", "e2m1"): (32, 1),
    ("fp32", "e4m3"): (8, 2),
    ("fp32", "e2m1"): (8, 2),
    ("e4m3", "e4m3"): (16, 4),
    ("e4m3", "e2m1"): (32, 1),
    ("e2m1", "e4m3"): (32, 2),
    ("e2m1", "e2m1"): (32, 2),
}
_NARROW = 16  # channels of a thread where groups or blocks of x are smaller than 32
_TILE = 512
_THREADS = 128
# Rows: threads of a block, channels of a thread at a time, and how many times over it keeps them in registers between
# the two passes: 7168 channels. With 256 threads rows of 4096 took 30 us instead of 26.
_ROW_THREADS = 128
_ROW_CHANNELS = 8
_ROW_STEPS = 7


class _Shape:
    """The sizes of a variant: a thread's channels, their elements and access widths in x and out, a block's threads."""

    def __init__(self, kind: str, fmt: str, form: str, stochastic: bool = False) -> None:
        x_dtype, _, x_bits = SOURCES[kind]
        out_dtype, _, out_bits = TARGETS[fmt]
        self.channels, self.tokens = (_ROW_CHANNELS, 1) if form.startswith("rows") else _PLAN[kind, fmt]
        if form == "narrow" or (form == "general" and kind == "e2m1"):
            self.channels = _NARROW
        elif form == "general":
            self.channels, self.tokens = 8, 2
        if stochastic:
            self.tokens = 1  # bound by instructions: 76 us at 8001 x 7168, 84 with two tokens, 44 to nearest
        self.across = _TILE // self.channels
        self.down = _THREADS // self.across
        self.x_elements = elements(self.channels, x_bits, x_dtype)
        self.out_elements = elements(self.channels, out_bits, out_dtype)
        self.is_scalar = form.endswith("general")
        self.x_vector = 1 if self.is_scalar else min(self.x_elements, elements(128 // x_bits, x_bits, x_dtype))
        # 12 bytes of e5m6 go out as three words
        self.out_vector = 1 if self.is_scalar else 4 if fmt == "e5m6" else min(self.out_elements, 16)


def _is_group_size(num_per_channels, channels):
    """The guard of the forms for groups: 16, 32, 64 or 128, and no less than a thread's channels."""
    large = T.Or(num_per_channels == 64, num_per_channels == 128)
    small = num_per_channels == 32 if channels == 32 else T.Or(num_per_channels == 16, num_per_channels == 32)
    return T.Or(small, large)


def _num_sf_columns(hidden, num_per_channels, kind):
    """Columns of a scale tensor, packed four to an int32 or not."""
    return T.ceildiv(hidden, num_per_channels * T.if_then_else(kind == 1, 4, 1))


def _num_blocks(shape, num_tokens, hidden):
    """Blocks: all on grid x, neighbours along a row: rows first, on a grid of two dimensions, was 3 % slower."""
    return T.ceildiv(hidden, _TILE) * T.ceildiv(num_tokens, shape.tokens * shape.down)


def _place(shape, tile_row, tile_col, hidden):
    """A thread's first token, its channels in units of shape.channels, and those that it reads.

    Threads beyond the matrix read its last channels, which are in their group if any of it exists, and write nothing.
    """
    thread = T.get_thread_binding()
    chunk = tile_col * shape.across + thread % shape.across
    first_row = tile_row * (shape.tokens * shape.down) + thread // shape.across
    return first_row, chunk, T.min(chunk, T.truncdiv(hidden, shape.channels) - 1)


# ---- groups ----------------------------------------------------------------------------------------------------------


@T.macro
def _load_tokens(x, source, shape, first_row, x_chunk, num_tokens):
    for token in T.unroll(shape.tokens):
        row = T.min(first_row + token * shape.down, num_tokens - 1)
        load_row(x, row, x_chunk, shape.x_elements, shape.x_vector, source, token * shape.x_elements)


@T.macro
def _load_x_scales(bits, shape, first_row, x_chunk, num_tokens, x_sf, strides, x_block_rows, x_block_cols, x_sf_kind):
    column = divide(x_chunk * shape.channels, x_block_cols)
    for token in T.unroll(shape.tokens):
        row = T.min(first_row + token * shape.down, num_tokens - 1)
        bits[token] = load_scale(x_sf, strides, divide(row, x_block_rows), column, x_sf_kind)


@T.macro
def _store_group_scales(
    scales, out_sf, out_sf_strides, shape, num_sf_columns, first_row, num_tokens, chunk, hidden, num_per_channels,
    out_sf_kind,
):  # fmt: skip
    """The first lane of each group stores; bytes of a packed word beyond the last group become 0."""
    column = chunk * shape.channels
    if T.bitwise_and(column, num_per_channels - 1) == 0:
        if column >= hidden:
            for token in T.unroll(shape.tokens):
                scales[token] = T.float32(0)
        group = T.shift_right(column, exact_log2(num_per_channels))
        store_scales(
            shape.tokens,
            out_sf,
            out_sf_strides,
            num_sf_columns,
            first_row,
            shape.down,
            num_tokens,
            group,
            out_sf_kind,
            scales,
        )


@T.macro
def _convert_tokens(name, source, target, out, shape, factors, first_row, chunk, num_tokens, more):
    for token in T.unroll(shape.tokens):
        row = first_row + token * shape.down
        convert(name, source, token * shape.x_elements, target, factors[token], *more)
        if row < num_tokens:
            store_row(target, out, row, chunk, shape.out_elements, shape.out_vector)


@T.macro
def _cast_groups(
    x, out, out_sf, kind, fmt, shape, block, num_tokens, hidden, num_sf_columns, sf_strides,
    clamp_min, round_sf, num_per_channels, stochastic, out_sf_kind, pair,
):  # fmt: skip
    """One block of the forms for groups. `pair`: None or (x_sf, its strides, x_block_rows, x_block_cols, x_sf_kind)."""
    include("cast.cuh", "scale.cuh")
    source = T.alloc_local((shape.tokens * shape.x_elements,), SOURCES[kind][0])
    target = T.alloc_local((shape.out_elements,), TARGETS[fmt][0])
    x_scale_bits = T.alloc_local((shape.tokens,), "uint32")
    x_scales = T.alloc_local((shape.tokens,), "float32")
    largest = T.alloc_local((shape.tokens,), "float32")
    scales = T.alloc_local((shape.tokens,), "float32")
    factors = T.alloc_local((shape.tokens,), "float32")
    tile_row = T.alloc_var("int32")
    tile_col = T.alloc_var("int32")
    tile_row = T.truncdiv(block, T.ceildiv(hidden, _TILE))
    tile_col = T.truncmod(block, T.ceildiv(hidden, _TILE))
    first_row, chunk, x_chunk = _place(shape, tile_row, tile_col, hidden)
    _load_tokens(x, source, shape, first_row, x_chunk, num_tokens)
    if pair is not None:
        _load_x_scales(x_scale_bits, shape, first_row, x_chunk, num_tokens, *pair)
    for token in T.unroll(shape.tokens):
        largest[token] = largest_magnitude(kind, shape.channels, source, token * shape.x_elements)
        if pair is not None:
            x_scales[token] = decode_scale(x_scale_bits[token], pair[4])
            largest[token] = largest[token] * x_scales[token]
    group_maxima(shape.tokens, shape.channels, largest, num_per_channels)
    make_scales(shape.tokens, largest, clamp_min, MAX_VALUES[fmt], round_sf, out_sf_kind, scales, factors)
    _store_group_scales(
        scales,
        out_sf,
        sf_strides,
        shape,
        num_sf_columns,
        first_row,
        num_tokens,
        chunk,
        hidden,
        num_per_channels,
        out_sf_kind,
    )
    if pair is not None:
        for token in T.unroll(shape.tokens):
            factors[token] = x_scales[token] * factors[token]
    if chunk * shape.channels < hidden:
        if stochastic:
            name = stochastic_rounding(kind, fmt, shape.channels)
            column = chunk * shape.channels
            _convert_tokens(name, source, target, out, shape, factors, first_row, chunk, num_tokens, (column,))
        elif kind == "bf16" and fmt == "e2m1":
            if round_sf:
                name = f"tk::convert_bf16_to_e2m1_by_power<{shape.channels}>"
                _convert_tokens(name, source, target, out, shape, factors, first_row, chunk, num_tokens, ())
            else:
                name = nearest(kind, fmt, shape.channels)
                _convert_tokens(name, source, target, out, shape, factors, first_row, chunk, num_tokens, ())
        else:
            name = nearest(kind, fmt, shape.channels)
            _convert_tokens(name, source, target, out, shape, factors, first_row, chunk, num_tokens, ())


# ---- whole rows ------------------------------------------------------------------------------------------------------


@T.macro
def _row_maximum(largest, shared):
    """The maximum over a block of threads."""
    thread = T.get_thread_binding()
    for i in T.unroll(5):
        largest[0] = T.max(largest[0], T.shfl_xor(largest[0], 1 << i))
    if thread % 32 == 0:
        shared[thread // 32] = largest[0]
    T.sync_threads()
    for i in T.unroll(_ROW_THREADS // 32):
        largest[0] = T.max(largest[0], shared[i])


@T.macro
def _convert_chunk(source, first, target, out, kind, fmt, shape, row, chunk, factor, stochastic):
    if stochastic:
        convert(stochastic_rounding(kind, fmt, shape.channels), source, first, target, factor, chunk * shape.channels)
    else:
        convert(nearest(kind, fmt, shape.channels), source, first, target, factor)
    store_row(target, out, row, chunk, shape.out_elements, shape.out_vector)


@T.macro
def _cast_row(
    x, out, out_sf, kind, fmt, shape, row, hidden, num_sf_columns, sf_strides, clamp_min, round_sf, stochastic,
    out_sf_kind,
):  # fmt: skip
    """One block of the forms for whole rows: a row is read once as far as the registers reach, what is beyond twice."""
    include("cast.cuh", "scale.cuh")
    source = T.alloc_local(((_ROW_STEPS + 1) * shape.x_elements,), SOURCES[kind][0])
    target = T.alloc_local((shape.out_elements,), TARGETS[fmt][0])
    largest = T.alloc_local((1,), "float32")
    scales = T.alloc_local((1,), "float32")
    factors = T.alloc_local((1,), "float32")
    shared = T.alloc_shared((_ROW_THREADS // 32,), "float32")
    thread = T.get_thread_binding()
    num_chunks = T.truncdiv(hidden, shape.channels)
    last = _ROW_STEPS * shape.x_elements
    largest[0] = T.float32(0)
    for step in T.unroll(_ROW_STEPS):
        if step * _ROW_THREADS < num_chunks:
            # Threads beyond the row read its first channels once more
            chunk = T.if_then_else(step * _ROW_THREADS + thread < num_chunks, step * _ROW_THREADS + thread, 0)
            load_row(x, row, chunk, shape.x_elements, shape.x_vector, source, step * shape.x_elements)
    for step in T.unroll(_ROW_STEPS):
        if step * _ROW_THREADS < num_chunks:
            largest[0] = T.max(largest[0], largest_magnitude(kind, shape.channels, source, step * shape.x_elements))
    for step in T.serial(T.truncdiv(num_chunks - 1, _ROW_THREADS) + 1 - _ROW_STEPS):
        chunk = (step + _ROW_STEPS) * _ROW_THREADS + thread
        if chunk < num_chunks:
            load_row(x, row, chunk, shape.x_elements, shape.x_vector, source, last)
            largest[0] = T.max(largest[0], largest_magnitude(kind, shape.channels, source, last))
    _row_maximum(largest, shared)
    make_scales(1, largest, clamp_min, MAX_VALUES[fmt], round_sf, out_sf_kind, scales, factors)
    if thread < 4:
        # The first byte of a packed word, then zeros; of other kinds the only column
        if thread > 0:
            scales[0] = T.float32(0)
        store_scales(1, out_sf, sf_strides, num_sf_columns, row, 0, row + 1, thread, out_sf_kind, scales)
    for step in T.unroll(_ROW_STEPS):
        chunk = step * _ROW_THREADS + thread
        if chunk < num_chunks:
            _convert_chunk(
                source, step * shape.x_elements, target, out, kind, fmt, shape, row, chunk, factors[0], stochastic
            )
    for step in T.serial(T.truncdiv(num_chunks - 1, _ROW_THREADS) + 1 - _ROW_STEPS):
        chunk = (step + _ROW_STEPS) * _ROW_THREADS + thread
        if chunk < num_chunks:
            load_row(x, row, chunk, shape.x_elements, shape.x_vector, source, last)
            _convert_chunk(source, last, target, out, kind, fmt, shape, row, chunk, factors[0], stochastic)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _exists(kind: str, fmt: str, stochastic: bool, form: str) -> bool:
    """Pairs have groups only, e5m6 whole rows and rounding to nearest only; narrow is for threads of 32 channels."""
    rows = form.startswith("rows")
    if fmt == "e5m6" and stochastic:
        return False
    if form == "narrow" and (fmt == "e5m6" or _PLAN[kind, fmt][0] <= _NARROW):
        return False
    return not (rows and kind in ("e4m3", "e2m1")) and (rows or fmt != "e5m6")


@kernel(
    axes=grid(
        kind=_ANY,
        fmt=dtype_of("out", e4m3="float8_e4m3fn", e2m1="int8", e5m6="uint8"),
        stochastic=(False, True),
        form=forms("aligned", "narrow", "general", "rows_aligned", "rows_general"),
    ),
    where=_exists,
    accepts={"x_sf": SCALE_DTYPES, "out_sf": SCALE_DTYPES},
    derived={"x_sf_kind": scale_kind("x_sf"), "out_sf_kind": scale_kind("out_sf")},
    pass_configs=_PASS_CONFIGS,
)
def per_token_cast(kind, fmt, stochastic, form):
    """Cast x to out with a scale for every num_per_channels channels of a row, written to out_sf.

    num_per_channels is 16, 32, 64, 128, or 0 for whole rows. x is plain or comes with x_sf, a scale for every block of
    x_block_rows x x_block_cols.
    """
    shape = _Shape(kind, fmt, form, stochastic)
    num_tokens, width, num_sf_columns = T.dynamic("num_tokens"), T.dynamic("width"), T.dynamic("num_sf_columns")
    x_stride = T.dynamic("x_stride", "int64")
    out_sf_strides = T.dynamic("out_sf_row_stride", "int64"), T.dynamic("out_sf_column_stride", "int64")
    x_sf_shape = T.dynamic("num_x_sf_rows"), T.dynamic("num_x_sf_columns")
    x_sf_strides = T.dynamic("x_sf_row_stride", "int64"), T.dynamic("x_sf_column_stride", "int64")
    hidden = width * 2 if kind == "e2m1" else width
    out_width = {"e4m3": hidden, "e2m1": width if kind == "e2m1" else width // 2, "e5m6": width * 3 // 2}[fmt]

    if form.startswith("rows"):

        @T.prim_func
        def main(
            x: T.StridedTensor((num_tokens, width), (x_stride, 1), SOURCES[kind][0]),
            out: T.Tensor((num_tokens, out_width), TARGETS[fmt][0]),
            out_sf: T.StridedTensor((num_tokens, num_sf_columns), out_sf_strides, "uint8"),
            x_block_rows: T.int32,
            x_block_cols: T.int32,
            clamp_min: T.float32,
            round_sf: T.bool,
            num_per_channels: T.int32,
            out_sf_kind: T.int32,
        ):
            T.assume(num_per_channels == 0)
            T.assume(width % _ROW_CHANNELS == 0)
            T.assume(width > 0)
            T.assume(num_sf_columns == 1)
            T.assume(x_stride % shape.x_vector == 0)
            with T.Kernel(num_tokens, threads=_ROW_THREADS) as row:
                _cast_row(
                    x, out, out_sf, kind, fmt, shape, row, hidden, num_sf_columns, out_sf_strides,
                    clamp_min, round_sf, stochastic, out_sf_kind,
                )  # fmt: skip

        return main

    if kind in ("e4m3", "e2m1"):

        @T.prim_func
        def main(
            x: T.StridedTensor((num_tokens, width), (x_stride, 1), SOURCES[kind][0]),
            x_sf: T.StridedTensor(x_sf_shape, x_sf_strides, "uint8"),
            out: T.Tensor((num_tokens, out_width), TARGETS[fmt][0]),
            out_sf: T.StridedTensor((num_tokens, num_sf_columns), out_sf_strides, "uint8"),
            x_block_rows: T.int32,
            x_block_cols: T.int32,
            clamp_min: T.float32,
            round_sf: T.bool,
            num_per_channels: T.int32,
            x_sf_kind: T.int32,
            out_sf_kind: T.int32,
        ):
            T.assume(_is_group_size(num_per_channels, shape.channels))
            T.assume(width % (32 if kind == "e2m1" else 64) == 0)
            T.assume(x_block_rows > 0)
            T.assume(x_block_cols > 0)
            # A thread's channels are converted with one factor
            T.assume(T.Or(x_block_cols % shape.channels == 0, x_block_cols >= hidden))
            T.assume(T.ceildiv(num_tokens, x_block_rows) == x_sf_shape[0])
            T.assume(_num_sf_columns(hidden, x_block_cols, x_sf_kind) == x_sf_shape[1])
            T.assume(_num_sf_columns(hidden, num_per_channels, out_sf_kind) == num_sf_columns)
            T.assume(x_stride % shape.x_vector == 0)
            with T.Kernel(_num_blocks(shape, num_tokens, hidden), threads=_THREADS) as block:
                _cast_groups(
                    x, out, out_sf, kind, fmt, shape, block, num_tokens, hidden, num_sf_columns, out_sf_strides,
                    clamp_min, round_sf, num_per_channels, stochastic, out_sf_kind,
                    (x_sf, x_sf_strides, x_block_rows, x_block_cols, x_sf_kind),
                )  # fmt: skip

        return main

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, width), (x_stride, 1), SOURCES[kind][0]),
        out: T.Tensor((num_tokens, out_width), TARGETS[fmt][0]),
        out_sf: T.StridedTensor((num_tokens, num_sf_columns), out_sf_strides, "uint8"),
        x_block_rows: T.int32,
        x_block_cols: T.int32,
        clamp_min: T.float32,
        round_sf: T.bool,
        num_per_channels: T.int32,
        out_sf_kind: T.int32,
    ):
        T.assume(_is_group_size(num_per_channels, shape.channels))
        T.assume(width % 64 == 0)
        T.assume(_num_sf_columns(hidden, num_per_channels, out_sf_kind) == num_sf_columns)
        T.assume(x_stride % shape.x_vector == 0)
        with T.Kernel(_num_blocks(shape, num_tokens, hidden), threads=_THREADS) as block:
            _cast_groups(
                x, out, out_sf, kind, fmt, shape, block, num_tokens, hidden, num_sf_columns, out_sf_strides,
                clamp_min, round_sf, num_per_channels, stochastic, out_sf_kind, None,
            )  # fmt: skip

    return main


@kernel(
    axes=grid(kind=_PLAIN, form=forms("aligned", "general")),
    accepts={"out_sf": SCALE_DTYPES},
    derived={"out_sf_kind": scale_kind("out_sf")},
    pass_configs=_PASS_CONFIGS,
)
def per_token_cast_with_sf_only(kind, form):
    """Write to out_sf the scales that per_token_cast would make for a format whose largest number is max_value."""
    shape = _Shape(kind, "e4m3", form)
    num_tokens, hidden, num_sf_columns = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_columns")
    x_stride = T.dynamic("x_stride", "int64")
    out_sf_strides = T.dynamic("out_sf_row_stride", "int64"), T.dynamic("out_sf_column_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), SOURCES[kind][0]),
        out_sf: T.StridedTensor((num_tokens, num_sf_columns), out_sf_strides, "uint8"),
        max_value: T.float32,
        clamp_min: T.float32,
        round_sf: T.bool,
        num_per_channels: T.int32,
        out_sf_kind: T.int32,
    ):
        T.assume(_is_group_size(num_per_channels, shape.channels))
        T.assume(hidden % 64 == 0)
        T.assume(_num_sf_columns(hidden, num_per_channels, out_sf_kind) == num_sf_columns)
        T.assume(x_stride % shape.x_vector == 0)
        with T.Kernel(_num_blocks(shape, num_tokens, hidden), threads=_THREADS) as block:
            include("cast.cuh", "scale.cuh")
            source = T.alloc_local((shape.tokens * shape.x_elements,), SOURCES[kind][0])
            largest = T.alloc_local((shape.tokens,), "float32")
            scales = T.alloc_local((shape.tokens,), "float32")
            factors = T.alloc_local((shape.tokens,), "float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(hidden, _TILE))
            tile_col = T.truncmod(block, T.ceildiv(hidden, _TILE))
            first_row, chunk, x_chunk = _place(shape, tile_row, tile_col, hidden)
            _load_tokens(x, source, shape, first_row, x_chunk, num_tokens)
            for token in T.unroll(shape.tokens):
                largest[token] = largest_magnitude(kind, shape.channels, source, token * shape.x_elements)
            group_maxima(shape.tokens, shape.channels, largest, num_per_channels)
            make_scales(shape.tokens, largest, clamp_min, max_value, round_sf, out_sf_kind, scales, factors)
            _store_group_scales(
                scales, out_sf, out_sf_strides, shape, num_sf_columns, first_row, num_tokens, chunk, hidden,
                num_per_channels, out_sf_kind,
            )  # fmt: skip

    return main


@kernel(
    axes=grid(kind=_PLAIN, fmt=dtype_of("out", e4m3="float8_e4m3fn", e2m1="int8"), form=forms("aligned", "general")),
    accepts={"sf": ("float32", "float8_e4m3fn")},
    derived={"sf_kind": scale_kind("sf")},
    pass_configs=_PASS_CONFIGS,
)
def per_token_cast_with_precomputed_sf(kind, fmt, form):
    """Cast x to out with the scales sf of every num_per_channels channels of a row: out = convert(x * (1 / sf))."""
    # Threads of 32 channels would not do for groups of 16
    shape = _Shape(kind, fmt, "narrow" if form == "aligned" and _PLAN[kind, fmt][0] > _NARROW else form)
    num_tokens, hidden, num_sf_columns = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_columns")
    x_stride, sf_stride = T.dynamic("x_stride", "int64"), T.dynamic("sf_stride", "int64")
    out_width = hidden if fmt == "e4m3" else hidden // 2

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), SOURCES[kind][0]),
        sf: T.StridedTensor((num_tokens, num_sf_columns), (sf_stride, 1), "uint8"),
        out: T.Tensor((num_tokens, out_width), TARGETS[fmt][0]),
        num_per_channels: T.int32,
        sf_kind: T.int32,
    ):
        T.assume(_is_group_size(num_per_channels, shape.channels))
        T.assume(hidden % 64 == 0)
        T.assume(_num_sf_columns(hidden, num_per_channels, 0) == num_sf_columns)
        T.assume(x_stride % shape.x_vector == 0)
        with T.Kernel(_num_blocks(shape, num_tokens, hidden), threads=_THREADS) as block:
            include("cast.cuh", "scale.cuh")
            source = T.alloc_local((shape.tokens * shape.x_elements,), SOURCES[kind][0])
            target = T.alloc_local((shape.out_elements,), TARGETS[fmt][0])
            bits = T.alloc_local((shape.tokens,), "uint32")
            factors = T.alloc_local((shape.tokens,), "float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(hidden, _TILE))
            tile_col = T.truncmod(block, T.ceildiv(hidden, _TILE))
            first_row, chunk, x_chunk = _place(shape, tile_row, tile_col, hidden)
            _load_tokens(x, source, shape, first_row, x_chunk, num_tokens)
            group = T.shift_right(x_chunk * shape.channels, exact_log2(num_per_channels))
            for token in T.unroll(shape.tokens):
                row = T.min(first_row + token * shape.down, num_tokens - 1)
                bits[token] = load_scale(sf, (sf_stride, T.int64(1)), row, group, sf_kind)
            for token in T.unroll(shape.tokens):
                factors[token] = reciprocal(decode_scale(bits[token], sf_kind))
            if chunk * shape.channels < hidden:
                name = nearest(kind, fmt, shape.channels)
                _convert_tokens(name, source, target, out, shape, factors, first_row, chunk, num_tokens, ())

    return main
