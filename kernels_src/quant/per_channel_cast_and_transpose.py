"""The cast of a matrix to e4m3 with a scale for each channel of 32 or 128 neighbouring tokens, transposed.

A block takes a tile, see channel_casting.py; its e4m3 bytes pass through shared memory, so that reads and
writes take 16 bytes at once. Forms differ in access width: aligned, and general for any stride and address.
"""

import tilelang.language as T

from ..common.channel_casting import (
    PASS_CONFIGS,
    ROWS,
    TILE,
    Shape,
    is_block_size,
    load_tile,
    make_inverses,
    num_tiles,
    store_transposed,
)
from ..common.device import include
from ..declare import forms, grid, kernel

_PLAN = (8, 64, 8)  # channels of a thread and of a tile, blocks of a multiprocessor


@kernel(axes=grid(form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def per_channel_cast_and_transpose(form):
    """Cast x to e4m3 with a scale for every num_per_tokens rows of a channel, out_sf, and write its transpose to out.

    num_per_tokens is 32 or 128.
    """
    shape = Shape("bf16", form, _PLAN)
    num_tokens, hidden, num_sf_rows = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_rows")
    x_stride = T.dynamic("x_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), "bfloat16"),
        out: T.Tensor((hidden, num_tokens), "float8_e4m3fn"),
        out_sf: T.Tensor((num_sf_rows, hidden), "float32"),
        num_per_tokens: T.int32,
        clamp_min: T.float32,
        round_sf: T.bool,
    ):
        T.assume(is_block_size(num_per_tokens))
        T.assume(num_tokens % TILE == 0)
        T.assume(hidden % 64 == 0)
        T.assume(T.truncdiv(num_tokens, num_per_tokens) == num_sf_rows)
        T.assume(x_stride % shape.vector == 0)
        with T.Kernel(num_tiles(num_tokens, hidden, shape), threads=shape.threads) as block:
            include("channel_scales.cuh")
            T.annotate_min_blocks_per_sm(shape.min_blocks)
            source = T.alloc_local((ROWS * shape.columns,), "bfloat16")
            factors = T.alloc_local((ROWS,), "float32")
            inverses = T.alloc_local((shape.columns,), "float32")
            shared = T.alloc_shared((shape.shared,), "float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            thread = T.get_thread_binding()
            tile_row = T.truncdiv(block, T.ceildiv(hidden, shape.width))
            tile_col = T.truncmod(block, T.ceildiv(hidden, shape.width))
            first_row = tile_row * TILE + thread // shape.across * ROWS
            chunk = T.min(tile_col * shape.across + thread % shape.across, T.truncdiv(hidden, shape.columns) - 1)
            load_tile(x, source, first_row, chunk, (num_tokens, hidden), shape)
            make_inverses(
                source, factors, shared, inverses, out_sf, shape, tile_row, tile_col, (num_tokens, hidden),
                num_per_tokens, clamp_min, round_sf, 0,
            )  # fmt: skip
            store_transposed(source, inverses, shared, out, shape, tile_row, tile_col, hidden)

    return main
