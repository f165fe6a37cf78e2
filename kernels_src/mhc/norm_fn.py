"""The product of pre-norm: residual x fn^T in tf32 and the sums of squares, in parts over the channels; gradients.

aligned, on tensor cores: forward a block takes 128 tokens and the channels of one part, backward 256 channels (64 with
many columns) and the tokens of one part. general: a warp takes four tokens, a thread one channel. The device code is in
norm_partials.cuh and norm_backward.cuh.
"""

import tilelang.language as T

from ..common.device import aligned, include
from ..declare import forms, grid, kernel

_WARP = 32
_WARPS = 4
_ROW_TILES = 2  # of 16 tokens for each warp
_ROWS = _WARPS * _ROW_TILES * 16
_STAGES = 2  # of the ring in shared memory

# general
_THREADS = 128
_TOKENS = 4


def _depth(num_columns):
    """Channels of a stage: 90 KB of ring at most, so that two blocks share an SM."""
    return 128 if num_columns <= 24 else 64


@T.macro
def _multiply(residual, fn, out_mul, sqrsum, block, num_tokens, num_channels, n_splits, num_columns):
    include("aligned.cuh", "norm_partials.cuh")
    T.annotate_min_blocks_per_sm(2)
    depth = _depth(num_columns)
    shared = T.alloc_shared((_STAGES * depth * (2 * _ROWS + 4 * num_columns),), "uint8")
    T.call_extern(
        "handle",
        f"tk::NormPartials<{num_columns // 8}, {_ROW_TILES}, {_WARPS}, {depth}, {_STAGES}>::run",
        aligned(16, T.access_ptr(residual[0, 0, 0], "r")),
        aligned(16, T.access_ptr(fn[0, 0], "r")),
        aligned(8, T.access_ptr(out_mul[0, 0, 0], "w")),
        T.access_ptr(sqrsum[0, 0], "w"),
        T.address_of(shared[0]),
        num_tokens,
        num_channels,
        T.truncdiv(block, n_splits),
        T.truncmod(block, n_splits),
        n_splits,
    )


