"""Inputs for the gate's tests, and the gate in float64 from its definition, with gradients by autograd."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

# TK_FULL_TEST adds the rest of the published lists: other numbers of tokens, each with every layout
FULL = os.environ.get("TK_FULL_TEST", "0").lower() in ("1", "true")
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 6144, 7168)
STREAMS = 4
EPS, CLAMP = 1e-20, 1e-6


@dataclass(frozen=True)
class Gate:
    """One call. layout: `one` tensor of keys and values, a dense `pair`, or a pair of `wide` rows of other things;
    `odd`: all on addresses that are only aligned to their elements."""

    num_tokens: int
    hidden: int
    layout: str = "one"
    num_streams: int = STREAMS
    is_masked: bool = False
    eps: float = EPS
    clamp_value: float = CLAMP

    @property
    def id(self) -> str:
        masked = "-masked" if self.is_masked else ""
        return f"{self.num_tokens}x{self.num_streams}x{self.hidden}-{self.layout}{masked}"

    def make(self, device: str) -> dict[str, Any]:
        shape = (self.num_tokens, self.num_streams, self.hidden)

        def numbers(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device)

        k, v = numbers(*shape).bfloat16(), numbers(self.num_tokens, self.hidden).bfloat16()
        mask = torch.rand(self.num_tokens, device=device) < 0.4 if self.is_masked else None
        x, weight = numbers(*shape).bfloat16(), numbers(self.num_streams, self.hidden)
        if self.layout == "odd":
            x, weight, k, v = (place_at(each, 1) for each in (x, weight, k, v))
        return {
            "hidden_states": x,
            "kv": make_kv(k, v, self.layout),
            "weight_fused": weight,
            "eps": self.eps,
            "clamp_value": self.clamp_value,
            "image_token_mask": mask,
        }


def make_kv(k: torch.Tensor, v: torch.Tensor, layout: str) -> Any:
    if layout == "one":
        return torch.cat([k, v[:, None]], dim=1)
    if layout == "wide":
        num_tokens, num_streams, hidden = k.shape
        wide_k = torch.full((num_tokens, num_streams, hidden + 24), 7.0, device=k.device).bfloat16()
        wide_v = torch.full((num_tokens, 3 * hidden + 8), 7.0, device=k.device).bfloat16()
        wide_k[..., 16 : 16 + hidden], wide_v[:, hidden : 2 * hidden] = k, v
        return wide_k[..., 16 : 16 + hidden], wide_v[:, hidden : 2 * hidden]
    return k, v


def place_at(x: torch.Tensor, offset: int) -> torch.Tensor:
    """The same numbers `offset` elements behind an aligned address."""
    storage = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
    return storage[offset:].view(x.shape).copy_(x)


def split(kv: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return kv if isinstance(kv, tuple) else (kv[:, :-1], kv[:, -1])


def gate_in_float64(
    x: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weight: torch.Tensor, eps: float, clamp_value: float
) -> tuple[torch.Tensor, ...]:
    """(output, dot, gate, 1 / RMS of x, 1 / RMS of k), nothing rounded."""
    x, k, v, weight = (each.double() for each in (x, k, v, weight))
    hidden = x.shape[-1]
    normed_x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    normed_k = k / (k.square().mean(-1, keepdim=True) + eps).sqrt()
    p = torch.einsum("tmh,tmh,mh->tm", normed_x, normed_k, weight) / hidden**0.5
    # As a square root with a sign; its slope is zero where the clamp holds
    root = torch.where(p < 0, -1, 1) * torch.where(p.abs() < clamp_value, clamp_value, p.abs()).sqrt()
    gate = 1 / (1 + torch.exp(-root))
    output = x + gate[..., None] * v[:, None]
    dot = torch.einsum("tmh,tmh,mh->tm", x, k, weight)
    return output, dot, gate, normed_x[..., 0] / x[..., 0], normed_k[..., 0] / k[..., 0]
