"""All that follows the product of pre-norm, at once: mixes, Sinkhorn and the layer's input. For inference."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..errors import check_int
from ..testing.cases import BenchCase
from ._checks import mult_of
from ._splits import choose_num_splits
from .pre_apply_mix import mhc_pre_apply_mix_fwd_ref
from .pre_split_mixes import mhc_pre_split_mixes_fwd_ref
from .reduce_partials_and_rmsnorm import check_num_splits, mhc_reduce_partials_and_rmsnorm_fwd_ref
from .sinkhorn import mhc_sinkhorn_fwd_ref

_NAME = "mhc.mhc_pre_big_fuse_fwd"


def mhc_pre_big_fuse_fwd(
    gemm_out_mul: torch.Tensor,
    gemm_out_sqrsum: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
    layer_input: torch.Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """Does at once, with the same bits, what four operators do one after the other.

    They are `mhc_reduce_partials_and_rmsnorm_fwd` with one group of mhc_mult * hidden channels,
    `mhc_pre_split_mixes_fwd`, `mhc_sinkhorn_fwd` and `mhc_pre_apply_mix_fwd`.

    gemm_out_mul: (n_splits, num_tokens, mhc_mult * (mhc_mult + 2)) and gemm_out_sqrsum: (n_splits, num_tokens), fp32,
    as `mhc_pre_norm_fn_partials` writes them. mhc_scale: (3,) fp32. mhc_base: (mhc_mult * (mhc_mult + 2),) fp32.
    residual: (num_tokens, mhc_mult, hidden) bf16, mhc_mult 2, 4 or 8. Written: post_mix (num_tokens, mhc_mult) fp32,
    comb_mix (num_tokens, mhc_mult * mhc_mult) fp32, layer_input (num_tokens, hidden) bf16. All dense.
    """
    check_num_splits(_NAME, "gemm_out_mul", gemm_out_mul, n_splits)
    check_int(_NAME, "sinkhorn_repeat", sinkhorn_repeat, 1)
    mult = mult_of(_NAME, "residual", residual, torch.bfloat16, 3, 1)
    _mhc_pre_big_fuse_fwd(
        gemm_out_mul,
        gemm_out_sqrsum,
        mhc_scale,
        mhc_base,
        residual,
        post_mix,
        comb_mix,
        layer_input,
        rms_eps,
        mhc_pre_eps,
        mhc_sinkhorn_eps,
        mhc_post_mult_value,
        sinkhorn_repeat,
        mult,
    )


def make_mixes_and_input(
    gemm_out_mul: torch.Tensor,
    gemm_out_sqrsum: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    residual: torch.Tensor,
    *scalars: float,
    sinkhorn_repeat: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `mhc_pre_big_fuse_fwd` writes: (post_mix, comb_mix, layer_input). scalars: its four of type float."""
    check_int(_NAME, "sinkhorn_repeat", sinkhorn_repeat, 1)
    mult = mult_of(_NAME, "residual", residual, torch.bfloat16, 3, 1)
    inputs = gemm_out_mul, gemm_out_sqrsum, mhc_scale, mhc_base, residual
    num_tokens, hidden = size_of(4, 0), size_of(4, 2)
    outputs = (
        (torch.float32, 0, num_tokens, mult),
        (torch.float32, 0, num_tokens, mult * mult),
        (torch.bfloat16, 0, num_tokens, hidden),
    )
    post_mix, comb_mix, layer_input = _mhc_pre_big_fuse_fwd(*inputs, *outputs, *scalars, sinkhorn_repeat, mult)
    return post_mix, comb_mix, layer_input


def mhc_pre_big_fuse_fwd_ref(
    gemm_out_mul: torch.Tensor,
    gemm_out_sqrsum: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    residual: torch.Tensor,
    post_mix: torch.Tensor,
    comb_mix: torch.Tensor,
    layer_input: torch.Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """`mhc_pre_big_fuse_fwd` in plain torch: the references of the four operators."""
    num_tokens, streams, hidden = residual.shape
    num_mixes = streams * (streams + 2)
    out_mul, sqrsum = gemm_out_mul.new_empty((num_tokens, 1, num_mixes)), gemm_out_mul.new_empty((num_tokens, 1))
    mixes = gemm_out_mul.new_empty((num_tokens, num_mixes))
    parts = gemm_out_mul.unsqueeze(2), gemm_out_sqrsum.unsqueeze(2)
    mhc_reduce_partials_and_rmsnorm_fwd_ref(*parts, out_mul, sqrsum, mixes, streams * hidden, rms_eps)
    pre_mix = torch.empty_like(post_mix)
    constants = mhc_post_mult_value, mhc_pre_eps
    mhc_pre_split_mixes_fwd_ref(mixes, mhc_scale, mhc_base, pre_mix, post_mix, comb_mix, *constants)
    matrices = comb_mix.view(num_tokens, streams, streams)
    mhc_sinkhorn_fwd_ref(matrices, matrices, sinkhorn_repeat, mhc_sinkhorn_eps)
    mhc_pre_apply_mix_fwd_ref(residual, pre_mix, layer_input)


def _mhc_pre_big_fuse_fwd_cpu(*args: Any) -> None:
    mhc_pre_big_fuse_fwd_ref(*args[:-1])


_mhc_pre_big_fuse_fwd = kernel(_NAME, cpu=_mhc_pre_big_fuse_fwd_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens, then the sizes of models."""
    sizes = [(16, 4, 1280), *((num_tokens, 4, hidden) for hidden in (2560, 7168) for num_tokens in (4096, 8192))]
    return [_case(*size) for size in sizes]


def _case(num_tokens: int, streams: int, hidden: int) -> BenchCase:
    num_mixes = streams * (streams + 2)
    n_splits = choose_num_splits(num_tokens, streams * hidden)

    def make(device: Any) -> dict[str, Any]:
        return {
            "gemm_out_mul": torch.randn((n_splits, num_tokens, num_mixes), device=device),
            "gemm_out_sqrsum": torch.rand((n_splits, num_tokens), device=device) * hidden,
            "mhc_scale": torch.rand(3, device=device),
            "mhc_base": torch.randn(num_mixes, device=device),
            "residual": torch.randn((num_tokens, streams, hidden), device=device).bfloat16(),
            "post_mix": torch.zeros((num_tokens, streams), device=device),
            "comb_mix": torch.zeros((num_tokens, streams * streams), device=device),
            "layer_input": torch.zeros((num_tokens, hidden), dtype=torch.bfloat16, device=device),
            "rms_eps": 1e-6,
            "mhc_pre_eps": 1e-6,
            "mhc_sinkhorn_eps": 1e-6,
            "mhc_post_mult_value": 1.0,
            "sinkhorn_repeat": 10,
            "n_splits": n_splits,
        }

    params = {"num_tokens": num_tokens, "mhc_mult": streams, "hidden": hidden, "n_splits": n_splits}
    words = (num_mixes + 1) * n_splits + streams * (streams + 1)
    num_bytes = num_tokens * (4 * words + 2 * hidden * (streams + 1))
    # The last bit of torch's rsqrt may differ, and then round layer_input the other way
    return BenchCase(_NAME, params, make, num_bytes, max_diff=1e-8)
