"""References of SwiGLU."""

from __future__ import annotations

import torch

from ...quant import QuantTensor
from ...quant._swiglu import Routing, count_clamped, row_weights, swiglu
from ...quant.swiglu_backward import gradients

__all__ = ["swiglu_backward", "swiglu_forward"]


def swiglu_forward(
    x: torch.Tensor,
    pos_to_token_topk: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    swiglu_clamp_value: float | None = None,
    clamped_count: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp32 (M, H) of all rows, those of a negative position with a weight of 0; all rows count."""
    if clamped_count is not None and swiglu_clamp_value is not None:
        clamped_count += count_clamped(x, swiglu_clamp_value, None)[: clamped_count.numel()]
    weights = topk_weights if pos_to_token_topk is not None else None
    routing = Routing(topk_weights=weights, pos_to_token_topk=pos_to_token_topk)
    return swiglu(x, swiglu_clamp_value, row_weights(routing, x.shape[0]))


def swiglu_backward(
    x: QuantTensor,
    grad_out: torch.Tensor,
    weight: torch.Tensor,
    pos_to_token_topk: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    num_per_channels: int,
    swiglu_clamp_value: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out (M, H), x_grad (M, 2 H), weight_grad (T, k)) in fp32."""
    data, sf = (each.flatten(0, -2) for each in x)
    values = data.float() * sf.repeat_interleave(num_per_channels, dim=1)
    routing = Routing(topk_weights=weight.reshape(-1), pos_to_token_topk=pos_to_token_topk)
    x_grad, row_grad, out = gradients(values, grad_out.flatten(0, -2), routing, 1, swiglu_clamp_value)
    assert row_grad is not None
    padded = torch.nn.functional.pad(row_grad, (0, 1))  # the last is for slots without a row
    position = torch.where(token_topk_to_pos >= 0, token_topk_to_pos, row_grad.numel()).long()
    return out, x_grad, padded[position]
