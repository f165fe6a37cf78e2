"""Expert indices for tests: random ones of many shapes, and those where an implementation may slip."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch

# masked: a third of the slots goes nowhere; skewed: most go to one expert; constant: all do; distinct: as a top-k gives
# them; nowhere: all -1; descending: experts fall with the token
KINDS = ("masked", "skewed", "constant", "distinct", "nowhere", "descending")


@dataclass(frozen=True)
class Routing:
    """One (num_tokens, num_topk) tensor of indices below num_experts, or -1."""

    num_tokens: int
    num_topk: int
    num_experts: int
    kind: str

    @property
    def id(self) -> str:
        return f"{self.num_tokens}x{self.num_topk}-of{self.num_experts}-{self.kind}"

    def make(self, device: str) -> torch.Tensor:
        shape = (self.num_tokens, self.num_topk)
        uniform = torch.randint(0, self.num_experts, shape, device=device)
        if self.kind == "nowhere":
            return torch.full_like(uniform, -1)
        if self.kind == "constant":
            return torch.full_like(uniform, self.num_experts - 1)
        if self.kind == "skewed":
            return torch.where(torch.rand(shape, device=device) < 0.9, self.num_experts // 2, uniform)
        if self.kind == "distinct":
            order = torch.rand((self.num_tokens, self.num_experts), device=device).argsort(dim=1)
            return order[:, : self.num_topk].clone(memory_format=torch.contiguous_format)
        if self.kind == "descending":
            falling = torch.arange(self.num_tokens, 0, -1, device=device) % self.num_experts
            return falling.unsqueeze(1).repeat(1, self.num_topk)
        return torch.where(torch.rand(shape, device=device) < 1 / 3, -1, uniform)


def random_routings(count: int, most_tokens: int = 4001, most_experts: int = 1024) -> Iterator[Routing]:
    """Counts around the sizes of warps, blocks and their shares, with every kind."""
    choose = random.Random(1)
    tokens = [0, 1, 2, 3, 5, 31, 32, 33, 64, 127, 128, 500, 1000, 2049, 4001]
    experts = [1, 2, 4, 7, 9, 16, 31, 32, 33, 64, 72, 128, 255, 256, 257, 288, 384, 511, 512, 513, 1000, 1023, 1024]
    for at in range(count):
        num_experts = choose.choice([each for each in experts if each <= most_experts])
        kind = KINDS[at % len(KINDS)]
        most_topk = min(32, num_experts) if kind == "distinct" else 32
        num_topk = min(most_topk, choose.choice((1, 2, 3, 4, 6, 7, 8, 9, 10, 16, 31, 32)))
        yield Routing(choose.choice([each for each in tokens if each <= most_tokens]), num_topk, num_experts, kind)


def make_mapping(routing: Routing, alignment: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_topk_to_pos, pos_to_expert) by the reference, as long as all segments."""
    from tilekernels.moe.get_fused_mapping import get_fused_mapping_ref

    mapping = get_fused_mapping_ref(routing.make(device), routing.num_experts, 0, alignment)
    return mapping[3], mapping[0]


def place_at(x: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose first element lies `offset` elements into its storage: not on 16 bytes, if that is odd."""
    storage = torch.empty(x.numel() + offset, dtype=x.dtype, device=x.device)
    return storage[offset:].view(x.shape).copy_(x)
