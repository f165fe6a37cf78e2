"""The way back from FP8, FP4 and e5m6: data times the scales of its blocks, to bf16 or fp32.

A thread writes 16 bytes of each of its tokens. Two thirds and more of the traffic are writes: threads write
neighbouring 16 bytes whatever they read. Forms: aligned where a thread's channels share a scale, channels for blocks
that are one channel wide and some tokens tall, whose scales a thread loads once for all its tokens, general for any
block and address.
"""

import tilelang.language as T

from ..common.casting import (
    SCALE_DTYPES,
    SOURCES,
    TARGETS,
    decode_scale,
    divide,
    elements,
    load_row,
    load_scale,
    scale_kind,
    store_row,
)
from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_SOURCES = {"e4m3": SOURCES["e4m3"], "e2m1": SOURCES["e2m1"], "e5m6": TARGETS["e5m6"]}
_OUTPUTS = {"bf16": SOURCES["bf16"], "fp32": SOURCES["fp32"]}

_THREADS = 128
_TILE = 512  # channels of a block of threads
_CHANNEL_TILE_ROWS = 32  # tokens of it in the form for blocks of one channel


class _Shape:
    """The sizes of a variant: a thread's channels and tokens, their elements and access widths in x and out."""

    def __init__(self, kind: str, fmt: str, form: str) -> None:
        x_dtype, _, x_bits = _SOURCES[kind]
        # 16 bytes of the output; e5m6 comes in eights
        self.channels = 8 if fmt == "bf16" or kind == "e5m6" or form == "general" else 4
        self.across = 32 if form == "channels" else _TILE // self.channels
        self.down = _THREADS // self.across
        self.tokens = _CHANNEL_TILE_ROWS // self.down if form == "channels" else 8 // self.down
        self.x_elements = elements(self.channels, x_bits, x_dtype)
        self.x_vector = 1 if form == "general" else 4 if kind == "e5m6" else self.x_elements
        self.is_aligned = form == "aligned"
        self.out_vector = 1 if form == "general" else 8 if fmt == "bf16" else 4


def _num_tiles(shape, num_tokens, hidden):
    """Blocks of threads, neighbours along a row."""
    return T.ceildiv(hidden, shape.across * shape.channels) * T.ceildiv(num_tokens, shape.tokens * shape.down)


def _load_channel_scale(sf, strides, row, column, kind):
    """The stored bits of a scale of a block that is one channel wide: packed words hold four rows."""
    start = T.access_ptr(sf[0, 0], "r")
    return T.call_extern("uint32", "tk::load_channel_scale", start, *strides, row, column, kind)


@T.macro
def _load_tokens(x, source, shape, first_row, chunk, num_tokens):
    for token in T.unroll(shape.tokens):
        row = T.min(first_row + token * shape.down, num_tokens - 1)
        load_row(x, row, chunk, shape.x_elements, shape.x_vector, source, token * shape.x_elements)


@T.macro
def _load_scales(
    bits, scales, shape, first_row, chunk, num_tokens, x_sf, x_sf_strides, block_rows, block_cols, x_sf_kind
):
    """scales[token] = the scale of a thread's channels."""
    column = divide(chunk * shape.channels, block_cols)
    for token in T.unroll(shape.tokens):
        row = T.min(first_row + token * shape.down, num_tokens - 1)
        bits[token] = load_scale(x_sf, x_sf_strides, divide(row, block_rows), column, x_sf_kind)
    for token in T.unroll(shape.tokens):
        scales[token] = decode_scale(bits[token], x_sf_kind)


@T.macro
def _load_channel_scales(bits, scales, shape, row, chunk, x_sf, x_sf_strides, block_rows, block_cols, x_sf_kind):
    """scales[i] = that of a thread's channel i in one token."""
    for i in T.unroll(shape.channels):
        if block_cols == 1:
            bits[i] = _load_channel_scale(
                x_sf, x_sf_strides, divide(row, block_rows), chunk * shape.channels + i, x_sf_kind
            )
        else:
            column = divide(chunk * shape.channels + i, block_cols)
            bits[i] = load_scale(x_sf, x_sf_strides, divide(row, block_rows), column, x_sf_kind)
    for i in T.unroll(shape.channels):
        scales[i] = decode_scale(bits[i], x_sf_kind)


@T.macro
def _write_token(name, source, token, target, scales, out, shape, row, chunk, num_tokens):
    ends = T.address_of(source[token * shape.x_elements]), T.address_of(target[0])
    if shape.is_aligned:
        T.call_extern("handle", "tk::cast_back" + name, *ends, scales[token])
    else:
        T.call_extern("handle", "tk::cast_back_channels" + name, *ends, T.address_of(scales[0]))
    if row < num_tokens:
        store_row(target, out, row, chunk, shape.channels, shape.out_vector)


