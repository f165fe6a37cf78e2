"""What the kernels share that mix residual streams: loads and stores of a thread's channels, and the block's sums.

A chunk is what a thread takes of a stream at a time: 16 bytes, or a single channel where rows cannot be cut so.
"""

from __future__ import annotations

import tilelang.language as T

MULTS = (2, 4, 8)
PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
}
BF16_CHUNK = 8


@T.macro
def load_chunk(source, token, chunk, channels, target):
    """target[i] = source[token, chunk * channels + i]"""
    for i in T.vectorized(channels):
        target[i] = source[token, chunk * channels + i]


@T.macro
def store_chunk(source, target, token, chunk, channels):
    """target[token, chunk * channels + i] = source[i]"""
    for i in T.vectorized(channels):
        target[token, chunk * channels + i] = source[i]


@T.macro
def load_streams(source, token, chunk, streams, channels, target):
    """The chunk of each stream of a token, one after the other."""
    for stream in T.unroll(streams):
        for i in T.vectorized(channels):
            target[stream * channels + i] = source[token, stream, chunk * channels + i]


@T.macro
def store_streams(source, target, token, chunk, streams, channels):
    for stream in T.unroll(streams):
        for i in T.vectorized(channels):
            target[token, stream, chunk * channels + i] = source[stream * channels + i]


@T.macro
def load_numbers(source, token, count, vector, target):
    """target[i] = source[token, i] for `count` numbers of a token, in accesses of `vector` of them."""
    for i in T.unroll(count // vector):
        for j in T.vectorized(vector):
            target[i * vector + j] = source[token, i * vector + j]


@T.macro
def store_warp_sums(sums, shared, count):
    """The first half of a block's sums of `count` numbers: those of each warp go to shared memory."""
    thread = T.get_thread_binding()
    T.call_extern("handle", f"tk::store_warp_sums<{count}>", T.address_of(sums[0]), thread, T.address_of(shared[0]))
    T.sync_threads()


def sum_warp_sums(shared, count, threads, number):
    """The second half: the block's sum of one of the numbers."""
    return T.call_extern("float32", f"tk::sum_warp_sums<{count}, {threads // 32}>", T.address_of(shared[0]), number)
