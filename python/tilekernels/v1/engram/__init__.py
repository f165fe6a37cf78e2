"""N-gram hashes, and the gate with keys and values in tensors of their own."""

from __future__ import annotations

import torch

from ... import engram as _engram
from .._asserting import asserting

Saved = torch.Tensor | None


@asserting
def engram_hash(
    ngram_token_ids: torch.Tensor, multipliers: torch.Tensor, vocab_sizes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """`tilekernels.engram.engram_hash` without a mask."""
    return _engram.engram_hash(ngram_token_ids, multipliers, vocab_sizes, offsets)


@asserting
def engram_gate_fwd(
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_fused: torch.Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
) -> tuple[torch.Tensor, Saved, Saved, Saved, Saved]:
    """`tilekernels.engram.engram_gate_fwd` of the pair (k, v)."""
    return _engram.engram_gate_fwd(hidden_states, (k, v), weight_fused, eps, clamp_value, save_for_backward)


@asserting
def engram_gate_bwd(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_fused: torch.Tensor,
    dot: torch.Tensor,
    gate_score: torch.Tensor,
    rstd_x: torch.Tensor,
    rstd_k: torch.Tensor,
    clamp_value: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`tilekernels.engram.engram_gate_bwd` of the pair (k, v): gradients of hidden_states, k, v, and grad_w_partial.

    grad_w_partial has fewer parts than the GPU has multiprocessors; `grad_w_reduce` takes any number."""
    saved = dot, gate_score, rstd_x, rstd_k
    result = _engram.engram_gate_bwd(grad_out, hidden_states, (k, v), weight_fused, *saved, clamp_value)
    grad_x, (grad_k, grad_v), grad_w_partial = result
    return grad_x, grad_k, grad_v, grad_w_partial


fused_weight = asserting(_engram.fused_weight)
grad_w_reduce = asserting(_engram.grad_w_reduce)
