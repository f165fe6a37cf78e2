"""Copies of token rows into a buffer sorted by expert, as raw bytes; padding rows become zero. With and without scales.

Two kinds of blocks in one launch. The first ones take a few rows of the buffer each and clear those that are padding;
each of the others reads one token's row, or a part of it, once and writes it to every place that the token has. Rows
move as 16 bytes a thread in the aligned form, element by element in the general one.

Scales that lie column after column go one by one to as many memory sectors if they go with their row (32008 rows of
7168 channels with a scale for each 32: 194 us on an H200, 107 to copy as much). So, where there are many, the blocks
leave each position's token in a workspace, and a second launch collects tiles of scales and turns them.
"""

import tilelang.language as T

from ..declare import dtype_of, forms, grid, itemsize_of, kernel

_DTYPES = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
    "tl.disable_buffer_init_check": True,  # rows are loaded and stored under the same test
}

_WARP = 32
_THREADS = 128
# 16-byte chunks (general: elements) that a thread holds of a row. On an H200 two take 90.9, 114.6, 155.9 and 196.1 us
# for the calls of the benchmark, four 94.4, 119.2, 159.7 and 201.1, seven 1 % more; 256 threads 4 % more. To load the
# row before its places are known gains nothing (benchmarks/results/h200/tuning.jsonl)
_CHUNKS = 2
# With scales, whose rows are half as long and go with the first part of a row: 7168 channels with a scale for each 128
# take 105 us with four, 112 with two
_CHUNKS_WITH_SF = 4
# Rows of the buffer that a block looks over for padding; most blocks find none
_PADDING_ROWS = 16
# Positions and columns of a tile of scales, and the threads that turn it
_SF_ROWS = 64
_SF_COLUMNS = 64
_SF_THREADS = 256


def _num_padding_blocks(num_positions):
    return T.ceildiv(num_positions, _PADDING_ROWS)


def _num_blocks(num_positions, num_tokens, hidden, size, chunks):
    return _num_padding_blocks(num_positions) + num_tokens * _num_tiles(hidden, size, chunks)


def _num_tiles(hidden, size, chunks):
    """Parts of a row."""
    return T.ceildiv(hidden, _THREADS * chunks * size)


def _first_bit(mask):
    return T.call_extern("int32", "__ffs", mask) - 1


@T.macro
def _clear_padding(pos_to_expert, out, first_row, num_tokens, num_positions, hidden, size, scales):
    """Zero the rows first_row ... of the buffer that are padding. Without tokens every row is."""
    thread = T.get_thread_binding()
    lane = thread % _WARP
    is_padding = T.alloc_var("bool")
    rows = T.alloc_var("uint32")
    row = T.alloc_var("int32")
    is_padding = False
    if lane < _PADDING_ROWS and first_row + lane < num_positions:
        is_padding = pos_to_expert[first_row + lane] < 0 or num_tokens == 0
    rows = T.cast(T.ballot(is_padding), "uint32")
    while rows != T.uint32(0):
        row = first_row + _first_bit(rows)
        rows = T.bitwise_and(rows, rows - T.uint32(1))
        for i in T.serial(T.ceildiv(hidden, _THREADS * size)):
            chunk = i * _THREADS + thread
            if chunk * size < hidden:
                for j in T.vectorized(size):
                    out[row, chunk * size + j] = 0
        if scales is not None and len(scales) == 3:
            for i in T.serial(T.ceildiv(scales[2], _THREADS)):
                if i * _THREADS + thread < scales[2]:
                    scales[1][row, i * _THREADS + thread] = T.uint32(0)


