"""The product of the two weights of the gate's norms."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..testing.cases import BenchCase
from ._checks import check_hidden

_NAME = "engram.fused_weight"
_PRODUCT = (torch.float32, 0, size_of(0, 0), size_of(0, 1))


def fused_weight(weight_hidden: torch.Tensor, weight_embed: torch.Tensor) -> torch.Tensor:
    """weight_hidden * weight_embed, exact in fp32.

    Both: (num_streams, hidden) bf16, dense, hidden % 256 == 0. Returns fp32 (num_streams, hidden).
    """
    check_hidden(_NAME, "weight_hidden", weight_hidden, 2)
    return _fused_weight(weight_hidden, weight_embed, _PRODUCT)


def fused_weight_ref(weight_hidden: torch.Tensor, weight_embed: torch.Tensor) -> torch.Tensor:
    """`fused_weight` in plain torch."""
    return weight_hidden.float() * weight_embed.float()


def _fused_weight_cpu(weight_hidden: torch.Tensor, weight_embed: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(fused_weight_ref(weight_hidden, weight_embed))


_fused_weight = kernel(_NAME, cpu=_fused_weight_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's sizes, and one that is larger than any model's."""
    return [_case(4, 4096), _case(4, 7168), _case(64, 16384)]


def _case(num_streams: int, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        weights = torch.randn((2, num_streams, hidden), device=device).bfloat16()
        return {"weight_hidden": weights[0], "weight_embed": weights[1]}

    return BenchCase(_NAME, {"num_streams": num_streams, "hidden": hidden}, make, 8 * num_streams * hidden)
