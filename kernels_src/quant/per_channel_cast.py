"""Casts of a matrix to e4m3 with a scale for each channel of 32 or 128 neighbouring tokens, with and without a gather.

A block takes a tile, see channel_casting.py; tokens beyond the last one and padding cost no read. Forms
differ in access width: aligned reads 16 bytes at once, general takes any stride and address.
"""

import tilelang.language as T

from ..common.casting import SCALE_DTYPES, SOURCES, divide, load_row, scale_kind, store_row
from ..common.channel_casting import (
    CHANNEL_SCALE_DTYPES,
    CHANNEL_SCALE_KIND,
    PASS_CONFIGS,
    ROWS,
    TILE,
    Shape,
    is_block_size,
    load_tile,
    make_inverses,
    num_scale_rows,
    num_tiles,
)
from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_AXES = grid(
    kind=dtype_of("x", bf16="bfloat16", fp32="float32", e4m3="float8_e4m3fn"), form=forms("aligned", "general")
)
_ACCEPTS = {"x_sf": SCALE_DTYPES, "out_sf": CHANNEL_SCALE_DTYPES}
_DERIVED = {"x_sf_kind": scale_kind("x_sf"), "out_sf_kind": CHANNEL_SCALE_KIND}


def _num_x_sf_columns(hidden, num_per_channels, kind):
    return T.ceildiv(T.ceildiv(hidden, num_per_channels), T.if_then_else(kind == 1, 4, 1))


def _is_group_size(num_per_channels):
    return T.Or(num_per_channels == 32, num_per_channels == 128)


def _load_factors(factors, rows, column, pair):
    """The scales of a thread's tokens; `pair` as below."""
    x_sf, strides, num_per_channels, kind = pair
    return T.call_extern(
        "handle",
        f"tk::load_factors<{ROWS}>",
        T.access_ptr(x_sf[0, 0], "r"),
        *strides,
        T.address_of(rows[0]),
        divide(column, num_per_channels),
        kind,
        T.address_of(factors[0]),
    )


@T.macro
def _cast(
    x, out, out_sf, shape, block, sizes, hidden, num_per_tokens, clamp_min, round_sf, out_sf_kind, pos_to_token, pair
):
    """One block. `sizes`: rows of out and of x. `pos_to_token`: None, or the row of x for each row of out. `pair`:
    None or (x_sf, its strides, num_per_channels, x_sf_kind)."""
    include("channel_scales.cuh")
    T.annotate_min_blocks_per_sm(shape.min_blocks)
    source = T.alloc_local((ROWS * shape.columns,), SOURCES[shape.kind][0])
    target = T.alloc_local((shape.columns,), "float8_e4m3fn")
    rows = T.alloc_local((ROWS,), "int32")
    factors = T.alloc_local((ROWS,), "float32")
    inverses = T.alloc_local((shape.columns,), "float32")
    shared = T.alloc_shared((shape.scales,), "float32")
    tile_row = T.alloc_var("int32")
    tile_col = T.alloc_var("int32")
    thread = T.get_thread_binding()
    tile_row = T.truncdiv(block, T.ceildiv(hidden, shape.width))
    tile_col = T.truncmod(block, T.ceildiv(hidden, shape.width))
    first_row = tile_row * TILE + thread // shape.across * ROWS
    chunk = tile_col * shape.across + thread % shape.across
    # Threads beyond the last channel read it once more, and write nothing
    x_chunk = T.min(chunk, T.truncdiv(hidden, shape.columns) - 1)
    for i in T.unroll(ROWS):
        rows[i] = T.min(first_row + i, sizes[0] - 1)
    if pos_to_token is not None:
        if not T.isnullptr(pos_to_token.data):
            for i in T.unroll(ROWS):
                rows[i] = pos_to_token[rows[i]]
        for i in T.unroll(ROWS):
            if rows[i] >= sizes[1]:
                rows[i] = -1
        for i in T.unroll(ROWS):
            for j in T.unroll(shape.columns):
                source[i * shape.columns + j] = T.cast(0, SOURCES[shape.kind][0])
            if rows[i] >= 0:
                load_row(x, rows[i], x_chunk, shape.columns, shape.vector, source, i * shape.columns)
    else:
        load_tile(x, source, first_row, x_chunk, sizes, shape)
    if pair is not None:
        _load_factors(factors, rows, x_chunk * shape.columns, pair)
    make_inverses(
        source, factors, shared, inverses, out_sf, shape, tile_row, tile_col, (sizes[0], hidden),
        num_per_tokens, clamp_min, round_sf, out_sf_kind,
    )  # fmt: skip
    if chunk * shape.columns < hidden:
        for i in T.unroll(ROWS):
            T.call_extern(
                "handle",
                f"tk::convert_channels<{SOURCES[shape.kind][1]}, {shape.columns}>",
                T.address_of(source[i * shape.columns]),
                factors[i],
                T.address_of(inverses[0]),
                T.address_of(target[0]),
            )
            if first_row + i < sizes[0]:
                store_row(target, out, first_row + i, chunk, shape.columns, shape.vector)