@kernel(
    axes=grid(
        kind=dtype_of("x", e4m3="float8_e4m3fn", e2m1="int8", e5m6="uint8"),
        fmt=dtype_of("out", bf16="bfloat16", fp32="float32"),
        form=forms("aligned", "channels", "general"),
    ),
    where=lambda kind, form: not (kind == "e5m6" and form == "channels"),
    accepts={"x_sf": SCALE_DTYPES},
    derived={"x_sf_kind": scale_kind("x_sf")},
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
        "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    },
)
def cast_back(kind, fmt, form):
    """Write x times x_sf, a scale for every block of block_rows x block_cols, to out."""
    shape = _Shape(kind, fmt, form)
    num_tokens, width = T.dynamic("num_tokens"), T.dynamic("width")
    num_x_sf_rows, num_x_sf_columns = T.dynamic("num_x_sf_rows"), T.dynamic("num_x_sf_columns")
    x_stride = T.dynamic("x_stride", "int64")
    x_sf_strides = T.dynamic("x_sf_row_stride", "int64"), T.dynamic("x_sf_column_stride", "int64")
    hidden = {"e4m3": width, "e2m1": width * 2, "e5m6": T.truncdiv(width * 2, 3)}[kind]
    name = f"<{_SOURCES[kind][1]}, {_OUTPUTS[fmt][1]}, {shape.channels}>"

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, width), (x_stride, 1), _SOURCES[kind][0]),
        x_sf: T.StridedTensor((num_x_sf_rows, num_x_sf_columns), x_sf_strides, "uint8"),
        out: T.Tensor((num_tokens, hidden), _OUTPUTS[fmt][0]),
        block_rows: T.int32,
        block_cols: T.int32,
        x_sf_kind: T.int32,
    ):
        T.assume(block_rows > 0)
        T.assume(block_cols > 0)
        T.assume(width % {"e4m3": 64, "e2m1": 32, "e5m6": 12}[kind] == 0)
        if form == "aligned":
            T.assume(T.Or(block_cols % shape.channels == 0, block_cols >= hidden))
        if form == "channels":
            T.assume(block_cols == 1)
            T.assume(block_rows % _CHANNEL_TILE_ROWS == 0)
        # Packed words hold four neighbouring blocks along a row, but of one channel along a column
        T.assume(
            T.ceildiv(T.ceildiv(num_tokens, block_rows), T.if_then_else(T.And(x_sf_kind == 1, block_cols == 1), 4, 1))
            == num_x_sf_rows
        )
        T.assume(
            T.ceildiv(T.ceildiv(hidden, block_cols), T.if_then_else(T.And(x_sf_kind == 1, block_cols > 1), 4, 1))
            == num_x_sf_columns
        )
        T.assume(x_stride % shape.x_vector == 0)
        with T.Kernel(_num_tiles(shape, num_tokens, hidden), threads=_THREADS) as block:
            include("cast_back.cuh")
            source = T.alloc_local((shape.tokens * shape.x_elements,), _SOURCES[kind][0])
            target = T.alloc_local((shape.channels,), _OUTPUTS[fmt][0])
            num_scales = shape.tokens if form == "aligned" else shape.channels
            bits = T.alloc_local((num_scales,), "uint32")
            scales = T.alloc_local((num_scales,), "float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(hidden, shape.across * shape.channels))
            tile_col = T.truncmod(block, T.ceildiv(hidden, shape.across * shape.channels))
            thread = T.get_thread_binding()
            first_row = tile_row * (shape.tokens * shape.down) + thread // shape.across
            chunk = tile_col * shape.across + thread % shape.across
            if chunk * shape.channels < hidden:
                _load_tokens(x, source, shape, first_row, chunk, num_tokens)
                if form == "aligned":
                    _load_scales(
                        bits, scales, shape, first_row, chunk, num_tokens, x_sf, x_sf_strides, block_rows, block_cols,
                        x_sf_kind,
                    )  # fmt: skip
                elif form == "channels":
                    _load_channel_scales(
                        bits, scales, shape, T.min(first_row, num_tokens - 1), chunk, x_sf, x_sf_strides, block_rows,
                        block_cols, x_sf_kind,
                    )  # fmt: skip
                for token in T.unroll(shape.tokens):
                    row = first_row + token * shape.down
                    if form == "general":
                        _load_channel_scales(
                            bits, scales, shape, T.min(row, num_tokens - 1), chunk, x_sf, x_sf_strides, block_rows,
                            block_cols, x_sf_kind,
                        )  # fmt: skip
                    _write_token(name, source, token, target, scales, out, shape, row, chunk, num_tokens)

    return main
