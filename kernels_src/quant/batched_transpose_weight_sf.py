"""Scales of a weight's blocks, as exponents in the packed layouts that both operand orders of a grouped product want.

A thread writes four words of one output, which are equal: a word packs the exponents of four neighbouring blocks in one
direction and stands for a row of one block in the other.
"""

import tilelang.language as T

from ..declare import kernel

_THREADS = 128
_WORDS = 4  # of a thread: 16 bytes


def _num_blocks(num_lines, length):
    """Blocks of threads for so many lines of words."""
    return num_lines * T.ceildiv(length, _THREADS * _WORDS)


@T.macro
def _write_words(sf, target, block, group, word, position, num_rows, num_cols, length, block_size, along_rows):
    """One block's words of an output line; `along_rows`: words pack neighbours along a row of sf."""
    packed = T.alloc_var("uint32")
    bits = T.alloc_var("uint32")
    place = T.alloc_var("int32")
    place = position // block_size
    if position < length:
        packed = T.uint32(0)
        for j in T.unroll(4):
            bits = T.uint32(0)
            if along_rows:
                if word * 4 + j < num_cols:
                    bits = T.reinterpret(sf[group, place, word * 4 + j], "uint32")
            else:
                if word * 4 + j < num_rows:
                    bits = T.reinterpret(sf[group, word * 4 + j, place], "uint32")
            bits = T.bitwise_and(T.shift_right(bits, T.uint32(23)), T.uint32(255))
            packed = T.bitwise_or(packed, T.shift_left(bits, T.uint32(8 * j)))
        for j in T.vectorized(_WORDS):
            target[group, word, position + j] = T.cast(packed, "int32")


@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})
def batched_transpose_weight_sf():
    """Write the exponents of sf, one for block_size channels, packed along rows to sf0 and along columns to sf1."""
    num_groups, num_rows, num_cols = T.dynamic("num_groups"), T.dynamic("num_rows"), T.dynamic("num_cols")
    rows_length, cols_length = T.dynamic("rows_length"), T.dynamic("cols_length")

    @T.prim_func
    def main(
        sf: T.Tensor((num_groups, num_rows, num_cols), "float32"),
        sf0: T.Tensor((num_groups, T.ceildiv(num_cols, 4), rows_length), "int32"),
        sf1: T.Tensor((num_groups, T.ceildiv(num_rows, 4), cols_length), "int32"),
        block_size: T.int32,
    ):
        T.assume(block_size > 0)
        T.assume(block_size % _WORDS == 0)
        T.assume(rows_length == num_rows * block_size)
        T.assume(cols_length == num_cols * block_size)
        with T.Kernel(
            _num_blocks(num_groups * T.ceildiv(num_cols, 4), num_rows * block_size)
            + _num_blocks(num_groups * T.ceildiv(num_rows, 4), num_cols * block_size),
            threads=_THREADS,
        ) as block:
            first = T.alloc_var("int32")
            part = T.alloc_var("int32")
            line = T.alloc_var("int32")
            thread = T.get_thread_binding()
            first = _num_blocks(num_groups * T.ceildiv(num_cols, 4), num_rows * block_size)
            if block < first:
                part = T.truncmod(block, T.ceildiv(num_rows * block_size, _THREADS * _WORDS))
                line = T.truncdiv(block, T.ceildiv(num_rows * block_size, _THREADS * _WORDS))
                _write_words(
                    sf, sf0, block, T.truncdiv(line, T.ceildiv(num_cols, 4)), T.truncmod(line, T.ceildiv(num_cols, 4)),
                    (part * _THREADS + thread) * _WORDS, num_rows, num_cols, num_rows * block_size, block_size, True,
                )  # fmt: skip
            else:
                part = T.truncmod(block - first, T.ceildiv(num_cols * block_size, _THREADS * _WORDS))
                line = T.truncdiv(block - first, T.ceildiv(num_cols * block_size, _THREADS * _WORDS))
                _write_words(
                    sf, sf1, block, T.truncdiv(line, T.ceildiv(num_rows, 4)), T.truncmod(line, T.ceildiv(num_rows, 4)),
                    (part * _THREADS + thread) * _WORDS, num_rows, num_cols, num_cols * block_size, block_size, False,
                )  # fmt: skip

    return main
