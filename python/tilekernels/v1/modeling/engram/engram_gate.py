"""The engram gate with gradients, keys and values in tensors of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ....modeling.engram import merge_tokens, run_backward, run_forward


class EngramGateFn(torch.autograd.Function):
    """`tilekernels.modeling.engram.EngramGateFn` of k (..., num_streams, hidden) and v (..., hidden)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        weight_hidden: torch.Tensor,
        weight_embed: torch.Tensor,
        clamp_value: float,
        eps: float,
    ) -> torch.Tensor:
        rows = merge_tokens(hidden_states, 2), (merge_tokens(k, 2), merge_tokens(v, 1))
        return run_forward(ctx, hidden_states.shape, *rows, weight_hidden, weight_embed, clamp_value, eps, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, (grad_k, grad_v), *grad_weights = run_backward(ctx, grad_output)
        shape = ctx.shape
        return (grad_x, grad_k.view(shape), grad_v.view(*shape[:-2], shape[-1]), *grad_weights, None, None)


engram_gate = EngramGateFn.apply
