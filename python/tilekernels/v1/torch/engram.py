"""N-gram hashes and the gate in plain torch."""

from __future__ import annotations

import torch

from ...engram._reference import gate_of_rows
from ...engram.engram_hash import engram_hash_ref as _engram_hash_ref
from ...engram.engram_hash import make_offsets as make_offsets


def engram_hash_ref(
    ngram_token_ids: torch.Tensor, multipliers: torch.Tensor, vocab_sizes: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """`engram.engram_hash` in plain torch."""
    return _engram_hash_ref(ngram_token_ids, multipliers, vocab_sizes, offsets)


def engram_gate_ref(
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp_value: float,
    eps: float,
    save_for_backward: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gate in plain torch, differentiable; with save_for_backward also dot, gate and both 1 / RMS."""
    rows = hidden_states.float(), k.float(), v.float(), weight_hidden.float() * weight_embed.float()
    output, *saved = gate_of_rows(*rows, eps, clamp_value)
    result = output.to(hidden_states.dtype)
    return (result, saved[0], saved[1], saved[2], saved[3]) if save_for_backward else result
