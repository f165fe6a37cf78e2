"""The mixes of the last residual streams, a sigmoid each, and their gradients. A thread keeps to one stream."""

import tilelang.language as T

from ..common.device import include
from ..declare import grid, kernel
from ._streams import MULTS, PASS_CONFIGS

_THREADS = 128
_BACKWARD_THREADS = 512
_IN_FLIGHT = 4  # tokens of a thread
_WARP = 32


@kernel(axes=grid(mhc_mult=MULTS), pass_configs=PASS_CONFIGS)
def mhc_head_compute_mix_fwd(mhc_mult):
    """Write sigmoid(input_mix * scale + base) + eps to output_mix."""
    tokens = _THREADS // mhc_mult
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def main(
        input_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        mhc_scale: T.Tensor((1,), "float32"),
        mhc_base: T.Tensor((mhc_mult,), "float32"),
        output_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        mhc_pre_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, tokens), threads=_THREADS) as block:
            include("mixes.cuh")
            token = block * tokens + T.get_thread_binding() // mhc_mult
            stream = T.get_thread_binding() % mhc_mult
            if token < num_tokens:
                output_mix[token, stream] = T.call_extern(
                    "float32", "tk::pre_mix", input_mix[token, stream], mhc_scale[0], mhc_base[stream], mhc_pre_eps
                )

    return main


@kernel(
    axes=grid(mhc_mult=MULTS),
    # barriers are set by hand
    pass_configs={**PASS_CONFIGS, "tl.disable_thread_storage_sync": True},
)
def mhc_head_compute_mix_bwd(mhc_mult):
    """Write the gradients of mhc_head_compute_mix_fwd; those of scale and base as one row of sums for each block.

    Blocks of token_block_size tokens are dealt to the num_sms rows in turn.
    """
    tokens = _BACKWARD_THREADS // mhc_mult * _IN_FLIGHT  # of a step
    num_tokens, num_sms = T.dynamic("num_tokens"), T.dynamic("num_sms")

    @T.prim_func
    def main(
        output_mix_grad: T.Tensor((num_tokens, mhc_mult), "float32"),
        input_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        mhc_scale: T.Tensor((1,), "float32"),
        mhc_base: T.Tensor((mhc_mult,), "float32"),
        input_mix_grad: T.Tensor((num_tokens, mhc_mult), "float32"),
        mhc_scale_grad_partial: T.Tensor((num_sms, 1), "float32"),
        mhc_base_grad_partial: T.Tensor((num_sms, mhc_mult), "float32"),
        token_block_size: T.int32,
    ):
        T.assume(token_block_size > 0)
        with T.Kernel(num_sms, threads=_BACKWARD_THREADS) as block:
            include("mixes.cuh")
            shared = T.alloc_shared((_BACKWARD_THREADS // _WARP * (mhc_mult + 1),), "float32")
            sum_of_grads = T.alloc_var("float32")
            sum_of_products = T.alloc_var("float32")
            grad = T.alloc_var("float32")
            values = T.alloc_local((_IN_FLIGHT,), "float32")
            grads = T.alloc_local((_IN_FLIGHT,), "float32")
            places = T.alloc_local((_IN_FLIGHT,), "int32")
            number = T.alloc_var("int32")
            thread = T.get_thread_binding()
            warp = thread // _WARP
            stream = thread % mhc_mult
            sum_of_grads = T.float32(0)
            sum_of_products = T.float32(0)
            # The block's tokens, one token block after the other
            for step in T.serial(
                T.ceildiv(T.ceildiv(T.ceildiv(num_tokens, token_block_size), num_sms) * token_block_size, tokens)
            ):
                for i in T.unroll(_IN_FLIGHT):
                    number = (step * _IN_FLIGHT + i) * (tokens // _IN_FLIGHT) + thread // mhc_mult
                    places[i] = (
                        T.truncdiv(number, token_block_size) * num_sms + block
                    ) * token_block_size + T.truncmod(number, token_block_size)
                    if places[i] < num_tokens:
                        values[i] = input_mix[places[i], stream]
                        grads[i] = output_mix_grad[places[i], stream]
                for i in T.unroll(_IN_FLIGHT):
                    if places[i] < num_tokens:
                        grad = T.call_extern(
                            "float32", "tk::sigmoid_grad", values[i], mhc_scale[0], mhc_base[stream], grads[i]
                        )
                        input_mix_grad[places[i], stream] = grad * mhc_scale[0]
                        sum_of_grads += grad
                        sum_of_products += grad * values[i]
            for i in T.unroll(5):
                if (1 << i) >= mhc_mult:
                    sum_of_grads += T.shfl_xor(sum_of_grads, 1 << i)
                sum_of_products += T.shfl_xor(sum_of_products, 1 << i)
            if thread % _WARP < mhc_mult:
                shared[warp * (mhc_mult + 1) + stream] = sum_of_grads
            if thread % _WARP == 0:
                shared[warp * (mhc_mult + 1) + mhc_mult] = sum_of_products
            T.sync_threads()
            if thread <= mhc_mult:
                sum_of_grads = shared[thread]
                for i in T.unroll(_BACKWARD_THREADS // _WARP - 1):
                    sum_of_grads += shared[(i + 1) * (mhc_mult + 1) + thread]
                if thread < mhc_mult:
                    mhc_base_grad_partial[block, thread] = sum_of_grads
                else:
                    mhc_scale_grad_partial[block, 0] = sum_of_grads

    return main
