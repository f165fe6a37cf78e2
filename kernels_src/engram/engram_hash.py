"""Hashes of n-grams as rows of embedding tables, for all layers at once.

A thread keeps one column, so that the division by its table's size becomes a multiplication by a reciprocal found once,
and takes a few tokens. Lanes are neighbouring columns, then neighbouring tokens: stores are dense.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import kernel

_THREADS = 256
_TOKENS = 4  # of a thread
_BLOCKS = 3  # of a multiprocessor; left alone, a thread takes 96 registers, with four of them some spill
_UNROLLED = 4  # ids of an n-gram


@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    }
)
def engram_hash():
    """Write the table row of each layer, token, n-gram and table to out; -1 for tokens in image_token_mask.

    The ids of an n-gram times their multipliers are mixed by exclusive or, 64 bits wide; the row is the remainder
    (never negative) by the table's size, plus the table's offset.
    """
    num_tokens, num_layers, ngram = T.dynamic("num_tokens"), T.dynamic("num_layers"), T.dynamic("ngram")
    num_orders, num_tables, num_columns = T.dynamic("num_orders"), T.dynamic("num_tables"), T.dynamic("num_columns")

    @T.prim_func
    def main(
        ngram_token_ids: T.Tensor((num_tokens, ngram), "int32"),
        multipliers: T.Tensor((num_layers, ngram), "int64"),
        vocab_sizes: T.Tensor((num_layers, num_orders, num_tables), "int32"),
        offsets: T.Tensor((num_layers, num_columns), "int32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        out: T.Tensor((num_layers, num_tokens, num_columns), "int32"),
    ):
        T.assume(num_orders + 1 == ngram)
        T.assume(num_orders * num_tables == num_columns)
        T.assume(num_layers <= 65535)
        tile = T.max(T.truncdiv(_THREADS, T.max(num_columns, 1)), 1) * _TOKENS
        with T.Kernel(T.ceildiv(num_tokens, tile), num_layers, threads=_THREADS) as (block, layer):
            include("hash.cuh")
            T.annotate_min_blocks_per_sm(_BLOCKS)
            reciprocal = T.alloc_local((1,), "uint64")
            hashed = T.alloc_local((_TOKENS,), "int64")
            ids = T.alloc_local((_UNROLLED * _TOKENS,), "int32")
            factors = T.alloc_local((_UNROLLED,), "int64")
            rows = T.alloc_local((_TOKENS,), "int32")
            is_image = T.alloc_local((_TOKENS,), "bool")
            lanes = T.alloc_var("int32")
            column = T.alloc_var("int32")
            size = T.alloc_var("int32")
            offset = T.alloc_var("int32")
            order = T.alloc_var("int32")
            first = T.alloc_var("int32")
            thread = T.get_thread_binding()
            # Threads of a column, and the thread's place among them
            lanes = T.max(T.truncdiv(_THREADS, num_columns), 1)
            first = block * (lanes * _TOKENS) + T.truncdiv(thread, num_columns)
            column = thread - T.truncdiv(thread, num_columns) * num_columns
            if num_columns > _THREADS:
                first = block * _TOKENS
                column = thread
            if first < block * (lanes * _TOKENS) + lanes:
                while column < num_columns:
                    order = T.truncdiv(column, num_tables)
                    size = vocab_sizes[layer, order, column - order * num_tables]
                    offset = offsets[layer, column]
                    for i in T.unroll(_TOKENS):
                        hashed[i] = T.int64(0)
                        if first + i * lanes < num_tokens:
                            is_image[i] = False
                            if not T.isnullptr(image_token_mask.data):
                                is_image[i] = image_token_mask[first + i * lanes]
                    # All of a short n-gram in flight at once
                    for at in T.unroll(_UNROLLED):
                        factors[at] = T.int64(0)
                        for i in T.unroll(_TOKENS):
                            ids[at * _TOKENS + i] = 0
                        if at <= order + 1:
                            factors[at] = multipliers[layer, at]
                            for i in T.unroll(_TOKENS):
                                if first + i * lanes < num_tokens:
                                    ids[at * _TOKENS + i] = ngram_token_ids[first + i * lanes, at]
                    # A division: behind the loads, which it would otherwise hold up
                    reciprocal[0] = T.call_extern("uint64", "tk::reciprocal_of", size)
                    for at in T.unroll(_UNROLLED):
                        for i in T.unroll(_TOKENS):
                            hashed[i] = T.bitwise_xor(hashed[i], T.cast(ids[at * _TOKENS + i], "int64") * factors[at])
                    for at in T.serial(order + 2 - _UNROLLED):
                        for i in T.unroll(_TOKENS):
                            if first + i * lanes < num_tokens:
                                hashed[i] = T.bitwise_xor(
                                    hashed[i],
                                    T.cast(ngram_token_ids[first + i * lanes, at + _UNROLLED], "int64")
                                    * multipliers[layer, at + _UNROLLED],
                                )
                    for i in T.unroll(_TOKENS):
                        rows[i] = T.call_extern("int32", "tk::floor_mod", hashed[i], size, reciprocal[0]) + offset
                        if is_image[i]:
                            rows[i] = -1
                    for i in T.unroll(_TOKENS):
                        if first + i * lanes < num_tokens:
                            out[layer, first + i * lanes, column] = rows[i]
                    column += _THREADS

    return main