@T.macro
def _multiply_general(residual, fn, out_mul, sqrsum, block, num_tokens, num_channels, n_splits, num_columns):
    include("norm_partials.cuh")
    warp = T.cast(T.truncdiv(block, n_splits), "int64") * (_THREADS // _WARP) + T.get_thread_binding() // _WARP
    T.call_extern(
        "handle",
        f"tk::NormPartialsGeneral<{num_columns}, {_TOKENS}>::run",
        T.access_ptr(residual[0, 0, 0], "r"),
        T.access_ptr(fn[0, 0], "r"),
        T.access_ptr(out_mul[0, 0, 0], "w"),
        T.access_ptr(sqrsum[0, 0], "w"),
        num_tokens,
        num_channels,
        warp * _TOKENS,
        T.truncmod(block, n_splits),
        n_splits,
    )


@kernel(
    axes=grid(num_columns=(8, 24, 80), form=forms("aligned", "general")),
    pass_configs={"tl.disable_safe_memory_legalize": True},
)
def mhc_pre_norm_fn_partials(num_columns, form):
    """Write residual x fn^T and each token's sum of squares, one part of the channels after the other.

    fn is rounded to tf32, halves away from zero; sums are fp32. The parts are as equal as their unit allows, which is
    128 channels in the aligned form (64 with many columns), one in the general.
    """
    num_tokens, mhc_mult, hidden = T.dynamic("num_tokens"), T.dynamic("mhc_mult"), T.dynamic("hidden")
    n_splits = T.dynamic("n_splits")
    num_rows = _ROWS if form == "aligned" else _THREADS // _WARP * _TOKENS

    @T.prim_func
    def main(
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        fn: T.Tensor((num_columns, mhc_mult * hidden), "float32"),
        out_mul_splitted: T.Tensor((n_splits, num_tokens, num_columns), "float32"),
        sqrsum_splitted: T.Tensor((n_splits, num_tokens), "float32"),
    ):
        if form == "aligned":
            T.assume(mhc_mult * hidden % 8 == 0)
        with T.Kernel(T.ceildiv(num_tokens, num_rows) * n_splits, threads=_THREADS) as block:
            if form == "aligned":
                _multiply(
                    residual, fn, out_mul_splitted, sqrsum_splitted, block, num_tokens, mhc_mult * hidden, n_splits,
                    num_columns,
                )  # fmt: skip
            else:
                _multiply_general(
                    residual, fn, out_mul_splitted, sqrsum_splitted, block, num_tokens, mhc_mult * hidden, n_splits,
                    num_columns,
                )  # fmt: skip

    return main


# ---- backward ------------------------------------------------------------------------------------------------------

_BACKWARD_WARPS = 4
# Of the ring in shared memory. On an H200 each one more is 3 % slower: blocks drift apart
_BACKWARD_STAGES = 3


def _backward_channels(num_columns, form):
    """(pairs of a lane's channels, channels of a block)"""
    pairs = 4 if num_columns <= 24 else 1
    return (pairs, _BACKWARD_WARPS * 16 * pairs) if form == "aligned" else (1, _THREADS)


def _backward_ring_bytes(num_columns, pairs):
    """Of eight tokens: residual and its gradient, out_mul_grad with four columns more, sqrsum_grad."""
    return _BACKWARD_WARPS * _BACKWARD_STAGES * (2 * 2 * _WARP * 4 * pairs + 8 * 4 * (num_columns + 5))


@T.macro
def _multiply_backward(tensors, block, num_tokens, num_channels, num_parts, num_columns, pairs, channels):
    include("aligned.cuh", "norm_backward.cuh")
    T.annotate_min_blocks_per_sm(3)  # a few registers less than the compiler would take
    shared = T.alloc_shared((_backward_ring_bytes(num_columns, pairs),), "uint8")
    out_mul_grad, sqrsum_grad, residual, fn, residual_grad, workspace = tensors
    T.call_extern(
        "handle",
        f"tk::NormBackward<{num_columns // 8}, {pairs}, {_BACKWARD_WARPS}, {_BACKWARD_STAGES}>::run",
        aligned(16, T.access_ptr(out_mul_grad[0, 0], "r")),
        T.access_ptr(sqrsum_grad[0], "r"),
        aligned(16, T.access_ptr(residual[0, 0, 0], "r")),
        aligned(16, T.access_ptr(fn[0, 0], "r")),
        aligned(16, T.access_ptr(residual_grad[0, 0, 0], "rw")),
        aligned(16, T.access_ptr(workspace[0, 0, 0], "w")),
        T.address_of(shared[0]),
        num_tokens,
        num_channels,
        # Blocks that run side by side take the same tokens
        T.truncmod(block, T.ceildiv(num_channels, channels)),
        T.truncdiv(block, T.ceildiv(num_channels, channels)),
        num_parts,
    )


@T.macro
def _multiply_backward_general(tensors, block, num_tokens, num_channels, num_parts, num_columns):
    include("aligned.cuh", "norm_backward.cuh")
    out_mul_grad, sqrsum_grad, residual, fn, residual_grad, workspace = tensors
    T.call_extern(
        "handle",
        f"tk::NormBackwardGeneral<{num_columns}>::run",
        T.access_ptr(out_mul_grad[0, 0], "r"),
        T.access_ptr(sqrsum_grad[0], "r"),
        T.access_ptr(residual[0, 0, 0], "r"),
        T.access_ptr(fn[0, 0], "r"),
        T.access_ptr(residual_grad[0, 0, 0], "rw"),
        T.access_ptr(workspace[0, 0, 0], "w"),
        num_tokens,
        num_channels,
        T.truncdiv(block, num_parts) * _THREADS + T.get_thread_binding(),
        T.truncmod(block, num_parts),
        num_parts,
    )


@kernel(
    axes=grid(num_columns=(8, 24, 80), form=forms("aligned", "general")),
    pass_configs={"tl.disable_safe_memory_legalize": True},
)
def mhc_pre_norm_fn_partials_bwd(num_columns, form):
    """Add the gradient of the product and of the squares to residual_grad, and write that of fn.

    With d = out_mul_grad: residual_grad += d x fn + 2 * residual * sqrsum_grad, fn_grad = d^T x residual, d and fn
    rounded to tf32. The second sum is taken in parts over the tokens, as many as workspace has, then over the parts.
    """
    num_tokens, mhc_mult, hidden = T.dynamic("num_tokens"), T.dynamic("mhc_mult"), T.dynamic("hidden")
    num_parts = T.dynamic("num_parts")
    pairs, channels = _backward_channels(num_columns, form)
    numbers = 4 if form == "aligned" else 1  # of a thread that adds up the parts

    @T.prim_func
    def main(
        out_mul_grad: T.Tensor((num_tokens, num_columns), "float32"),
        sqrsum_grad: T.Tensor((num_tokens,), "float32"),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        fn: T.Tensor((num_columns, mhc_mult * hidden), "float32"),
        residual_grad: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        fn_grad: T.Tensor((num_columns, mhc_mult * hidden), "float32"),
        workspace: T.Tensor((num_parts, num_columns, mhc_mult * hidden), "float32"),
    ):
        T.assume(num_parts > 0)
        if form == "aligned":
            T.assume(mhc_mult * hidden % 8 == 0)
        with T.Kernel(T.ceildiv(mhc_mult * hidden, channels) * num_parts, threads=_THREADS) as block:
            if form == "aligned":
                _multiply_backward(
                    (out_mul_grad, sqrsum_grad, residual, fn, residual_grad, workspace),
                    block, num_tokens, mhc_mult * hidden, num_parts, num_columns, pairs, channels,
                )  # fmt: skip
            else:
                _multiply_backward_general(
                    (out_mul_grad, sqrsum_grad, residual, fn, residual_grad, workspace),
                    block, num_tokens, mhc_mult * hidden, num_parts, num_columns,
                )  # fmt: skip
        with T.Kernel(T.ceildiv(num_columns * mhc_mult * hidden, _THREADS * numbers), threads=_THREADS) as block:
            T.call_extern(
                "handle",
                f"tk::add_up_parts<{numbers}>",
                aligned(4 * numbers, T.access_ptr(workspace[0, 0, 0], "r")),
                aligned(4 * numbers, T.access_ptr(fn_grad[0, 0], "w")),
                T.cast(num_columns * mhc_mult * hidden, "int64"),
                (T.cast(block, "int64") * _THREADS + T.get_thread_binding()) * numbers,
                num_parts,
            )

    return main
