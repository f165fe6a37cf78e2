"""The input of a layer: the sum of a token's residual streams, each times its mix; and its gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..testing.cases import BenchCase
from ._checks import mult_of
from ._reference import fma, mix_streams

_NAME = "mhc.mhc_pre_apply_mix_fwd"
_NAME_BACKWARD = "mhc.mhc_pre_apply_mix_bwd"
_NUM_TOKENS = size_of(0, 0)


def mhc_pre_apply_mix_fwd(x: torch.Tensor, mix: torch.Tensor, o: torch.Tensor) -> None:
    """Writes to o each token's sum over its streams of mix * stream.

    x: (num_tokens, m, hidden) bf16, m 2, 4 or 8. mix: (num_tokens, m) fp32. o: (num_tokens, hidden) bf16. All dense.
    Fused multiply-adds in fp32 from 0 on, in the order of the streams, rounded once. Fastest where hidden is a multiple
    of 8 and the tensors start on 16 bytes.
    """
    mult = mult_of(_NAME, "x", x, torch.bfloat16, 3, 1)
    _mhc_pre_apply_mix_fwd(x, mix, o, mult)


def mhc_pre_apply_mix_bwd(
    o_grad: torch.Tensor, x: torch.Tensor, mix: torch.Tensor, x_grad: torch.Tensor
) -> torch.Tensor:
    """The gradients of `mhc_pre_apply_mix_fwd`: returns that of mix, adds that of x to x_grad in place.

    o_grad: (num_tokens, hidden) bf16. x, mix: as forward. x_grad: (num_tokens, m, hidden) bf16, initialised; each
    number is read, mix * o_grad added by a fused multiply-add in fp32, and stored. Returns (num_tokens, m) fp32: sums
    over the channels in an order of their own.
    """
    mult = mult_of(_NAME_BACKWARD, "x", x, torch.bfloat16, 3, 1)
    mix_grad: torch.Tensor = _mhc_pre_apply_mix_bwd(o_grad, x, mix, x_grad, (torch.float32, 0, _NUM_TOKENS, mult), mult)
    return mix_grad


def mhc_pre_apply_mix_fwd_ref(x: torch.Tensor, mix: torch.Tensor, o: torch.Tensor) -> None:
    """`mhc_pre_apply_mix_fwd` in plain torch."""
    zero = torch.zeros(o.shape, dtype=torch.float32, device=o.device)
    o.copy_(mix_streams(mix.unbind(1), x.unbind(1), zero))


def mhc_pre_apply_mix_bwd_ref(
    o_grad: torch.Tensor, x: torch.Tensor, mix: torch.Tensor, x_grad: torch.Tensor
) -> torch.Tensor:
    """`mhc_pre_apply_mix_bwd` in plain torch."""
    grad = o_grad.float()
    sums = []
    for stream in range(x.shape[1]):
        sums.append((grad * x[:, stream].float()).sum(1))
        x_grad[:, stream] = fma(mix[:, stream, None], grad, x_grad[:, stream].float())
    return torch.stack(sums, 1)


def _fwd_cpu(x: torch.Tensor, mix: torch.Tensor, o: torch.Tensor, mhc_mult: int) -> None:
    mhc_pre_apply_mix_fwd_ref(x, mix, o)


def _bwd_cpu(
    o_grad: torch.Tensor,
    x: torch.Tensor,
    mix: torch.Tensor,
    x_grad: torch.Tensor,
    mix_grad: torch.Tensor,
    mhc_mult: int,
) -> None:
    mix_grad.copy_(mhc_pre_apply_mix_bwd_ref(o_grad, x, mix, x_grad))


_mhc_pre_apply_mix_fwd = kernel(_NAME, cpu=_fwd_cpu)
_mhc_pre_apply_mix_bwd = kernel(_NAME_BACKWARD, cpu=_bwd_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens, a decode batch, and training batches of two models."""
    sizes = [(7, 4, 1280), (128, 4, 7168), (4096, 4, 2560), (4096, 4, 7168), (8192, 4, 2560), (8192, 4, 7168)]
    cases = [make(*size) for make in (_forward_case, _backward_case) for size in sizes]
    return [*cases, _forward_case(4096, 2, 2560), _forward_case(4096, 8, 2560), _backward_case(4096, 8, 2560)]


# Of sums over the channels in another order
_MAX_DIFF = 1e-10


def _forward_case(num_tokens: int, mult: int, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((num_tokens, mult, hidden), device=device).bfloat16()
        o = torch.zeros((num_tokens, hidden), dtype=torch.bfloat16, device=device)
        return {"x": x, "mix": torch.rand((num_tokens, mult), device=device), "o": o}

    num_bytes = num_tokens * (2 * hidden * (mult + 1) + 4 * mult)
    return BenchCase(_NAME, {"num_tokens": num_tokens, "mult": mult, "hidden": hidden}, make, num_bytes)


def _backward_case(num_tokens: int, mult: int, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x, x_grad = (torch.randn((num_tokens, mult, hidden), device=device).bfloat16() for _ in range(2))
        o_grad = torch.randn((num_tokens, hidden), device=device).bfloat16()
        return {"o_grad": o_grad, "x": x, "mix": torch.rand((num_tokens, mult), device=device), "x_grad": x_grad}

    num_bytes = num_tokens * (2 * hidden * (3 * mult + 1) + 8 * mult)
    params = {"num_tokens": num_tokens, "mult": mult, "hidden": hidden}
    return BenchCase(_NAME_BACKWARD, params, make, num_bytes, _MAX_DIFF)
