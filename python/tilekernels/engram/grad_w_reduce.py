"""The gradients of the two weights of the gate's norms, from partial sums of that of their product."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_type_error
from ..testing.cases import BenchCase
from ._checks import check_hidden

_NAME = "engram.grad_w_reduce"

# Sums differ in order
_MAX_DIFF = 1e-10


def grad_w_reduce(
    grad_w_partial: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    grad_weight_hidden: torch.Tensor,
    grad_weight_embed: torch.Tensor,
) -> None:
    """Adds the gradients of both weights in place: s = the sum of grad_w_partial over its first dimension, then
    grad_weight_hidden += s * weight_embed and grad_weight_embed += s * weight_hidden.

    grad_w_partial: (num_parts, num_streams, hidden) fp32, from `engram_gate_bwd`. The weights: (num_streams, hidden)
    bf16; their gradients fp32. All dense, hidden % 256 == 0. Summed in fp32 in an order that num_parts alone decides.
    """
    check_hidden(_NAME, "grad_w_partial", grad_w_partial, 3)
    gradients = {"grad_weight_hidden": grad_weight_hidden, "grad_weight_embed": grad_weight_embed}
    for name, gradient in gradients.items():  # the kernel's own check takes None for an output
        if not isinstance(gradient, torch.Tensor):
            raise argument_type_error(_NAME, name, "be a tensor", type(gradient).__name__)
    _grad_w_reduce(grad_w_partial, weight_hidden, weight_embed, grad_weight_hidden, grad_weight_embed)


def grad_w_reduce_ref(
    grad_w_partial: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    grad_weight_hidden: torch.Tensor,
    grad_weight_embed: torch.Tensor,
) -> None:
    """`grad_w_reduce` in plain torch."""
    total = grad_w_partial.sum(0)
    grad_weight_hidden += total * weight_embed.float()
    grad_weight_embed += total * weight_hidden.float()


_grad_w_reduce = kernel(_NAME, cpu=grad_w_reduce_ref)


def bench_cases() -> list[BenchCase]:
    """What `engram_gate_bwd` leaves, the published benchmark's sizes, and a small one."""
    return [_case(4, 4, 512), _case(33, 4, 7168), _case(132, 4, 4096), _case(132, 4, 7168)]


def _case(num_parts: int, num_streams: int, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        weights = torch.randn((2, num_streams, hidden), device=device).bfloat16()
        gradients = torch.randn((2, num_streams, hidden), device=device)
        return {
            "grad_w_partial": torch.randn((num_parts, num_streams, hidden), device=device),
            "weight_hidden": weights[0],
            "weight_embed": weights[1],
            "grad_weight_hidden": gradients[0],
            "grad_weight_embed": gradients[1],
        }

    params = {"num_parts": num_parts, "num_streams": num_streams, "hidden": hidden}
    num_bytes = (4 * num_parts + 4 + 16) * num_streams * hidden
    return BenchCase(_NAME, params, make, num_bytes, _MAX_DIFF)
