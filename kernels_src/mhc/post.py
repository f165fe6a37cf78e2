"""The residual streams behind a layer: its output and the streams before it, mixed; and the gradients of all four.

Forward, a thread takes a chunk of every stream. Backward, a block takes a token, because the gradients of the mixes are
sums over all channels.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import forms, grid, kernel
from ._streams import (
    BF16_CHUNK,
    MULTS,
    PASS_CONFIGS,
    load_chunk,
    load_numbers,
    load_streams,
    store_chunk,
    store_streams,
    store_warp_sums,
    sum_warp_sums,
)

_FORWARD_THREADS = 128
# On an H200 two of these blocks on a multiprocessor got 80 to 85 % of a same-size copy; the same loop written in CUDA,
# of which three fit, 98 to 101 %, and with 256 threads 87 % where hidden is 2560.
_BACKWARD_THREADS = 160
_BACKWARD_BLOCKS = {2: 4, 4: 3, 8: 1}


@T.macro
def load_mixes(post_layer_mix, comb_res_mix, token, mhc_mult, numbers, post, comb):
    """A token's mixes; comb stream after stream: comb[i * mhc_mult + o] leads from stream i to stream o."""
    load_numbers(post_layer_mix, token, mhc_mult, numbers, post)
    for i in T.unroll(mhc_mult):
        for j in T.unroll(mhc_mult // numbers):
            for k in T.vectorized(numbers):
                comb[i * mhc_mult + j * numbers + k] = comb_res_mix[token, i, j * numbers + k]


def post_streams(mhc_mult, channels, x, residual, post, comb, out):
    starts = [T.address_of(buffer[0]) for buffer in (x, residual, post, comb, out)]
    return T.call_extern("handle", f"tk::post_streams<{mhc_mult}, {channels}>", *starts)


@kernel(axes=grid(mhc_mult=MULTS, form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def mhc_post_fwd(mhc_mult, form):
    """Write post[t, o] * x[t], then plus comb[t, i, o] * residual[t, i] for each stream i, to out[t, o] in bf16."""
    channels = BF16_CHUNK if form == "aligned" else 1
    numbers = min(mhc_mult, 4) if form == "aligned" else 1
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden), "bfloat16"),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        post_layer_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        comb_res_mix: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        out: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
    ):
        if form == "aligned":
            T.assume(hidden % channels == 0)
        with T.Kernel(num_tokens * T.ceildiv(hidden, _FORWARD_THREADS * channels), threads=_FORWARD_THREADS) as block:
            include("streams.cuh")
            layer = T.alloc_local((channels,), "bfloat16")
            streams = T.alloc_local((mhc_mult * channels,), "bfloat16")
            post = T.alloc_local((mhc_mult,), "float32")
            comb = T.alloc_local((mhc_mult * mhc_mult,), "float32")
            token = T.alloc_var("int32")
            chunk = T.alloc_var("int32")
            token = T.truncdiv(block, T.ceildiv(hidden, _FORWARD_THREADS * channels))
            chunk = (
                T.truncmod(block, T.ceildiv(hidden, _FORWARD_THREADS * channels)) * _FORWARD_THREADS
                + T.get_thread_binding()
            )
            if chunk * channels < hidden:
                load_chunk(x, token, chunk, channels, layer)
                load_streams(residual, token, chunk, mhc_mult, channels, streams)
                load_mixes(post_layer_mix, comb_res_mix, token, mhc_mult, numbers, post, comb)
                post_streams(mhc_mult, channels, layer, streams, post, comb, streams)
                store_streams(streams, out, token, chunk, mhc_mult, channels)

    return main


@kernel(axes=grid(mhc_mult=MULTS, form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def mhc_post_bwd(mhc_mult, form):
    """Write the gradients of mhc_post_fwd for the gradient d_o of its result."""
    # More streams than four need more registers than a thread has for 16 bytes of each
    channels = 1 if form == "general" else BF16_CHUNK if mhc_mult <= 4 else BF16_CHUNK // 2
    numbers = min(mhc_mult, 4) if form == "aligned" else 1
    num_sums = mhc_mult + mhc_mult * mhc_mult
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, hidden), "bfloat16"),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        post_layer_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        comb_res_mix: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        d_o: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        d_x: T.Tensor((num_tokens, hidden), "bfloat16"),
        d_residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        d_post_layer_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        d_comb_res_mix: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
    ):
        if form == "aligned":
            T.assume(hidden % channels == 0)
        with T.Kernel(num_tokens, threads=_BACKWARD_THREADS) as token:
            include("streams.cuh")
            T.annotate_min_blocks_per_sm(_BACKWARD_BLOCKS[mhc_mult])
            layer = T.alloc_local((channels,), "bfloat16")
            streams = T.alloc_local((mhc_mult * channels,), "bfloat16")
            grads = T.alloc_local((mhc_mult * channels,), "bfloat16")
            post = T.alloc_local((mhc_mult,), "float32")
            comb = T.alloc_local((mhc_mult * mhc_mult,), "float32")
            sums = T.alloc_local((num_sums,), "float32")
            shared = T.alloc_shared((_BACKWARD_THREADS // 32 * num_sums,), "float32")
            chunk = T.alloc_var("int32")
            thread = T.get_thread_binding()
            load_mixes(post_layer_mix, comb_res_mix, token, mhc_mult, numbers, post, comb)
            for i in T.unroll(num_sums):
                sums[i] = T.float32(0)
            for step in T.serial(T.ceildiv(hidden, _BACKWARD_THREADS * channels)):
                chunk = step * _BACKWARD_THREADS + thread
                if chunk * channels < hidden:
                    load_streams(d_o, token, chunk, mhc_mult, channels, grads)
                    load_chunk(x, token, chunk, channels, layer)
                    load_streams(residual, token, chunk, mhc_mult, channels, streams)
                    T.call_extern(
                        "handle",
                        f"tk::post_streams_backward<{mhc_mult}, {channels}>",
                        T.address_of(grads[0]),
                        T.address_of(layer[0]),
                        T.address_of(streams[0]),
                        T.address_of(post[0]),
                        T.address_of(comb[0]),
                        T.address_of(layer[0]),
                        T.address_of(streams[0]),
                        T.address_of(sums[0]),
                    )
                    store_chunk(layer, d_x, token, chunk, channels)
                    store_streams(streams, d_residual, token, chunk, mhc_mult, channels)
            store_warp_sums(sums, shared, num_sums)
            if thread < mhc_mult:
                d_post_layer_mix[token, thread] = sum_warp_sums(shared, num_sums, _BACKWARD_THREADS, thread)
            elif thread < num_sums:
                row = T.truncdiv(thread - mhc_mult, mhc_mult)
                column = T.truncmod(thread, mhc_mult)
                d_comb_res_mix[token, row, column] = sum_warp_sums(shared, num_sums, _BACKWARD_THREADS, thread)

    return main
