"""The residual streams behind a layer: its output and the streams before it, mixed; and the gradients of all four.

Forward, a thread takes a chunk of every stream. Backward, a block takes whole tokens, because the gradients of the
mixes are sums over all channels; the device code is in post_backward.cuh.
"""

import tilelang.language as T

from ..common.device import aligned, include
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
# By multiplicity: threads, stages of the ring in shared memory, and blocks that share an SM. On an H200 95 to 99 % of a
# same-size copy; blocks that stay and take one token after the other are 2 to 5 % slower.
_BACKWARD = {2: (160, 3, 4), 4: (128, 3, 4), 8: (128, 2, 3)}
_GENERAL_THREADS = 160


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


@T.macro
def _post_backward(tensors, token, hidden, mhc_mult):
    """A block takes a token; its copies to shared memory run ahead."""
    include("aligned.cuh", "post_backward.cuh")
    threads, stages, blocks = _BACKWARD[mhc_mult]
    T.annotate_min_blocks_per_sm(blocks)
    x, residual, post_layer_mix, comb_res_mix, d_o, d_x, d_residual, d_post_layer_mix, d_comb_res_mix = tensors
    num_mixes = mhc_mult * (mhc_mult + 1)
    ring = T.alloc_shared((stages * (2 * mhc_mult + 1) * threads * 16,), "uint8")
    numbers = T.alloc_shared((num_mixes * (1 + threads // 32),), "float32")
    T.call_extern(
        "handle",
        f"tk::PostBackward<{mhc_mult}, {threads}, {stages}>::run",
        aligned(16, T.access_ptr(d_o[0, 0, 0], "r")),
        aligned(16, T.access_ptr(x[0, 0], "r")),
        aligned(16, T.access_ptr(residual[0, 0, 0], "r")),
        T.access_ptr(post_layer_mix[0, 0], "r"),
        T.access_ptr(comb_res_mix[0, 0, 0], "r"),
        aligned(16, T.access_ptr(d_x[0, 0], "w")),
        aligned(16, T.access_ptr(d_residual[0, 0, 0], "w")),
        T.access_ptr(d_post_layer_mix[0, 0], "w"),
        T.access_ptr(d_comb_res_mix[0, 0, 0], "w"),
        T.address_of(ring[0]),
        T.address_of(numbers[0]),
        T.cast(token, "int64"),
        hidden,
    )


@T.macro
def _post_backward_general(tensors, token, hidden, mhc_mult):
    """A block takes one token."""
    include("streams.cuh")
    x, residual, post_layer_mix, comb_res_mix, d_o, d_x, d_residual, d_post_layer_mix, d_comb_res_mix = tensors
    num_sums = mhc_mult * (mhc_mult + 1)
    layer = T.alloc_local((1,), "bfloat16")
    streams = T.alloc_local((mhc_mult,), "bfloat16")
    grads = T.alloc_local((mhc_mult,), "bfloat16")
    post = T.alloc_local((mhc_mult,), "float32")
    comb = T.alloc_local((mhc_mult * mhc_mult,), "float32")
    sums = T.alloc_local((num_sums,), "float32")
    shared = T.alloc_shared((_GENERAL_THREADS // 32 * num_sums,), "float32")
    channel = T.alloc_var("int32")
    thread = T.get_thread_binding()
    load_mixes(post_layer_mix, comb_res_mix, token, mhc_mult, 1, post, comb)
    for i in T.unroll(num_sums):
        sums[i] = T.float32(0)
    for step in T.serial(T.ceildiv(hidden, _GENERAL_THREADS)):
        channel = step * _GENERAL_THREADS + thread
        if channel < hidden:
            load_streams(d_o, token, channel, mhc_mult, 1, grads)
            load_chunk(x, token, channel, 1, layer)
            load_streams(residual, token, channel, mhc_mult, 1, streams)
            T.call_extern(
                "handle",
                f"tk::post_streams_backward<{mhc_mult}, 1>",
                T.address_of(grads[0]),
                T.address_of(layer[0]),
                T.address_of(streams[0]),
                T.address_of(post[0]),
                T.address_of(comb[0]),
                T.address_of(layer[0]),
                T.address_of(streams[0]),
                T.address_of(sums[0]),
            )
            store_chunk(layer, d_x, token, channel, 1)
            store_streams(streams, d_residual, token, channel, mhc_mult, 1)
    store_warp_sums(sums, shared, num_sums)
    if thread < mhc_mult:
        d_post_layer_mix[token, thread] = sum_warp_sums(shared, num_sums, _GENERAL_THREADS, thread)
    elif thread < num_sums:
        row = T.truncdiv(thread - mhc_mult, mhc_mult)
        column = T.truncmod(thread, mhc_mult)
        d_comb_res_mix[token, row, column] = sum_warp_sums(shared, num_sums, _GENERAL_THREADS, thread)


@kernel(axes=grid(mhc_mult=MULTS, form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def mhc_post_bwd(mhc_mult, form):
    """Write the gradients of mhc_post_fwd for the gradient d_o of its result."""
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
            T.assume(hidden % BF16_CHUNK == 0)
            with T.Kernel(num_tokens, threads=_BACKWARD[mhc_mult][0]) as token:
                _post_backward(
                    (x, residual, post_layer_mix, comb_res_mix, d_o, d_x, d_residual, d_post_layer_mix, d_comb_res_mix),
                    token, hidden, mhc_mult,
                )  # fmt: skip
        else:
            with T.Kernel(num_tokens, threads=_GENERAL_THREADS) as token:
                _post_backward_general(
                    (x, residual, post_layer_mix, comb_res_mix, d_o, d_x, d_residual, d_post_layer_mix, d_comb_res_mix),
                    token, hidden, mhc_mult,
                )  # fmt: skip

    return main
