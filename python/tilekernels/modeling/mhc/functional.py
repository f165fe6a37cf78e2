"""A hyper-connection around a layer: `mhc_pre` before it, `mhc_post` behind it, `mhc_head` at the end of a model.

residual = expand_from_embedding(embedding)
for layer in layers:
    layer_input, mixes = mhc_pre(residual, fn, scale, base)
    residual = mhc_post(layer(layer_input), residual, *mixes)
output = mhc_head(residual, head_fn, head_scale, head_base)
"""

from __future__ import annotations

import torch

from ...errors import argument_error
from .ops import (
    expand_to_mhc,
    mhc_head_compute_mix,
    mhc_pre_apply_mix,
    mhc_pre_big_fuse,
    mhc_pre_norm_fn,
    mhc_pre_split_mixes,
    sinkhorn_normalize,
)
from .ops import mhc_post as mhc_post
from .ops.norm_fn import merge_norm_weight


def expand_from_embedding(x: torch.Tensor, mhc_mult: int = 4) -> torch.Tensor:
    """The residual streams of a model's first layer: (..., hidden) bf16 to (..., mhc_mult, hidden)."""
    return expand_to_mhc(x, mhc_mult)


def mhc_pre(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    post_mult_value: float = 1.0,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    sinkhorn_repeat: int = 10,
    n_splits: int = 16,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """(layer_input, (post_mix, comb_mix)) of a token's residual streams; the mixes are for `mhc_post`.

    residual: (..., m, hidden) bf16, m = mhc_mult 2, 4 or 8. fn: (m * (m + 2), m * hidden), scale: (3,), base:
    (m * (m + 2),), norm_weight: (m * hidden,), all fp32. Returns bf16 (..., hidden), fp32 (..., m, 1) and (..., m, m).
    Without gradients the steps run in two launches, to the same bits. n_splits is taken and not needed.

    The same residual should go to `mhc_post` and, before the backward pass is through, nowhere else: the three parts of
    its gradient share a tensor (`ops._residual_grad`).
    """
    if residual.ndim < 3 or residual.shape[-2] != mhc_mult:
        raise argument_error("modeling.mhc.mhc_pre", "residual", f"end in {mhc_mult} streams", tuple(residual.shape))
    if not torch.is_grad_enabled():
        merged = fn if norm_weight is None else merge_norm_weight(fn, norm_weight)
        epsilons = norm_eps, pre_eps, sinkhorn_eps
        post_mix, comb_mix, layer_input = mhc_pre_big_fuse(
            residual, merged, scale, base, *epsilons, post_mult_value, sinkhorn_repeat, n_splits
        )
        return layer_input, (post_mix, comb_mix)
    mixes = mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps, n_splits=n_splits)
    pre_mix, post_mix, comb_mix = mhc_pre_split_mixes(mixes, scale, base, mhc_mult, post_mult_value, pre_eps)
    comb_mix = sinkhorn_normalize(comb_mix, sinkhorn_repeat, sinkhorn_eps)
    return mhc_pre_apply_mix(residual, pre_mix), (post_mix, comb_mix)


def mhc_head(
    residual: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    mhc_mult: int = 4,
    pre_eps: float = 1e-6,
    n_splits: int = 16,
) -> torch.Tensor:
    """One stream of a token's residual streams: their sum, each times a mix of its own.

    residual: (..., m, hidden) bf16, m = mhc_mult 2, 4 or 8. fn: (m, m * hidden) fp32, or m * (m + 2) rows, of which the
    first m count. scale: one fp32 number, base: (m,), norm_weight: (m * hidden,) fp32. Returns (..., hidden) bf16.
    """
    if residual.ndim < 3 or residual.shape[-2] != mhc_mult:
        raise argument_error("modeling.mhc.mhc_head", "residual", f"end in {mhc_mult} streams", tuple(residual.shape))
    num_mixes = mhc_mult * (mhc_mult + 2)
    if fn.shape[0] != num_mixes:
        fn = torch.nn.functional.pad(fn, (0, 0, 0, num_mixes - fn.shape[0]))
    mixes = mhc_pre_norm_fn(residual, fn, norm_weight, norm_eps, n_splits=n_splits)[..., :mhc_mult]
    mix = mhc_head_compute_mix(mixes, scale.reshape(1), base, pre_eps)
    return mhc_pre_apply_mix(residual, mix.unsqueeze(-1))
