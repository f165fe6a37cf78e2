"""Weights of a token's experts over their sum, and the sum.

A thread takes a token where its weights are few and load in fours or pairs: no exchange between lanes, and an eighth of
the instructions. Otherwise the lanes of a token are the power of two that holds its weights. Two orders of the sum, for
the two generations of the gate: butterfly adds at distances 16, 8, 4, 2, 1 and 1e-20 last; sequential starts at 1e-20
and goes from left to right, for any number of weights.
"""

import tilelang.language as T

from ..common.device import include
from ..common.selecting import PASS_CONFIGS, WARP
from ..declare import forms, grid, kernel

_THREADS = 128
# form -> weights that a thread loads at once; of a token it takes up to _MOST
_FORMS = {"fours": 4, "pairs": 2, "general": 1}
_MOST = 16
_TOKENS = 64  # threads of a block that take a token each


def _sum(x, y):
    return T.call_extern("float32", "tk::sum", x, y)


def _shift(num_topk):
    """The lanes of a token are 1 << this, the smallest power of two that is large enough; a division by it would be a
    division by a variable."""
    return T.if_then_else(num_topk <= 4, 2, T.if_then_else(num_topk <= 8, 3, T.if_then_else(num_topk <= 16, 4, 5)))


@kernel(axes=grid(order=("butterfly", "sequential"), form=forms(*_FORMS)), pass_configs=PASS_CONFIGS)
def normalize_weight(order, form):
    """Write each token's sum of weights plus 1e-20 to denominator, and the weights over it to normalized."""
    if form == "general":
        return _by_lanes(order)
    return _by_threads(order, _FORMS[form])


def _by_threads(order, vector):
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def main(
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        denominator: T.Tensor((num_tokens,), "float32"),
        normalized: T.Tensor((num_tokens, num_topk), "float32"),
    ):
        T.assume(num_topk >= 1)
        T.assume(num_topk <= _MOST)
        T.assume(num_topk % vector == 0)
        with T.Kernel(T.ceildiv(num_tokens, _TOKENS), threads=_TOKENS) as block:
            include("scoring.cuh")
            weights = T.alloc_local((_MOST,), "float32")
            sums = T.alloc_local((_MOST,), "float32")
            total = T.alloc_var("float32")
            token = block * _TOKENS + T.get_thread_binding()
            if token < num_tokens:
                # What is not there is zero, which changes no sum
                for i in T.unroll(_MOST):
                    weights[i] = T.float32(0)
                for chunk in T.unroll(_MOST // vector):
                    if chunk * vector < num_topk:
                        for i in T.vectorized(vector):
                            weights[chunk * vector + i] = topk_weights[token, chunk * vector + i]
                if order == "butterfly":
                    for i in T.unroll(_MOST):
                        sums[i] = weights[i]
                    for i in T.unroll(8):
                        sums[i] = _sum(sums[i], sums[i + 8])
                    for i in T.unroll(4):
                        sums[i] = _sum(sums[i], sums[i + 4])
                    for i in T.unroll(2):
                        sums[i] = _sum(sums[i], sums[i + 2])
                    total = _sum(_sum(sums[0], sums[1]), T.float32(1e-20))
                else:
                    total = T.float32(1e-20)
                    for i in T.unroll(_MOST):
                        total = _sum(total, weights[i])
                denominator[token] = total
                for chunk in T.unroll(_MOST // vector):
                    if chunk * vector < num_topk:
                        for i in T.unroll(vector):
                            weights[chunk * vector + i] = T.call_extern(
                                "float32", "tk::quotient", weights[chunk * vector + i], total
                            )
                        for i in T.vectorized(vector):
                            normalized[token, chunk * vector + i] = weights[chunk * vector + i]

    return main


def _by_lanes(order):
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def main(
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        denominator: T.Tensor((num_tokens,), "float32"),
        normalized: T.Tensor((num_tokens, num_topk), "float32"),
    ):
        T.assume(num_topk >= 1)
        if order == "butterfly":
            T.assume(num_topk <= WARP)
        with T.Kernel(T.ceildiv(num_tokens, T.shift_right(_THREADS, _shift(num_topk))), threads=_THREADS) as block:
            include("scoring.cuh")
            shift = T.alloc_var("int32")
            width = T.alloc_var("int32")
            weight = T.alloc_var("float32")
            total = T.alloc_var("float32")
            token = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            shift = _shift(num_topk)
            width = T.shift_left(1, shift)
            token = block * T.shift_right(_THREADS, shift) + T.shift_right(T.get_thread_binding(), shift)
            slot = T.bitwise_and(T.get_thread_binding(), width - 1)
            weight = T.float32(0)
            if token < num_tokens and slot < num_topk:
                weight = topk_weights[token, slot]
            if order == "butterfly":
                total = weight
                for i in T.unroll(5):
                    if (16 >> i) < width:
                        total = _sum(total, T.shfl_xor(total, 16 >> i))
                total = _sum(total, T.float32(1e-20))
            else:
                total = T.float32(1e-20)
                for step in T.serial(T.shift_right(num_topk + width - 1, shift)):
                    if step > 0:
                        weight = T.float32(0)
                        if token < num_tokens and step * width + slot < num_topk:
                            weight = topk_weights[token, step * width + slot]
                    for j in T.serial(T.min(width, num_topk - step * width)):
                        # The lanes of a token start at a multiple of their number
                        total = _sum(total, T.shfl_sync(weight, T.get_thread_binding() % WARP - slot + j))
            if token < num_tokens:
                if slot == 0:
                    denominator[token] = total
                for step in T.serial(T.shift_right(num_topk + width - 1, shift)):
                    if step * width + slot < num_topk:
                        if num_topk > width:
                            weight = topk_weights[token, step * width + slot]
                        normalized[token, step * width + slot] = T.call_extern("float32", "tk::quotient", weight, total)

    return main
