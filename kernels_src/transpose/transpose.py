"""Transposes of raw elements of 1, 2 or 4 bytes: one matrix, or a batch of them.

aligned: a thread reads a square block as rows of 16 bytes and transposes it in registers; its rows pass through
shared memory so that a warp reads and writes pieces of 256 bytes. Written from registers, in pieces of 64 bytes,
2-byte elements took 156 us instead of 59 at 8064 x 7168 (H200); tiles of 128 x 64 and 64 x 128 elements took 61 and
62. words: the same with words of 4 bytes, for sizes, strides and addresses that are multiples of them. general: any
size, stride and alignment, element by element through a padded tile in shared memory.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import forms, grid, itemsize_of, kernel

_DTYPES = {1: "uint8", 2: "uint16", 4: "uint32"}
_AXES = grid(itemsize=itemsize_of("x", 1, 2, 4), form=forms("aligned", "words", "general"))
_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a block of elements
    "tl.disable_buffer_init_check": True,  # elements are loaded under a test, and moved without one
}

# aligned: threads of a block along the columns of x and along its rows
_ACROSS = 16
_DOWN = 16
# words: words along both sides of a tile; threads of a block along its rows and columns
_WORDS = 32
_WORDS_DOWN = 8
# general: elements along both sides of a tile, threads of a block along its rows
_TILE = 64
_TILE_ROWS = 4

# Elements of an access of these bytes
_BYTES = {"aligned": 16, "words": 4}


def _exists(itemsize: int, form: str) -> bool:
    return form != "words" or itemsize < 4


def _tile(itemsize: int, form: str) -> tuple[int, int, int]:
    """Rows and columns of x that a block of threads transposes, and its threads."""
    if form == "general":
        return _TILE, _TILE, _TILE * _TILE_ROWS
    size = _BYTES[form] // itemsize
    if form == "words":
        return _WORDS * size, _WORDS * size, _WORDS * _WORDS_DOWN
    return _DOWN * size, _ACROSS * size, _DOWN * _ACROSS


def _at(matrix: tuple, row, col) -> tuple:
    """The index of an element; `matrix` is the index into the batch, empty where there is none."""
    return (*matrix, row, col)


@T.macro
def _transpose_aligned(x, out, tile_row, tile_col, num_rows, num_cols, itemsize, matrix):
    include("transpose_registers.cuh")
    size = 16 // itemsize
    thread = T.get_thread_binding()
    # Rows and columns in units of blocks of size x size: what TileLang must see to find accesses of 16 bytes
    down = thread // _ACROSS
    across = thread % _ACROSS
    block_row = tile_row * _DOWN + down
    block_col = tile_col * _ACROSS + across
    x_block = T.alloc_local((size * size,), _DTYPES[itemsize])
    out_block = T.alloc_local((size * size,), _DTYPES[itemsize])
    tile = T.alloc_shared((_ACROSS * size * _DOWN * size,), _DTYPES[itemsize])
    if block_row * size < num_rows and block_col * size < num_cols:
        for i in T.unroll(size):
            for j in T.vectorized(size):
                x_block[i * size + j] = x[_at(matrix, block_row * size + i, block_col * size + j)]
    T.call_extern(
        "handle", f"tk::transpose_registers_b{itemsize}", T.address_of(x_block[0]), T.address_of(out_block[0])
    )
    # Row `across * size + j` of the tile, 16 bytes number `down`; exclusive or keeps eight neighbouring lanes in
    # different banks
    for j in T.unroll(size):
        for i in T.vectorized(size):
            tile[((across * size + j) * _DOWN + T.bitwise_xor(down, across % 8)) * size + i] = out_block[j * size + i]
    T.sync_threads()
    write_down = thread % _DOWN
    write_row = tile_row * _DOWN + write_down
    for j in T.unroll(size):
        write_across = thread // _DOWN + j * _ACROSS
        write_col = tile_col * (_ACROSS * size) + write_across
        if write_row * size < num_rows and write_col < num_cols:
            for i in T.vectorized(size):
                out[_at(matrix, write_col, write_row * size + i)] = tile[
                    (write_across * _DOWN + T.bitwise_xor(write_down, write_across // size % 8)) * size + i
                ]


@T.macro
def _transpose_words(x, out, tile_row, tile_col, num_rows, num_cols, itemsize, matrix):
    include("transpose_registers.cuh")
    size = 4 // itemsize
    steps = _WORDS // _WORDS_DOWN
    across = T.get_thread_binding() % _WORDS
    down = T.get_thread_binding() // _WORDS
    block_col = tile_col * _WORDS + across
    x_blocks = T.alloc_local((steps * size * size,), _DTYPES[itemsize])
    out_block = T.alloc_local((size * size,), _DTYPES[itemsize])
    # A word of padding: lanes write words of one column of the tile with two conflicts, and read rows with none
    tile = T.alloc_shared((_WORDS * size * (_WORDS + 1) * size,), _DTYPES[itemsize])
    for step in T.unroll(steps):
        block_row = tile_row * _WORDS + step * _WORDS_DOWN + down
        if block_row * size < num_rows and block_col * size < num_cols:
            for i in T.unroll(size):
                for j in T.vectorized(size):
                    x_blocks[(step * size + i) * size + j] = x[_at(matrix, block_row * size + i, block_col * size + j)]
    for step in T.unroll(steps):
        T.call_extern(
            "handle",
            f"tk::transpose_word_b{itemsize}",
            T.address_of(x_blocks[step * size * size]),
            T.address_of(out_block[0]),
        )
        for j in T.unroll(size):
            for i in T.vectorized(size):
                tile[((across * size + j) * (_WORDS + 1) + step * _WORDS_DOWN + down) * size + i] = out_block[
                    j * size + i
                ]
    T.sync_threads()
    write_row = tile_row * _WORDS + across
    for step in T.unroll(steps * size):
        write_down = step * _WORDS_DOWN + down
        write_col = tile_col * (_WORDS * size) + write_down
        if write_row * size < num_rows and write_col < num_cols:
            for i in T.vectorized(size):
                out[_at(matrix, write_col, write_row * size + i)] = tile[
                    (write_down * (_WORDS + 1) + across) * size + i
                ]


@T.macro
def _transpose_general(x, out, tile_row, tile_col, num_rows, num_cols, itemsize, matrix):
    across = T.get_thread_binding() % _TILE
    down = T.get_thread_binding() // _TILE
    # All reads before the first write to shared memory: one by one they took 8.4 us where a copy takes 1.4
    elements = T.alloc_local((_TILE // _TILE_ROWS,), _DTYPES[itemsize])
    # One bank of padding: neither side of the tile meets bank conflicts
    tile = T.alloc_shared((_TILE, _TILE + 4 // itemsize), _DTYPES[itemsize])
    for i in T.unroll(_TILE // _TILE_ROWS):
        row = tile_row * _TILE + i * _TILE_ROWS + down
        if row < num_rows and tile_col * _TILE + across < num_cols:
            elements[i] = x[_at(matrix, row, tile_col * _TILE + across)]
    for i in T.unroll(_TILE // _TILE_ROWS):
        tile[i * _TILE_ROWS + down, across] = elements[i]
    T.sync_threads()
    for j in T.unroll(_TILE // _TILE_ROWS):
        col = j * _TILE_ROWS + down
        if tile_col * _TILE + col < num_cols and tile_row * _TILE + across < num_rows:
            out[_at(matrix, tile_col * _TILE + col, tile_row * _TILE + across)] = tile[across, col]


_TRANSPOSE = {"aligned": _transpose_aligned, "words": _transpose_words, "general": _transpose_general}


@kernel(axes=_AXES, where=_exists, raw=("x", "out"), pass_configs=_PASS_CONFIGS)
def transpose(itemsize, form):
    """Write the transpose of x (rows, cols) to out (cols, rows)."""
    size = _BYTES.get(form, itemsize) // itemsize
    tile_rows, tile_cols, threads = _tile(itemsize, form)
    num_rows, num_cols, x_stride = T.dynamic("num_rows"), T.dynamic("num_cols"), T.dynamic("x_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_rows, num_cols), (x_stride, 1), _DTYPES[itemsize]),
        out: T.Tensor((num_cols, num_rows), _DTYPES[itemsize]),
    ):
        if form != "general":
            T.assume(num_rows % size == 0)
            T.assume(num_cols % size == 0)
            T.assume(x_stride % size == 0)
        # All tiles on grid x: y and z end at 65,535
        with T.Kernel(T.ceildiv(num_cols, tile_cols) * T.ceildiv(num_rows, tile_rows), threads=threads) as block:
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(num_cols, tile_cols))
            tile_col = T.truncmod(block, T.ceildiv(num_cols, tile_cols))
            _TRANSPOSE[form](x, out, tile_row, tile_col, num_rows, num_cols, itemsize, ())

    return main


@kernel(axes=_AXES, where=_exists, raw=("x", "out"), pass_configs=_PASS_CONFIGS)
def batched_transpose(itemsize, form):
    """Write the transposes of a batch of matrices x (batch, rows, cols) to out (batch, cols, rows)."""
    size = _BYTES.get(form, itemsize) // itemsize
    tile_rows, tile_cols, threads = _tile(itemsize, form)
    batch, num_rows, num_cols = T.dynamic("batch"), T.dynamic("num_rows"), T.dynamic("num_cols")
    x_batch_stride, x_stride = T.dynamic("x_batch_stride", "int64"), T.dynamic("x_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((batch, num_rows, num_cols), (x_batch_stride, x_stride, 1), _DTYPES[itemsize]),
        out: T.Tensor((batch, num_cols, num_rows), _DTYPES[itemsize]),
    ):
        if form != "general":
            T.assume(num_rows % size == 0)
            T.assume(num_cols % size == 0)
            T.assume(x_stride % size == 0)
            T.assume(x_batch_stride % size == 0)
        with T.Kernel(
            T.ceildiv(num_cols, tile_cols) * T.ceildiv(num_rows, tile_rows) * batch, threads=threads
        ) as block:
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            index = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(num_cols, tile_cols))
            tile_col = T.truncmod(block, T.ceildiv(num_cols, tile_cols))
            index = T.truncdiv(tile_row, T.ceildiv(num_rows, tile_rows))
            tile_row = T.truncmod(tile_row, T.ceildiv(num_rows, tile_rows))
            _TRANSPOSE[form](x, out, tile_row, tile_col, num_rows, num_cols, itemsize, (index,))

    return main
