"""SwiGLU of a matrix of gates and values, rounded to bf16 and cast to e4m3 with a scale for each channel of 32 or 128
neighbouring tokens; transposed or not.

A block takes a tile, see channel_casting.py. A thread holds four channels: with eight it needs 99 registers, and half
as many warps hide the arithmetic. Blocks of 64 channels read, compute and write at different times more than blocks of
128 do: 82 us instead of 90 at 8064 x 7168, where a copy takes 75 (H200, by events). Forms differ in access width:
aligned, and general for any stride and address.
"""

import tilelang.language as T

from ..common.casting import load_row, store_row
from ..common.channel_casting import (
    PASS_CONFIGS,
    ROWS,
    TILE,
    Shape,
    is_block_size,
    make_inverses,
    num_tiles,
    store_transposed,
)
from ..common.device import include
from ..declare import forms, grid, kernel

_PLAN = (4, 64, 4)  # channels of a thread and of a tile, blocks of a multiprocessor


@T.macro
def _load_swiglu(x, source, values, first_row, chunk, sizes, shape, swiglu_clamp_value):
    """A thread's part of a tile; its gates in `source` become the results."""
    for i in T.unroll(ROWS):
        load_row(x, first_row + i, chunk, shape.columns, shape.vector, source, i * shape.columns)
        # The other half of the row in units of a thread's channels
        value_chunk = T.truncdiv(sizes[1], shape.columns) + chunk
        load_row(x, first_row + i, value_chunk, shape.columns, shape.vector, values, i * shape.columns)
    for i in T.unroll(ROWS):
        T.call_extern(
            "handle",
            f"tk::swiglu_to_bf16<{shape.columns // 2}>",
            T.address_of(source[i * shape.columns]),
            T.address_of(values[i * shape.columns]),
            swiglu_clamp_value,
            T.address_of(source[i * shape.columns]),
        )


@T.macro
def _store_rows(source, inverses, out, first_row, chunk, shape, hidden):
    target = T.alloc_local((shape.columns,), "float8_e4m3fn")
    if chunk * shape.columns < hidden:
        for i in T.unroll(ROWS):
            T.call_extern(
                "handle",
                f"tk::convert_channels<tk::Bf16, {shape.columns}>",
                T.address_of(source[i * shape.columns]),
                T.float32(1),
                T.address_of(inverses[0]),
                T.address_of(target[0]),
            )
            store_row(target, out, first_row + i, chunk, shape.columns, shape.vector)


@kernel(axes=grid(without_transpose=(False, True), form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def swiglu_forward_and_per_channel_cast_and_transpose(without_transpose, form):
    """Cast gate / (1 + exp(-gate)) * value, the halves of each row of x, to out as per_channel_cast_and_transpose does.

    Gates are bounded above by swiglu_clamp_value, values on both sides; infinity bounds nothing.
    """
    shape = Shape("bf16", form, _PLAN)
    num_tokens, hidden, num_sf_rows = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_rows")
    x_stride = T.dynamic("x_stride", "int64")
    out_shape = (num_tokens, hidden) if without_transpose else (hidden, num_tokens)

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden * 2), (x_stride, 1), "bfloat16"),
        out: T.Tensor(out_shape, "float8_e4m3fn"),
        out_sf: T.Tensor((num_sf_rows, hidden), "float32"),
        num_per_tokens: T.int32,
        clamp_min: T.float32,
        round_sf: T.bool,
        swiglu_clamp_value: T.float32,
    ):
        T.assume(is_block_size(num_per_tokens))
        T.assume(num_tokens % TILE == 0)
        T.assume(hidden % 64 == 0)
        T.assume(T.truncdiv(num_tokens, num_per_tokens) == num_sf_rows)
        T.assume(x_stride % shape.vector == 0)
        with T.Kernel(num_tiles(num_tokens, hidden, shape), threads=shape.threads) as block:
            include("channel_scales.cuh", "swiglu_to_bf16.cuh")
            T.annotate_min_blocks_per_sm(shape.min_blocks)
            source = T.alloc_local((ROWS * shape.columns,), "bfloat16")
            values = T.alloc_local((ROWS * shape.columns,), "bfloat16")
            factors = T.alloc_local((ROWS,), "float32")
            inverses = T.alloc_local((shape.columns,), "float32")
            shared = T.alloc_shared((shape.scales if without_transpose else shape.shared,), "float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            thread = T.get_thread_binding()
            tile_row = T.truncdiv(block, T.ceildiv(hidden, shape.width))
            tile_col = T.truncmod(block, T.ceildiv(hidden, shape.width))
            first_row = tile_row * TILE + thread // shape.across * ROWS
            chunk = tile_col * shape.across + thread % shape.across
            # Threads beyond the last channel read it once more
            x_chunk = T.min(chunk, T.truncdiv(hidden, shape.columns) - 1)
            _load_swiglu(x, source, values, first_row, x_chunk, (num_tokens, hidden), shape, swiglu_clamp_value)
            make_inverses(
                source, factors, shared, inverses, out_sf, shape, tile_row, tile_col, (num_tokens, hidden),
                num_per_tokens, clamp_min, round_sf, 0,
            )  # fmt: skip
            if without_transpose:
                _store_rows(source, inverses, out, first_row, chunk, shape, hidden)
            else:
                store_transposed(source, inverses, shared, out, shape, tile_row, tile_col, hidden)

    return main
