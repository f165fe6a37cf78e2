"""Copies of each token's row for every stream, and back: the sum over the streams of its gradients.

A thread takes a few chunks of a row. Chunks are 16 bytes in the aligned form, one element in the general one.
"""

import tilelang.language as T

from ..declare import forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
    "tl.disable_buffer_init_check": True,  # rows are loaded and stored under the same test
}

_THREADS = 128
# Chunks of a thread
_CHUNKS = 2
# Streams whose gradients a thread loads before it adds the first of them
_STREAMS = 4


def _size(form):
    """Elements of a chunk."""
    return 8 if form == "aligned" else 1


def _num_tiles(num_chunks):
    """Parts of a row that a block takes."""
    return T.ceildiv(num_chunks, _THREADS * _CHUNKS)


@kernel(axes=grid(form=forms("aligned", "general")), pass_configs=_PASS_CONFIGS)
def expand_to_mhc_fwd(form):
    """Write row t of x to each of the rows o[t, ...]."""
    size = _size(form)
    num_tokens, mhc_mult, hidden = T.dynamic("num_tokens"), T.dynamic("mhc_mult"), T.dynamic("hidden")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden), "bfloat16"),
        o: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
    ):
        if form == "aligned":
            T.assume(hidden % size == 0)
        with T.Kernel(num_tokens * _num_tiles(T.ceildiv(hidden, size)), threads=_THREADS) as block:
            values = T.alloc_local((_CHUNKS * size,), "bfloat16")
            token = T.alloc_var("int32")
            tile = T.alloc_var("int32")
            token = T.truncdiv(block, _num_tiles(T.ceildiv(hidden, size)))
            tile = T.truncmod(block, _num_tiles(T.ceildiv(hidden, size)))
            for i in T.unroll(_CHUNKS):
                chunk = (tile * _CHUNKS + i) * _THREADS + T.get_thread_binding()
                if chunk * size < hidden:
                    for j in T.vectorized(size):
                        values[i * size + j] = x[token, chunk * size + j]
            for stream in T.serial(mhc_mult):
                for i in T.unroll(_CHUNKS):
                    chunk = (tile * _CHUNKS + i) * _THREADS + T.get_thread_binding()
                    if chunk * size < hidden:
                        for j in T.vectorized(size):
                            o[token, stream, chunk * size + j] = values[i * size + j]

    return main


@kernel(axes=grid(form=forms("aligned", "general")), pass_configs=_PASS_CONFIGS)
def expand_to_mhc_bwd(form):
    """Write the sum over the streams of o_grad[t, ...], in order in fp32, to row t of x_grad."""
    size = _size(form)
    num_tokens, mhc_mult, hidden = T.dynamic("num_tokens"), T.dynamic("mhc_mult"), T.dynamic("hidden")

    @T.prim_func
    def main(
        o_grad: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        x_grad: T.Tensor((num_tokens, hidden), "bfloat16"),
    ):
        if form == "aligned":
            T.assume(hidden % size == 0)
        with T.Kernel(num_tokens * _num_tiles(T.ceildiv(hidden, size)), threads=_THREADS) as block:
            values = T.alloc_local((_STREAMS * _CHUNKS * size,), "bfloat16")
            sums = T.alloc_local((_CHUNKS * size,), "float32")
            target = T.alloc_local((_CHUNKS * size,), "bfloat16")
            token = T.alloc_var("int32")
            tile = T.alloc_var("int32")
            token = T.truncdiv(block, _num_tiles(T.ceildiv(hidden, size)))
            tile = T.truncmod(block, _num_tiles(T.ceildiv(hidden, size)))
            for i in T.unroll(_CHUNKS * size):
                sums[i] = T.float32(0)
            for step in T.serial(T.ceildiv(mhc_mult, _STREAMS)):
                for k in T.unroll(_STREAMS):
                    for i in T.unroll(_CHUNKS):
                        chunk = (tile * _CHUNKS + i) * _THREADS + T.get_thread_binding()
                        if step * _STREAMS + k < mhc_mult and chunk * size < hidden:
                            for j in T.vectorized(size):
                                values[(k * _CHUNKS + i) * size + j] = o_grad[
                                    token, step * _STREAMS + k, chunk * size + j
                                ]
                for k in T.unroll(_STREAMS):
                    if step * _STREAMS + k < mhc_mult:
                        for i in T.unroll(_CHUNKS * size):
                            sums[i] = sums[i] + T.cast(values[k * _CHUNKS * size + i], "float32")
            for i in T.unroll(_CHUNKS * size):
                target[i] = T.cast(sums[i], "bfloat16")
            for i in T.unroll(_CHUNKS):
                chunk = (tile * _CHUNKS + i) * _THREADS + T.get_thread_binding()
                if chunk * size < hidden:
                    for j in T.vectorized(size):
                        x_grad[token, chunk * size + j] = target[i * size + j]

    return main