@kernel(axes=_AXES, accepts=_ACCEPTS, derived=_DERIVED, pass_configs=PASS_CONFIGS)
def per_channel_cast(kind, form):
    """Cast x to out with a scale for every num_per_tokens rows of a channel, written to out_sf.

    num_per_tokens is 32 or 128. x is plain or comes with x_sf, a scale for every num_per_channels channels of a row.
    """
    shape = Shape(kind, form)
    num_tokens, hidden, num_sf_rows = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_rows")
    x_stride = T.dynamic("x_stride", "int64")
    num_x_sf_columns = T.dynamic("num_x_sf_columns")
    x_sf_strides = T.dynamic("x_sf_row_stride", "int64"), T.dynamic("x_sf_column_stride", "int64")

    if kind == "e4m3":

        @T.prim_func
        def main(
            x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), "float8_e4m3fn"),
            x_sf: T.StridedTensor((num_tokens, num_x_sf_columns), x_sf_strides, "uint8"),
            out: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
            out_sf: T.Tensor((num_sf_rows, hidden), "uint8"),
            num_per_tokens: T.int32,
            num_per_channels: T.int32,
            clamp_min: T.float32,
            round_sf: T.bool,
            x_sf_kind: T.int32,
            out_sf_kind: T.int32,
        ):
            T.assume(is_block_size(num_per_tokens))
            T.assume(_is_group_size(num_per_channels))
            T.assume(hidden % 64 == 0)
            T.assume(_num_x_sf_columns(hidden, num_per_channels, x_sf_kind) == num_x_sf_columns)
            T.assume(num_scale_rows(num_tokens, num_per_tokens, out_sf_kind) == num_sf_rows)
            T.assume(x_stride % shape.vector == 0)
            with T.Kernel(num_tiles(num_tokens, hidden, shape), threads=shape.threads) as block:
                _cast(
                    x, out, out_sf, shape, block, (num_tokens, num_tokens), hidden, num_per_tokens, clamp_min, round_sf,
                    out_sf_kind, None, (x_sf, x_sf_strides, num_per_channels, x_sf_kind),
                )  # fmt: skip

        return main

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), SOURCES[kind][0]),
        out: T.Tensor((num_tokens, hidden), "float8_e4m3fn"),
        out_sf: T.Tensor((num_sf_rows, hidden), "uint8"),
        num_per_tokens: T.int32,
        num_per_channels: T.int32,
        clamp_min: T.float32,
        round_sf: T.bool,
        out_sf_kind: T.int32,
    ):
        T.assume(is_block_size(num_per_tokens))
        T.assume(hidden % 64 == 0)
        T.assume(num_scale_rows(num_tokens, num_per_tokens, out_sf_kind) == num_sf_rows)
        T.assume(x_stride % shape.vector == 0)
        with T.Kernel(num_tiles(num_tokens, hidden, shape), threads=shape.threads) as block:
            _cast(
                x, out, out_sf, shape, block, (num_tokens, num_tokens), hidden, num_per_tokens, clamp_min, round_sf,
                out_sf_kind, None, None,
            )  # fmt: skip

    return main


@kernel(axes=_AXES, accepts=_ACCEPTS, derived=_DERIVED, pass_configs=PASS_CONFIGS)
def per_channel_cast_fused(kind, form):
    """Do the same with row pos_to_token[i] of x, or row i without the mapping, in row i of out.

    Rows of out whose position is no row of x are zero and do not count for the scales.
    """
    shape = Shape(kind, form)
    num_tokens, hidden, num_sf_rows = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_rows")
    num_positions = T.dynamic("num_positions")
    x_stride = T.dynamic("x_stride", "int64")
    num_x_sf_columns = T.dynamic("num_x_sf_columns")
    x_sf_strides = T.dynamic("x_sf_row_stride", "int64"), T.dynamic("x_sf_column_stride", "int64")

    if kind == "e4m3":

        @T.prim_func
        def main(
            x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), "float8_e4m3fn"),
            x_sf: T.StridedTensor((num_tokens, num_x_sf_columns), x_sf_strides, "uint8"),
            pos_to_token: T.Tensor((num_positions,), "int32"),
            out: T.Tensor((num_positions, hidden), "float8_e4m3fn"),
            out_sf: T.Tensor((num_sf_rows, hidden), "uint8"),
            num_per_tokens: T.int32,
            num_per_channels: T.int32,
            clamp_min: T.float32,
            round_sf: T.bool,
            x_sf_kind: T.int32,
            out_sf_kind: T.int32,
        ):
            T.assume(is_block_size(num_per_tokens))
            T.assume(_is_group_size(num_per_channels))
            T.assume(hidden % 64 == 0)
            T.assume(_num_x_sf_columns(hidden, num_per_channels, x_sf_kind) == num_x_sf_columns)
            T.assume(num_scale_rows(num_positions, num_per_tokens, out_sf_kind) == num_sf_rows)
            T.assume(x_stride % shape.vector == 0)
            with T.Kernel(num_tiles(num_positions, hidden, shape), threads=shape.threads) as block:
                _cast(
                    x, out, out_sf, shape, block, (num_positions, num_tokens), hidden, num_per_tokens, clamp_min,
                    round_sf, out_sf_kind, pos_to_token, (x_sf, x_sf_strides, num_per_channels, x_sf_kind),
                )  # fmt: skip

        return main

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), SOURCES[kind][0]),
        pos_to_token: T.Tensor((num_positions,), "int32"),
        out: T.Tensor((num_positions, hidden), "float8_e4m3fn"),
        out_sf: T.Tensor((num_sf_rows, hidden), "uint8"),
        num_per_tokens: T.int32,
        num_per_channels: T.int32,
        clamp_min: T.float32,
        round_sf: T.bool,
        out_sf_kind: T.int32,
    ):
        T.assume(is_block_size(num_per_tokens))
        T.assume(hidden % 64 == 0)
        T.assume(num_scale_rows(num_positions, num_per_tokens, out_sf_kind) == num_sf_rows)
        T.assume(x_stride % shape.vector == 0)
        with T.Kernel(num_tiles(num_positions, hidden, shape), threads=shape.threads) as block:
            _cast(
                x, out, out_sf, shape, block, (num_positions, num_tokens), hidden, num_per_tokens, clamp_min, round_sf,
                out_sf_kind, pos_to_token, None,
            )  # fmt: skip

    return main
