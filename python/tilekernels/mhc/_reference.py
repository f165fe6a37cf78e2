"""What the references share: sums in the order of the kernels, so that on a GPU they give the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..moe._fma import fma

__all__ = ["fma", "mix_streams", "scaled", "sequential_sum", "sigmoid_grad", "tree_sum"]


def mix_streams(mixes: Sequence[torch.Tensor], streams: Sequence[torch.Tensor], total: torch.Tensor) -> torch.Tensor:
    """total + mixes[0] * streams[0] + mixes[1] * streams[1] ...: fused multiply-adds in this order, in fp32.

    mixes: (num_tokens,) fp32 each; streams: (num_tokens, hidden) each; total: (num_tokens, hidden) fp32.
    """
    for mix, stream in zip(mixes, streams, strict=True):
        total = fma(mix[:, None], stream.float(), total)
    return total


def scaled(x: torch.Tensor, scale: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """x * scale + base in two roundings."""
    return x * scale + base


def sigmoid_grad(x: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient before the scale of sigmoid(x * scale + base)."""
    p = scaled(x, scale, base).sigmoid()
    return p * (1 - p) * grad


def sequential_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """From left to right."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours, then neighbouring pairs: ((0 + 1) + (2 + 3)) + ...; their number is a power of two."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
