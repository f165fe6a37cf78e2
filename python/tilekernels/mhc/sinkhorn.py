"""Sinkhorn's normalisation of a token's small matrix of mixes, and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import check_int
from ..testing.cases import BenchCase
from ._checks import mult_of
from ._reference import sequential_sum, tree_sum

_NAME = "mhc.mhc_sinkhorn_fwd"
_NAME_BACKWARD = "mhc.mhc_sinkhorn_bwd"

MAX_BACKWARD_REPEAT = 128  # whose divisors fit into the shared memory of every GPU


def mhc_sinkhorn_fwd(comb_res_mix: torch.Tensor, comb_res_mix_out: torch.Tensor, repeat: int, eps: float) -> None:
    """Writes each matrix to comb_res_mix_out, normalised by rows and columns in turn.

    comb_res_mix, comb_res_mix_out: (num_tokens, m, m) fp32, dense, m 2, 4 or 8. First softmax over the last index plus
    eps, then each column over its sum + eps; then repeat - 1 times each row over its sum + eps, and each column.
    Divisions are IEEE's, row sums go from left to right, column sums by neighbouring pairs.
    """
    mult = mult_of(_NAME, "comb_res_mix", comb_res_mix, torch.float32, 3, 1)
    check_int(_NAME, "repeat", repeat, 1)
    _mhc_sinkhorn_fwd(comb_res_mix, comb_res_mix_out, repeat, eps, mult)


def mhc_sinkhorn_bwd(
    grad_output: torch.Tensor, x: torch.Tensor, grad_input: torch.Tensor, repeat: int, eps: float
) -> None:
    """Writes to grad_input the gradient of `mhc_sinkhorn_fwd` at its input x.

    All (num_tokens, m, m) fp32, dense; repeat at most 128. The forward is computed anew, its divisors kept, and walked
    back: the matrix before a division is the one behind it times the divisor.
    """
    mult = mult_of(_NAME_BACKWARD, "x", x, torch.float32, 3, 1)
    check_int(_NAME_BACKWARD, "repeat", repeat, 1, MAX_BACKWARD_REPEAT)
    _mhc_sinkhorn_bwd(grad_output, x, grad_input, repeat, eps, mult)


def mhc_sinkhorn_fwd_ref(comb_res_mix: torch.Tensor, comb_res_mix_out: torch.Tensor, repeat: int, eps: float) -> None:
    """`mhc_sinkhorn_fwd` in plain torch."""
    matrix = _softmax(comb_res_mix) + eps
    matrix = matrix / (_sum_columns(matrix) + eps)
    for _ in range(repeat - 1):
        matrix = matrix / (_sum_rows(matrix) + eps)
        matrix = matrix / (_sum_columns(matrix) + eps)
    comb_res_mix_out.copy_(matrix)


def mhc_sinkhorn_bwd_ref(
    grad_output: torch.Tensor, x: torch.Tensor, grad_input: torch.Tensor, repeat: int, eps: float
) -> None:
    """`mhc_sinkhorn_bwd` in plain torch."""
    softmax = _softmax(x)
    matrix, grad = softmax + eps, grad_output
    divisors = []  # by turns of columns and of rows
    for step in range(2 * repeat - 1):
        divisors.append((_sum_rows(matrix) if step % 2 else _sum_columns(matrix)) + eps)
        matrix = matrix / divisors[-1]
    for step in reversed(range(2 * repeat - 1)):
        dots = _sum_rows(grad * matrix) if step % 2 else _sum_columns(grad * matrix)
        grad = (grad - dots) / divisors[step]
        matrix = matrix * divisors[step]
    grad_input.copy_((grad - _sum_rows(grad * softmax)) * softmax)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    parts = (x - x.amax(-1, keepdim=True)).exp()
    return parts / _sum_rows(parts)


def _sum_rows(matrix: torch.Tensor) -> torch.Tensor:
    return sequential_sum(matrix.split(1, dim=-1))


def _sum_columns(matrix: torch.Tensor) -> torch.Tensor:
    return tree_sum(matrix.split(1, dim=-2))


def _fwd_cpu(
    comb_res_mix: torch.Tensor, comb_res_mix_out: torch.Tensor, repeat: int, eps: float, mhc_mult: int
) -> None:
    mhc_sinkhorn_fwd_ref(comb_res_mix, comb_res_mix_out, repeat, eps)


def _bwd_cpu(
    grad_output: torch.Tensor, x: torch.Tensor, grad_input: torch.Tensor, repeat: int, eps: float, mhc_mult: int
) -> None:
    mhc_sinkhorn_bwd_ref(grad_output, x, grad_input, repeat, eps)


_mhc_sinkhorn_fwd = kernel(_NAME, cpu=_fwd_cpu)
_mhc_sinkhorn_bwd = kernel(_NAME_BACKWARD, cpu=_bwd_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens, training batches, and many tokens; of four streams, and of others."""
    sizes = [(7, 4), (4096, 4), (8192, 4), (65536, 4), (8192, 2), (8192, 8)]
    return [make(*size) for make in (_forward_case, _backward_case) for size in sizes]


def _forward_case(num_tokens: int, mult: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((num_tokens, mult, mult), device=device)
        return {"comb_res_mix": x, "comb_res_mix_out": torch.zeros_like(x), "repeat": 10, "eps": 1e-6}

    return BenchCase(_NAME, {"num_tokens": num_tokens, "mult": mult}, make, 8 * num_tokens * mult * mult)


def _backward_case(num_tokens: int, mult: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x, grad = (torch.randn((num_tokens, mult, mult), device=device) for _ in range(2))
        return {"grad_output": grad, "x": x, "grad_input": torch.zeros_like(x), "repeat": 10, "eps": 1e-6}

    return BenchCase(_NAME_BACKWARD, {"num_tokens": num_tokens, "mult": mult}, make, 12 * num_tokens * mult * mult)
