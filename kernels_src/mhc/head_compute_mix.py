"""The mixes of the last residual streams, a sigmoid each, and their gradients. A thread keeps to one stream."""

import tilelang.language as T

from ..common.device import include
from ..declare import grid, kernel
from ._streams import MULTS, PASS_CONFIGS

_THREADS = 128
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
    tokens = _THREADS // mhc_mult
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
        with T.Kernel(num_sms, threads=_THREADS) as block:
            include("mixes.cuh")
            shared = T.alloc_shared((_THREADS // _WARP * (mhc_mult + 1),), "float32")
            sum_of_grads = T.alloc_var("float32")
            sum_of_products = T.alloc_var("float32")
            grad = T.alloc_var("float32")
            value = T.alloc_var("float32")
            thread = T.get_thread_binding()
            warp = thread // _WARP
            stream = thread % mhc_mult
            sum_of_grads = T.float32(0)
            sum_of_products = T.float32(0)
            for step in T.serial(T.ceildiv(T.ceildiv(num_tokens, token_block_size), num_sms)):
                for i in T.serial(T.ceildiv(token_block_size, tokens)):
                    place = i * tokens + thread // mhc_mult
                    token = (step * num_sms + block) * token_block_size + place
                    if place < token_block_size and token < num_tokens:
                        value = input_mix[token, stream]
                        grad = T.call_extern(
                            "float32",
                            "tk::sigmoid_grad",
                            value,
                            mhc_scale[0],
                            mhc_base[stream],
                            output_mix_grad[token, stream],
                        )
                        input_mix_grad[token, stream] = grad * mhc_scale[0]
                        sum_of_grads += grad
                        sum_of_products += grad * value
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
                for i in T.unroll(_THREADS // _WARP - 1):
                    sum_of_grads += shared[(i + 1) * (mhc_mult + 1) + thread]
                if thread < mhc_mult:
                    mhc_base_grad_partial[block, thread] = sum_of_grads
                else:
                    mhc_scale_grad_partial[block, 0] = sum_of_grads

    return main