@T.macro
def _copy_row(x, token_topk_to_pos, out, token, tile, num_topk, num_positions, hidden, size, chunks, dtype, scales):
    """Write one part of a token's row to all places of the token; the scales, or the token's number, go with the first
    part."""
    thread = T.get_thread_binding()
    lane = thread % _WARP
    position = T.alloc_var("int32")
    places = T.alloc_var("uint32")
    row = T.alloc_var("int32")
    data = T.alloc_local((chunks * size,), dtype)
    position = -1
    if lane < num_topk:
        position = token_topk_to_pos[token, lane]
    places = T.cast(T.ballot(position >= 0 and position < num_positions), "uint32")
    if scales is not None and len(scales) == 1:
        if tile == 0 and thread < _WARP and position >= 0 and position < num_positions:
            scales[0][position] = token
    if places != T.uint32(0):
        for i in T.unroll(chunks):
            chunk = (tile * chunks + i) * _THREADS + thread
            if chunk * size < hidden:
                for j in T.vectorized(size):
                    data[i * size + j] = x[token, chunk * size + j]
        while places != T.uint32(0):
            row = T.shfl_sync(position, _first_bit(places))
            places = T.bitwise_and(places, places - T.uint32(1))
            for i in T.unroll(chunks):
                chunk = (tile * chunks + i) * _THREADS + thread
                if chunk * size < hidden:
                    for j in T.vectorized(size):
                        out[row, chunk * size + j] = data[i * size + j]
            if scales is not None and len(scales) == 3:
                if tile == 0:
                    for i in T.serial(T.ceildiv(scales[2], _THREADS)):
                        if i * _THREADS + thread < scales[2]:
                            scales[1][row, i * _THREADS + thread] = scales[0][token, i * _THREADS + thread]


@T.macro
def _expand(
    x,
    token_topk_to_pos,
    pos_to_expert,
    out,
    block,
    num_tokens,
    num_topk,
    num_positions,
    hidden,
    size,
    chunks,
    dtype,
    scales,
):
    """One block. `scales`: None, (sf, out_sf, its columns) or, to leave the token of each position, (workspace,)."""
    token = T.alloc_var("int32")
    tile = T.alloc_var("int32")
    if block < _num_padding_blocks(num_positions):
        _clear_padding(pos_to_expert, out, block * _PADDING_ROWS, num_tokens, num_positions, hidden, size, scales)
    else:
        tile = T.truncmod(block - _num_padding_blocks(num_positions), _num_tiles(hidden, size, chunks))
        token = T.truncdiv(block - _num_padding_blocks(num_positions), _num_tiles(hidden, size, chunks))
        _copy_row(x, token_topk_to_pos, out, token, tile, num_topk, num_positions, hidden, size, chunks, dtype, scales)


@kernel(
    axes=grid(itemsize=itemsize_of("x", 1, 2, 4, 8), form=forms("aligned", "general")),
    raw=("x", "out"),
    pass_configs=_PASS_CONFIGS,
)
def expand_to_fused(itemsize, form):
    """Write row t of x to each row token_topk_to_pos[t, ...] >= 0 of out, and zeros where pos_to_expert is negative."""
    size = 16 // itemsize if form == "aligned" else 1
    dtype = _DTYPES[itemsize]
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")
    hidden, num_positions = T.dynamic("hidden"), T.dynamic("num_positions")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden), dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_positions,), "int32"),
        out: T.Tensor((num_positions, hidden), dtype),
    ):
        T.assume(num_topk <= _WARP)
        if form == "aligned":
            T.assume(hidden % size == 0)
        with T.Kernel(_num_blocks(num_positions, num_tokens, hidden, size, _CHUNKS), threads=_THREADS) as block:
            _expand(
                x, token_topk_to_pos, pos_to_expert, out, block, num_tokens, num_topk, num_positions, hidden, size,
                _CHUNKS, dtype, None,
            )  # fmt: skip

    return main


