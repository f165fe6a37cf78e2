"""The steps of a hyper-connection in plain torch, differentiable by autograd: what the operators are compared with."""

from __future__ import annotations

import torch

__all__ = [
    "expand_to_mhc_ref",
    "mhc_head_compute_mix_ref",
    "mhc_post_ref",
    "mhc_pre_apply_mix_ref",
    "mhc_pre_norm_fn_ref",
    "mhc_pre_split_mixes_ref",
    "sinkhorn_normalize_ref",
]


def expand_to_mhc_ref(hidden: torch.Tensor, mhc_mult: int) -> torch.Tensor:
    """(..., hidden) to mhc_mult copies (..., mhc_mult, hidden)."""
    return hidden.unsqueeze(-2).expand(*hidden.shape[:-1], mhc_mult, hidden.shape[-1]).contiguous()


def mhc_pre_norm_fn_ref(
    residual: torch.Tensor, mhc_fn: torch.Tensor, mhc_norm_weight: torch.Tensor | None, mhc_norm_eps: float
) -> torch.Tensor:
    """(..., m, hidden) and (mixes, m * hidden) to (..., mixes), in full fp32 where torch's product is."""
    x = residual.flatten(-2).to(mhc_fn.dtype)
    fn = mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight
    return (x @ fn.t()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + mhc_norm_eps)


def mhc_pre_split_mixes_ref(
    input_mixes: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(..., m * (m + 2)) to (..., m, 1), (..., m, 1) and (..., m, m)."""
    sizes = [mhc_mult, mhc_mult, mhc_mult * mhc_mult]
    parts = zip(input_mixes.split(sizes, -1), mhc_base.split(sizes), mhc_scale.unbind(), strict=True)
    pre, post, comb = (part * scale + base for part, base, scale in parts)
    return (
        (pre.sigmoid() + mhc_pre_eps).unsqueeze(-1),
        (post.sigmoid() * mhc_post_mult_value).unsqueeze(-1),
        comb.unflatten(-1, (mhc_mult, mhc_mult)),
    )


def sinkhorn_normalize_ref(x: torch.Tensor, repeat: int = 10, eps: float = 1e-6) -> torch.Tensor:
    """(..., m, m) to the same."""
    matrix = x.softmax(-1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def mhc_pre_apply_mix_ref(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """(..., m, hidden) and (..., m, 1) to (..., hidden), rounded to x's dtype."""
    return (x.to(mix.dtype) * mix).sum(-2).to(x.dtype)


def mhc_post_ref(
    x: torch.Tensor, residual: torch.Tensor, post_layer_mix: torch.Tensor, comb_res_mix: torch.Tensor
) -> torch.Tensor:
    """(..., hidden), (..., m, hidden), (..., m, 1) and (..., m, m) to (..., m, hidden), rounded to x's dtype."""
    dtype = comb_res_mix.dtype
    mixed = comb_res_mix.transpose(-1, -2) @ residual.to(dtype)
    return (post_layer_mix * x.to(dtype).unsqueeze(-2) + mixed).to(x.dtype)


def mhc_head_compute_mix_ref(
    input_mix: torch.Tensor, mhc_scale: torch.Tensor, mhc_base: torch.Tensor, mhc_pre_eps: float
) -> torch.Tensor:
    """(..., m) to the same."""
    return (input_mix * mhc_scale + mhc_base).sigmoid() + mhc_pre_eps
