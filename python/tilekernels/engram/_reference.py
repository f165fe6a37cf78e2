"""The gate and its gradients in plain torch, on rows of any floating-point dtype."""

from __future__ import annotations

import torch

from ..layout import ceildiv


def gate_of_rows(
    x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, eps: float, clamp_value: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, dot, gate, 1 / RMS of x, 1 / RMS of k) of x (..., num_streams, hidden) and v (..., hidden)."""
    dot = (x * weight * k).sum(-1)
    rstd_x = torch.rsqrt(x.square().mean(-1) + eps)
    rstd_k = torch.rsqrt(k.square().mean(-1) + eps)
    p = dot * rstd_x * rstd_k * x.shape[-1] ** -0.5
    gate = torch.sigmoid(torch.copysign(p.abs().clamp(min=clamp_value).sqrt(), p))
    return x + gate[..., None] * v[..., None, :], dot, gate, rstd_x, rstd_k


def gate_gradients(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight: torch.Tensor,
    dot: torch.Tensor,
    gate: torch.Tensor,
    rstd_x: torch.Tensor,
    rstd_k: torch.Tensor,
    clamp_value: float,
    image_token_mask: torch.Tensor | None,
    num_parts: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of x, k, v, and that of the weight in parts: token t counts in part t % num_parts."""
    num_tokens, num_streams, hidden = x.shape
    scale = rstd_x * rstd_k * hidden**-0.5
    slope = (grad_out * v[:, None]).sum(-1) * gate * (1 - gate) * 0.5 * (scale / dot.abs()).sqrt()
    r = torch.where(dot.abs() * scale < clamp_value, 0, slope)[..., None]
    grad_x = grad_out + r * (k * weight - x * (dot * rstd_x.square() / hidden)[..., None])
    grad_k = r * (x * weight - k * (dot * rstd_k.square() / hidden)[..., None])
    grad_v = (grad_out * gate[..., None]).sum(1)
    grad_w = r * x * k
    if image_token_mask is not None:
        # What was saved of image tokens is no number to reckon with
        is_image = image_token_mask[:, None, None]
        grad_x = torch.where(is_image, grad_out, grad_x)
        grad_k, grad_w = (torch.where(is_image, 0, each) for each in (grad_k, grad_w))
        grad_v = torch.where(is_image[:, 0], 0, grad_v)
    padded = torch.nn.functional.pad(grad_w, (0, 0, 0, 0, 0, -num_tokens % num_parts))
    return grad_x, grad_k, grad_v, padded.view(ceildiv(num_tokens, num_parts), num_parts, num_streams, hidden).sum(0)