@T.macro
def _turn_scales(sf, pos_to_expert, workspace, out_sf, tile, row, column, num_tokens, num_positions, num_columns):
    """Write the scales of _SF_ROWS positions from `row` on, _SF_COLUMNS from `column` on: read as rows of sf, written
    as columns of out_sf."""
    thread = T.get_thread_binding()
    lane = thread % _WARP
    token = T.alloc_var("int32")
    value = T.alloc_local((_SF_COLUMNS // _WARP,), "uint32")
    for i in T.unroll(_SF_ROWS * _WARP // _SF_THREADS):
        tile_row = i * (_SF_THREADS // _WARP) + thread // _WARP
        token = -1
        if row + tile_row < num_positions:
            if pos_to_expert[row + tile_row] >= 0:
                token = workspace[row + tile_row]
        for j in T.unroll(_SF_COLUMNS // _WARP):
            # A position that no token names has any number
            value[j] = T.uint32(0)
            if token >= 0 and token < num_tokens and column + j * _WARP + lane < num_columns:
                value[j] = sf[token, column + j * _WARP + lane]
        for j in T.unroll(_SF_COLUMNS // _WARP):
            tile[j * _WARP + lane, tile_row] = value[j]
    T.sync_threads()
    for i in T.unroll(_SF_ROWS * _SF_COLUMNS // _SF_THREADS):
        tile_column = i * (_SF_THREADS // _SF_ROWS) + thread // _SF_ROWS
        if column + tile_column < num_columns and row + thread % _SF_ROWS < num_positions:
            out_sf[row + thread % _SF_ROWS, column + tile_column] = tile[tile_column, thread % _SF_ROWS]


@kernel(
    axes=grid(workspace=dtype_of("workspace", rows=None, columns="int32"), form=forms("aligned", "general")),
    raw=("x", "out"),
    accepts={"sf": ("float32", "int32"), "out_sf": ("float32", "int32")},
    pass_configs=_PASS_CONFIGS,
)
def expand_to_fused_with_sf(workspace, form):
    """Do the same with rows of one-byte elements and with their scales, which out_sf may hold column after column: then
    a workspace for the token of each position makes it faster where there are many."""
    size = 16 if form == "aligned" else 1
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")
    hidden, num_positions = T.dynamic("hidden"), T.dynamic("num_positions")
    num_sf_columns = T.dynamic("num_sf_columns")
    out_sf_strides = T.dynamic("out_sf_row_stride", "int64"), T.dynamic("out_sf_column_stride", "int64")

    if workspace == "columns":

        @T.prim_func
        def main(
            x: T.Tensor((num_tokens, hidden), "uint8"),
            sf: T.Tensor((num_tokens, num_sf_columns), "uint32"),
            token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
            pos_to_expert: T.Tensor((num_positions,), "int32"),
            out: T.Tensor((num_positions, hidden), "uint8"),
            out_sf: T.StridedTensor((num_positions, num_sf_columns), out_sf_strides, "uint32"),
            workspace: T.Tensor((num_positions,), "int32"),
        ):
            T.assume(num_topk <= _WARP)
            if form == "aligned":
                T.assume(hidden % size == 0)
            with T.Kernel(
                _num_blocks(num_positions, num_tokens, hidden, size, _CHUNKS_WITH_SF), threads=_THREADS
            ) as block:
                _expand(
                    x, token_topk_to_pos, pos_to_expert, out, block, num_tokens, num_topk, num_positions, hidden,
                    size, _CHUNKS_WITH_SF, "uint8", (workspace,),
                )  # fmt: skip
            with T.Kernel(
                T.ceildiv(num_positions, _SF_ROWS), T.ceildiv(num_sf_columns, _SF_COLUMNS), threads=_SF_THREADS
            ) as (row, column):
                tile = T.alloc_shared((_SF_COLUMNS, _SF_ROWS + 1), "uint32")
                _turn_scales(
                    sf, pos_to_expert, workspace, out_sf, tile, row * _SF_ROWS, column * _SF_COLUMNS,
                    num_tokens, num_positions, num_sf_columns,
                )  # fmt: skip

        return main

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden), "uint8"),
        sf: T.Tensor((num_tokens, num_sf_columns), "uint32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        pos_to_expert: T.Tensor((num_positions,), "int32"),
        out: T.Tensor((num_positions, hidden), "uint8"),
        out_sf: T.StridedTensor((num_positions, num_sf_columns), out_sf_strides, "uint32"),
    ):
        T.assume(num_topk <= _WARP)
        if form == "aligned":
            T.assume(hidden % size == 0)
        with T.Kernel(_num_blocks(num_positions, num_tokens, hidden, size, _CHUNKS_WITH_SF), threads=_THREADS) as block:
            _expand(
                x, token_topk_to_pos, pos_to_expert, out, block, num_tokens, num_topk, num_positions, hidden, size,
                _CHUNKS_WITH_SF, "uint8", (sf, out_sf, num_sf_columns),
            )  # fmt: skip

    return main
