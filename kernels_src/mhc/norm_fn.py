"""The product of pre-norm: residual x fn^T in tf32 and the sums of squares, in parts over the channels.

aligned: a block takes 256 tokens (128 with many columns) and the channels of one part, on tensor cores. general: a warp
takes four tokens. The device code is in norm_partials.cuh.
"""

import tilelang.language as T

from ..common.device import aligned, include
from ..declare import arch, forms, grid, kernel

_WARP = 32
_DEPTH = 64  # channels of a stage of the ring in shared memory
_MAX_STAGES = 5
_SHARED_LEFT = 1024  # bytes that a block does not use

# general
_THREADS = 128
_TOKENS = 4


def _num_rows(num_columns):
    """Tokens of a block: warps have 32 each."""
    return 256 if num_columns <= 24 else 128


def _ring(num_columns):
    """(stages, bytes) of the ring."""
    stage = _DEPTH * (2 * _num_rows(num_columns) + 4 * num_columns)
    stages = min(_MAX_STAGES, (arch().smem_per_block - _SHARED_LEFT) // stage)
    return stages, stages * stage


@T.macro
def _multiply(residual, fn, out_mul, sqrsum, block, num_tokens, num_channels, n_splits, num_columns, ring):
    include("aligned.cuh", "norm_partials.cuh")
    shared = T.alloc_shared((ring[1],), "uint8")
    T.call_extern(
        "handle",
        f"tk::NormPartials<{num_columns // 8}, {_num_rows(num_columns) // _WARP}, {_DEPTH}, {ring[0]}>::run",
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
    64 channels in the aligned form, one in the general.
    """
    num_tokens, mhc_mult, hidden = T.dynamic("num_tokens"), T.dynamic("mhc_mult"), T.dynamic("hidden")
    n_splits = T.dynamic("n_splits")
    num_rows = _num_rows(num_columns) if form == "aligned" else _THREADS // _WARP * _TOKENS
    threads = num_rows if form == "aligned" else _THREADS
    ring = _ring(num_columns)

    @T.prim_func
    def main(
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        fn: T.Tensor((num_columns, mhc_mult * hidden), "float32"),
        out_mul_splitted: T.Tensor((n_splits, num_tokens, num_columns), "float32"),
        sqrsum_splitted: T.Tensor((n_splits, num_tokens), "float32"),
    ):
        if form == "aligned":
            T.assume(mhc_mult * hidden % 8 == 0)
        with T.Kernel(T.ceildiv(num_tokens, num_rows) * n_splits, threads=threads) as block:
            if form == "aligned":
                _multiply(
                    residual, fn, out_mul_splitted, sqrsum_splitted, block, num_tokens, mhc_mult * hidden, n_splits,
                    num_columns, ring,
                )  # fmt: skip
            else:
                _multiply_general(
                    residual, fn, out_mul_splitted, sqrsum_splitted, block, num_tokens, mhc_mult * hidden, n_splits,
                    num_columns,
                )  # fmt: skip

    return main
