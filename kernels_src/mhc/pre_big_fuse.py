"""What follows the product of pre-norm at once: parts to mixes, Sinkhorn, and the layer's input. For inference.

A block takes a few tokens; the device code is in big_fuse.cuh. Every result has the bits of the single kernels' chain.
"""

import tilelang.language as T

from ..common.device import aligned, include
from ..declare import forms, grid, kernel

_THREADS = 128
_WARP = 32  # forms the mixes
# Of the ring in shared memory by number of streams. More cost more than they bring: fewer blocks share an SM
_STAGES = {2: 4, 4: 4, 8: 2}
_BLOCKS = {2: 6, 4: 6, 8: 5}  # that share an SM
_MAX_TOKENS = 8  # of a block


def tokens_of_block(num_tokens, hidden):
    """A block's tokens: their mixes are formed at once, behind the first of their streams.

    Of an H200's 792 places for blocks as many as can are filled at first, and later by ever new blocks.
    """
    channels = T.if_then_else(num_tokens > 6144, 14336, 20480)
    return T.max(T.min(T.min(T.truncdiv(num_tokens, 512), T.truncdiv(channels, hidden)), _MAX_TOKENS), 1)


@kernel(
    axes=grid(mhc_mult=(2, 4, 8), form=forms("aligned", "general")),
    pass_configs={"tl.disable_safe_memory_legalize": True},
)
def mhc_pre_big_fuse_fwd(mhc_mult, form):
    """Make mixes of the parts of pre-norm's product; write post_mix, comb_mix after Sinkhorn, and the mixed streams."""
    num_tokens, hidden, n_splits = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("n_splits")
    num_columns = mhc_mult * (mhc_mult + 2)
    count = 8 if form == "aligned" else 1
    stages = _STAGES[mhc_mult]
    helper = f"tk::BigFuse<{mhc_mult}, {count}, {_THREADS}, {stages}, {_MAX_TOKENS}>::run"
    ring_bytes = stages * mhc_mult * _THREADS * 16 if form == "aligned" else 16

    @T.prim_func
    def main(
        gemm_out_mul: T.Tensor((n_splits, num_tokens, num_columns), "float32"),
        gemm_out_sqrsum: T.Tensor((n_splits, num_tokens), "float32"),
        mhc_scale: T.Tensor((3,), "float32"),
        mhc_base: T.Tensor((num_columns,), "float32"),
        residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16"),
        post_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        comb_mix: T.Tensor((num_tokens, mhc_mult * mhc_mult), "float32"),
        layer_input: T.Tensor((num_tokens, hidden), "bfloat16"),
        rms_eps: T.float32,
        mhc_pre_eps: T.float32,
        mhc_sinkhorn_eps: T.float32,
        mhc_post_mult_value: T.float32,
        sinkhorn_repeat: T.int32,
    ):
        if form == "aligned":
            T.assume(hidden % 8 == 0)
        with T.Kernel(T.ceildiv(num_tokens, tokens_of_block(num_tokens, hidden)), threads=_THREADS + _WARP) as block:
            include("aligned.cuh", "big_fuse.cuh")
            T.annotate_min_blocks_per_sm(_BLOCKS[mhc_mult])
            ring = T.alloc_shared((ring_bytes,), "uint8")
            numbers = T.alloc_shared((_MAX_TOKENS * (num_columns + 1 + mhc_mult),), "float32")
            T.call_extern(
                "handle",
                helper,
                T.access_ptr(gemm_out_mul[0, 0, 0], "r"),
                T.access_ptr(gemm_out_sqrsum[0, 0], "r"),
                T.access_ptr(mhc_scale[0], "r"),
                T.access_ptr(mhc_base[0], "r"),
                aligned(2 * count, T.access_ptr(residual[0, 0, 0], "r")),
                T.access_ptr(post_mix[0, 0], "w"),
                T.access_ptr(comb_mix[0, 0], "w"),
                aligned(2 * count, T.access_ptr(layer_input[0, 0], "w")),
                T.address_of(ring[0]),
                T.address_of(numbers[0]),
                # The last tokens first: of a residual that was just read, these are still in L2
                T.ceildiv(num_tokens, tokens_of_block(num_tokens, hidden)) - 1 - block,
                tokens_of_block(num_tokens, hidden),
                num_tokens,
                hidden,
                rms_eps,
                mhc_pre_eps,
                mhc_sinkhorn_eps,
                mhc_post_mult_value,
                sinkhorn_repeat,
                n_splits,
            )

    return main
