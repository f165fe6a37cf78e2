"""All of a hyper-connection before a layer, for inference."""

from __future__ import annotations

import torch

from ....mhc.norm_fn import make_partials
from ....mhc.pre_big_fuse import make_mixes_and_input
from ._tokens import check_num_dims, merge_leading


def mhc_pre_big_fuse(
    residual: torch.Tensor,
    fn: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(post_mix, comb_mix, layer_input): what `mhc_pre_norm_fn`, `mhc_pre_split_mixes`, `sinkhorn_normalize` and
    `mhc_pre_apply_mix` give one after the other, bit for bit, without gradients.

    residual: (..., m, hidden) bf16, m 2, 4 or 8; made dense if it is not. fn: (m * (m + 2), m * hidden), mhc_scale:
    (3,), mhc_base: (m * (m + 2),) fp32. Returns fp32 (..., m, 1) and (..., m, m), bf16 (..., hidden). The channels are
    cut into as many parts as are fast, whatever n_splits says.
    """
    check_num_dims("modeling.mhc.mhc_pre_big_fuse", "residual", residual, 3)
    streams = merge_leading(residual, 2)
    with torch.no_grad():
        post_mix, comb_mix, layer_input = make_mixes_and_input(
            *make_partials(streams, fn),
            mhc_scale,
            mhc_base,
            streams,
            rms_eps,
            mhc_pre_eps,
            mhc_sinkhorn_eps,
            mhc_post_mult_value,
            sinkhorn_repeat=sinkhorn_repeat,
        )
    mult, hidden = streams.shape[1:]
    leading = residual.shape[:-2]
    return (
        post_mix.view(*leading, mult, 1),
        comb_mix.view(*leading, mult, mult),
        layer_input.view(*leading, hidden),
    )
