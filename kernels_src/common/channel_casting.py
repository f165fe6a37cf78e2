"""What the casts share whose scales belong to a channel of neighbouring tokens: tiles of 128 tokens, a thread's part of
them, and the steps in channel_scales.cuh.

A thread holds the same few channels of eight neighbouring tokens in registers, from the one read to the one write. The
largest magnitudes meet in shared memory, where one thread makes the scale of a channel and all fetch its inverse.
"""

from __future__ import annotations

import tilelang.language as T

from .casting import SOURCES, load_row, store_row

TILE = 128  # tokens
ROWS = 8  # tokens of a thread
_PIECE = 16  # tokens of a transposed channel that a thread writes at once
_MOST_BLOCKS = 4  # blocks of tokens in a tile: 128, or 32 each
# x -> channels of a thread and of a tile, and blocks that a multiprocessor shall hold. Without the limit the compiler
# keeps what e4m3 was decoded to between the two passes.
_PLAN = {"bf16": (8, 128, 4), "fp32": (4, 128, 2), "e4m3": (16, 128, 6)}

CHANNEL_SCALE_DTYPES = ("float32", "int32")
CHANNEL_SCALE_KIND = "select(is_dtype(out_sf, int32), 1, 0)"
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}


class Shape:
    """The sizes of a variant: channels of a thread and a tile, the access width in elements of x, a block's threads."""

    def __init__(self, kind: str, form: str, plan: tuple[int, int, int] | None = None) -> None:
        self.kind = kind
        self.columns, self.width, self.min_blocks = plan or _PLAN[kind]
        self.across = self.width // self.columns
        self.threads = self.across * TILE // ROWS
        self.warps = self.threads // 32
        self.is_general = form == "general"
        if self.is_general:
            self.min_blocks = 1
        self.vector = 1 if self.is_general else self.columns
        # Floats in shared memory: maxima and inverses, then the e4m3 tile of a transposition. One buffer: two would get
        # the same place from TileLang.
        self.scales = (self.warps + _MOST_BLOCKS) * self.width
        self.shared = self.scales + TILE * self.width // 4


def num_tiles(num_tokens, hidden, shape):
    """Tiles, neighbours along a row: all of them on grid x, since y and z end at 65,535."""
    return T.ceildiv(hidden, shape.width) * T.ceildiv(num_tokens, TILE)


def is_block_size(num_per_tokens):
    return T.Or(num_per_tokens == 32, num_per_tokens == 128)


def num_scale_rows(num_tokens, num_per_tokens, kind):
    """Rows of a scale tensor, packed four to an int32 or not."""
    return T.ceildiv(T.ceildiv(num_tokens, num_per_tokens), T.if_then_else(kind == 1, 4, 1))


@T.macro
def load_tile(x, source, first_row, x_chunk, sizes, shape):
    """A thread's part of a tile. What lies beyond the last row is that row, which changes no maximum."""
    for i in T.unroll(ROWS):
        row = T.min(first_row + i, sizes[0] - 1)
        load_row(x, row, x_chunk, shape.columns, shape.vector, source, i * shape.columns)


@T.macro
def make_inverses(
    source, factors, shared, inverses, out_sf, shape, tile_row, tile_col, sizes, num_per_tokens, clamp_min, round_sf,
    out_sf_kind,
):  # fmt: skip
    """The inverse scales of a thread's channels, and all scales of the tile to out_sf. `factors`: one for each token of
    a pair. `sizes`: tokens and channels of the output."""
    T.call_extern(
        "handle",
        f"tk::store_column_maxima<{SOURCES[shape.kind][1]}, {ROWS}, {shape.columns}, {shape.width}>",
        T.address_of(source[0]),
        T.address_of(factors[0]),
        T.access_ptr(shared[0], "w"),
    )
    T.sync_threads()
    T.call_extern(
        "handle",
        f"tk::make_channel_scales<{shape.warps}, {shape.width}>",
        T.access_ptr(shared[0], "rw"),
        num_per_tokens,
        clamp_min,
        round_sf,
        T.access_ptr(out_sf[0, 0], "w"),
        out_sf_kind,
        tile_row,
        tile_col,
        *sizes,
    )
    T.sync_threads()
    T.call_extern(
        "handle",
        f"tk::load_inverses<{shape.warps}, {shape.columns}, {shape.width}>",
        T.access_ptr(shared[0], "r"),
        num_per_tokens,
        T.address_of(inverses[0]),
    )


@T.macro
def store_transposed(source, inverses, shared, out, shape, tile_row, tile_col, hidden):
    """The tile as e4m3, channels along the rows of out. All its tokens exist. A warp writes 128 bytes of each of four
    channels."""
    target = T.alloc_local((_PIECE,), "float8_e4m3fn")
    vector = 1 if shape.is_general else _PIECE
    thread = T.get_thread_binding()
    T.call_extern(
        "handle",
        f"tk::store_transposed<{shape.columns}, {shape.width}>",
        T.address_of(source[0]),
        T.address_of(inverses[0]),
        T.access_ptr(shared[shape.scales], "w"),
    )
    T.sync_threads()
    for step in T.unroll(TILE * shape.width // _PIECE // shape.threads):
        channel = (step * shape.threads + thread) // (TILE // _PIECE)
        piece = thread % (TILE // _PIECE)
        if tile_col * shape.width + channel < hidden:
            T.call_extern(
                "handle",
                f"tk::load_transposed<{shape.columns}>",
                T.access_ptr(shared[shape.scales], "r"),
                channel,
                piece,
                T.address_of(target[0]),
            )
            store_row(
                target, out, tile_col * shape.width + channel, tile_row * (TILE // _PIECE) + piece, _PIECE, vector
            )
