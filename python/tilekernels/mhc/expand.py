"""Copies of each token's row for every stream, and the sum of the streams' gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..testing.cases import BenchCase

_FORWARD, _BACKWARD = "mhc.expand_to_mhc_fwd", "mhc.expand_to_mhc_bwd"


def expand_to_mhc_fwd(x: torch.Tensor, o: torch.Tensor) -> None:
    """Writes row t of x to o[t, i] for every stream i.

    x: (num_tokens, hidden) bf16, dense. o: (num_tokens, mhc_mult, hidden) bf16, dense, any mhc_mult.
    """
    _expand_to_mhc_fwd(x, o)


def expand_to_mhc_bwd(o_grad: torch.Tensor, x_grad: torch.Tensor) -> None:
    """Writes the sum of o_grad[t, i] over the streams to row t of x_grad: in fp32, stream after stream, rounded once.

    o_grad: (num_tokens, mhc_mult, hidden) bf16, dense. x_grad: (num_tokens, hidden) bf16, dense.
    """
    _expand_to_mhc_bwd(o_grad, x_grad)


def expand_to_mhc_fwd_ref(x: torch.Tensor, o: torch.Tensor) -> None:
    """`expand_to_mhc_fwd` in plain torch."""
    o.copy_(x.unsqueeze(1).expand_as(o))


def expand_to_mhc_bwd_ref(o_grad: torch.Tensor, x_grad: torch.Tensor) -> None:
    """`expand_to_mhc_bwd` in plain torch, exact."""
    total = torch.zeros(x_grad.shape, dtype=torch.float32, device=x_grad.device)
    for stream in range(o_grad.shape[1]):
        total += o_grad[:, stream].float()
    x_grad.copy_(total)


_expand_to_mhc_fwd = kernel(_FORWARD, cpu=expand_to_mhc_fwd_ref)
_expand_to_mhc_bwd = kernel(_BACKWARD, cpu=expand_to_mhc_bwd_ref)


def bench_cases() -> list[BenchCase]:
    """A few tokens, then the sizes of models."""
    sizes = [(64, 4, 1280), *((num_tokens, 4, hidden) for hidden in (2560, 7168) for num_tokens in (4096, 8192))]
    return [_case(name, *size) for name in (_FORWARD, _BACKWARD) for size in sizes]


def _case(name: str, num_tokens: int, mhc_mult: int, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        rows = torch.randn((num_tokens, hidden), device=device).bfloat16()
        streams = torch.randn((num_tokens, mhc_mult, hidden), device=device).bfloat16()
        return {"x": rows, "o": streams} if name == _FORWARD else {"o_grad": streams, "x_grad": rows}

    params = {"num_tokens": num_tokens, "mhc_mult": mhc_mult, "hidden": hidden}
    return BenchCase(name, params, make, 2 * num_tokens * hidden * (1 + mhc_mult))
