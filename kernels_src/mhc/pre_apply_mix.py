"""The input of a layer: the sum of a token's residual streams, each times its mix; and its gradients.

Forward, a thread takes a chunk of each stream. Backward, a block takes a token, because the gradient of a mix is a sum
over all channels.
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

# By multiplicity: a block of few loads is over before the next can start
_FORWARD_THREADS = {2: 160, 4: 64, 8: 64}
# Three of these blocks fit a multiprocessor if a thread keeps to 80 registers. With two, 4096 x 2560 took 71 us on an
# H200, the same loop written in CUDA with three 68.
_BACKWARD_THREADS = 256
_BACKWARD_BLOCKS = {2: 4, 4: 3, 8: 1}


def apply_mix(mhc_mult, channels, streams, mixes, result):
    starts = [T.address_of(buffer[0]) for buffer in (streams, mixes, result)]
    return T.call_extern("handle", f"tk::apply_mix<{mhc_mult}, {channels}>", *starts)


@kernel(axes=grid(mhc_mult=MULTS, form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def mhc_pre_apply_mix_fwd(mhc_mult, form):
    """Write to o the sum over the streams of mix[t, i] * x[t, i], fused multiply-adds from 0 on, rounded to bf16."""
    channels = BF16_CHUNK if form == "aligned" else 1
    numbers = min(mhc_mult, 4) if form == "aligned" else 1
    threads = _FORWARD_THREADS[mhc_mult]
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")

    @T.prim_func
    def main(
        x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        o: T.Tensor((num_tokens, hidden), "bfloat16"),
    ):
        if form == "aligned":
            T.assume(hidden % channels == 0)
        with T.Kernel(num_tokens * T.ceildiv(hidden, threads * channels), threads=threads) as block:
            include("streams.cuh")
            streams = T.alloc_local((mhc_mult * channels,), "bfloat16")
            mixes = T.alloc_local((mhc_mult,), "float32")
            result = T.alloc_local((channels,), "bfloat16")
            token = T.alloc_var("int32")
            chunk = T.alloc_var("int32")
            token = T.truncdiv(block, T.ceildiv(hidden, threads * channels))
            chunk = T.truncmod(block, T.ceildiv(hidden, threads * channels)) * threads + T.get_thread_binding()
            if chunk * channels < hidden:
                load_streams(x, token, chunk, mhc_mult, channels, streams)
                load_numbers(mix, token, mhc_mult, numbers, mixes)
                apply_mix(mhc_mult, channels, streams, mixes, result)
                store_chunk(result, o, token, chunk, channels)

    return main


@kernel(axes=grid(mhc_mult=MULTS, form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def mhc_pre_apply_mix_bwd(mhc_mult, form):
    """Write <o_grad[t], x[t, i]> to mix_grad[t, i] and add mix[t, i] * o_grad[t] to x_grad[t, i] in place."""
    channels = BF16_CHUNK if form == "aligned" else 1
    numbers = min(mhc_mult, 4) if form == "aligned" else 1
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")

    @T.prim_func
    def main(
        o_grad: T.Tensor((num_tokens, hidden), "bfloat16"),
        x: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        x_grad: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        mix_grad: T.Tensor((num_tokens, mhc_mult), "float32"),
    ):
        if form == "aligned":
            T.assume(hidden % channels == 0)
        with T.Kernel(num_tokens, threads=_BACKWARD_THREADS) as token:
            include("streams.cuh")
            T.annotate_min_blocks_per_sm(_BACKWARD_BLOCKS[mhc_mult])
            grad = T.alloc_local((channels,), "bfloat16")
            streams = T.alloc_local((mhc_mult * channels,), "bfloat16")
            grads = T.alloc_local((mhc_mult * channels,), "bfloat16")
            mixes = T.alloc_local((mhc_mult,), "float32")
            sums = T.alloc_local((mhc_mult,), "float32")
            shared = T.alloc_shared((_BACKWARD_THREADS // 32 * mhc_mult,), "float32")
            chunk = T.alloc_var("int32")
            load_numbers(mix, token, mhc_mult, numbers, mixes)
            for i in T.unroll(mhc_mult):
                sums[i] = T.float32(0)
            for step in T.serial(T.ceildiv(hidden, _BACKWARD_THREADS * channels)):
                chunk = step * _BACKWARD_THREADS + T.get_thread_binding()
                if chunk * channels < hidden:
                    load_chunk(o_grad, token, chunk, channels, grad)
                    load_streams(x, token, chunk, mhc_mult, channels, streams)
                    load_streams(x_grad, token, chunk, mhc_mult, channels, grads)
                    T.call_extern(
                        "handle",
                        f"tk::apply_mix_backward<{mhc_mult}, {channels}>",
                        T.address_of(grad[0]),
                        T.address_of(streams[0]),
                        T.address_of(mixes[0]),
                        T.address_of(grads[0]),
                        T.address_of(sums[0]),
                    )
                    store_streams(grads, x_grad, token, chunk, mhc_mult, channels)
            store_warp_sums(sums, shared, mhc_mult)
            if T.get_thread_binding() < mhc_mult:
                mix_grad[token, T.get_thread_binding()] = sum_warp_sums(
                    shared, mhc_mult, _BACKWARD_THREADS, T.get_thread_binding()
                )

    return main
