"""Routings for benchmark cases: random, but with sizes that are known beforehand, so that bytes can be counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..layout import align


@dataclass(frozen=True)
class Routing:
    """How many tokens go how: `num_routed` of the num_tokens * num_topk slots have an expert here, all others -1.

    Every token has at least one, and experts get equal shares, as far as this divides."""

    num_tokens: int
    num_topk: int
    num_experts: int
    num_routed: int

    @staticmethod
    def full(num_tokens: int, num_topk: int, num_experts: int) -> Routing:
        """All experts are here."""
        return Routing(num_tokens, num_topk, num_experts, num_tokens * num_topk)

    @property
    def params(self) -> dict[str, Any]:
        routed = {} if self.num_routed == self.num_tokens * self.num_topk else {"num_routed": self.num_routed}
        return {"num_tokens": self.num_tokens, "num_topk": self.num_topk, "num_experts": self.num_experts, **routed}

    def num_positions(self, alignment: int) -> int:
        """Rows of the expanded buffer: each expert's share rounded up."""
        share, larger = divmod(self.num_routed, self.num_experts)
        return larger * align(share + 1, alignment) + (self.num_experts - larger) * align(share, alignment)

    def make(self, device: Any) -> torch.Tensor:
        """int64 (num_tokens, num_topk)."""
        shape = (self.num_tokens, self.num_topk)
        # Slots in the order in which tokens get them, then shuffled within each token
        order = torch.arange(self.num_topk, device=device) * self.num_tokens
        routed = order + torch.arange(self.num_tokens, device=device).unsqueeze(1) < self.num_routed
        routed = routed.gather(1, torch.rand(shape, device=device).argsort(dim=1)).reshape(-1)
        shuffled = torch.randperm(self.num_routed, device=device)
        number = (routed.cumsum(0) - 1).clamp(min=0)
        return torch.where(routed, shuffled[number] % self.num_experts, -1).reshape(shape)


# What one of eight ranks sees of 4001 tokens a rank that choose among 256 experts: the published benchmark's sizes
TOP6_OF_RANK = Routing(18656, 6, 32, 24006)
TOP8_OF_RANK = Routing(21854, 8, 32, 32008)
