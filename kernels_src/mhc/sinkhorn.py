"""Sinkhorn's normalisation of a token's small matrix of mixes, and its gradient. A lane holds a row of the matrix."""

import tilelang.language as T

from ..common.device import include
from ..declare import forms, grid, kernel
from ._streams import MULTS, PASS_CONFIGS

_THREADS = 128
# Backward every thread keeps 2 * repeat - 1 divisors in shared memory: 64 threads have room for 254 repeats on any GPU
_BACKWARD_THREADS = 64
_MAX_BACKWARD_REPEAT = 128


@T.macro
def _load_row(source, token, row, mhc_mult, numbers, num_tokens, target):
    """Lanes beyond the tokens take part with a row of zeros."""
    for i in T.unroll(mhc_mult):
        target[i] = T.float32(0)
    if token < num_tokens:
        for i in T.unroll(mhc_mult // numbers):
            for j in T.vectorized(numbers):
                target[i * numbers + j] = source[token, row, i * numbers + j]


@T.macro
def _store_row(source, target, token, row, mhc_mult, numbers, num_tokens):
    if token < num_tokens:
        for i in T.unroll(mhc_mult // numbers):
            for j in T.vectorized(numbers):
                target[token, row, i * numbers + j] = source[i * numbers + j]


@kernel(axes=grid(mhc_mult=MULTS, form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def mhc_sinkhorn_fwd(mhc_mult, form):
    """Write softmax of each row plus eps, each column over its sum + eps, then repeat - 1 times rows and columns."""
    numbers = min(mhc_mult, 4) if form == "aligned" else 1
    tokens = _THREADS // mhc_mult
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def main(
        comb_res_mix: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        comb_res_mix_out: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        repeat: T.int32,
        eps: T.float32,
    ):
        T.assume(repeat >= 1)
        with T.Kernel(T.ceildiv(num_tokens, tokens), threads=_THREADS) as block:
            include("mixes.cuh")
            values = T.alloc_local((mhc_mult,), "float32")
            token = block * tokens + T.get_thread_binding() // mhc_mult
            row = T.get_thread_binding() % mhc_mult
            _load_row(comb_res_mix, token, row, mhc_mult, numbers, num_tokens, values)
            T.call_extern("handle", f"tk::sinkhorn<{mhc_mult}>", T.address_of(values[0]), repeat, eps)
            _store_row(values, comb_res_mix_out, token, row, mhc_mult, numbers, num_tokens)

    return main


@kernel(axes=grid(mhc_mult=MULTS, form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def mhc_sinkhorn_bwd(mhc_mult, form):
    """Write to grad_input the gradient of mhc_sinkhorn_fwd at its input x."""
    numbers = min(mhc_mult, 4) if form == "aligned" else 1
    tokens = _BACKWARD_THREADS // mhc_mult
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def main(
        grad_output: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        x: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        grad_input: T.Tensor((num_tokens, mhc_mult, mhc_mult), "float32"),
        repeat: T.int32,
        eps: T.float32,
    ):
        T.assume(repeat >= 1)
        T.assume(repeat <= _MAX_BACKWARD_REPEAT)
        with T.Kernel(T.ceildiv(num_tokens, tokens), threads=_BACKWARD_THREADS) as block:
            include("mixes.cuh")
            values = T.alloc_local((mhc_mult,), "float32")
            grads = T.alloc_local((mhc_mult,), "float32")
            divisors = T.alloc_shared((2 * repeat * _BACKWARD_THREADS,), "float32")
            token = block * tokens + T.get_thread_binding() // mhc_mult
            row = T.get_thread_binding() % mhc_mult
            _load_row(x, token, row, mhc_mult, numbers, num_tokens, values)
            _load_row(grad_output, token, row, mhc_mult, numbers, num_tokens, grads)
            T.call_extern(
                "handle",
                f"tk::sinkhorn_backward<{mhc_mult}>",
                T.address_of(values[0]),
                T.address_of(grads[0]),
                T.address_of(divisors[0]),
                T.get_thread_binding(),
                _BACKWARD_THREADS,
                repeat,
                eps,
            )
            _store_row(grads, grad_input, token, row, mhc_mult, numbers, num_tokens)

    return main
