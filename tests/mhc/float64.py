"""The operators' formulas in float64, differentiable: what results and gradients are compared with."""

from __future__ import annotations

import torch


def apply_mix(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """(..., m, hidden) and (..., m) to (..., hidden)."""
    return (mix.unsqueeze(-1) * x).sum(-2)


def post(x: torch.Tensor, residual: torch.Tensor, post_mix: torch.Tensor, comb_mix: torch.Tensor) -> torch.Tensor:
    """(..., hidden), (..., m, hidden), (..., m), (..., m, m) to (..., m, hidden)."""
    # Without a matrix product: torch warns where one is the first thing that a thread of autograd does on a GPU
    mixed = (comb_mix.unsqueeze(-1) * residual.unsqueeze(-2)).sum(-3)
    return post_mix.unsqueeze(-1) * x.unsqueeze(-2) + mixed


def split_mixes(
    mixes: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, mult: int, post_mult: float, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(..., m * (m + 2)) to (..., m), (..., m), (..., m * m)."""
    pre = torch.sigmoid(mixes[..., :mult] * scale[0] + base[:mult]) + eps
    post_mix = torch.sigmoid(mixes[..., mult : 2 * mult] * scale[1] + base[mult : 2 * mult]) * post_mult
    return pre, post_mix, mixes[..., 2 * mult :] * scale[2] + base[2 * mult :]


def sinkhorn(x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
    """(..., m, m) to the same."""
    matrix = torch.softmax(x, -1) + eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
    return matrix


def head_mix(x: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, eps: float) -> torch.Tensor:
    """(..., m) to the same."""
    return torch.sigmoid(x * scale + base) + eps


def leaf(x: torch.Tensor) -> torch.Tensor:
    """A float64 copy that gradients are recorded for."""
    return x.detach().double().requires_grad_()


def grad_of(x: torch.Tensor) -> torch.Tensor:
    assert x.grad is not None
    return x.grad
