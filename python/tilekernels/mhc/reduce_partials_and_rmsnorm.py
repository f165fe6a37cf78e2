"""Sums of the parts of pre-norm's product, normalised by the root mean square of the channels; and the gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error
from ..testing.cases import BenchCase

_FORWARD, _BACKWARD = "mhc.mhc_reduce_partials_and_rmsnorm_fwd", "mhc.mhc_reduce_partials_and_rmsnorm_bwd"


def mhc_reduce_partials_and_rmsnorm_fwd(
    out_mul_splitted: torch.Tensor,
    sqrsum_splitted: torch.Tensor,
    out_mul: torch.Tensor,
    sqrsum: torch.Tensor,
    out: torch.Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """Sums up the parts in order; out = sum over the groups of out_mul / sqrt(sqrsum / rms_group_size + rms_eps).

    out_mul_splitted: (n_splits, num_tokens, num_groups, num_mixes); sqrsum_splitted: (n_splits, num_tokens,
    num_groups). Written: out_mul (num_tokens, num_groups, num_mixes), sqrsum (num_tokens, num_groups), out (num_tokens,
    num_mixes). All fp32 and dense, of any size. rms_group_size: channels of a group.
    """
    check_num_splits(_FORWARD, "out_mul_splitted", out_mul_splitted, n_splits)
    _mhc_reduce_partials_and_rmsnorm_fwd(
        out_mul_splitted, sqrsum_splitted, out_mul, sqrsum, out, rms_group_size, rms_eps
    )


def mhc_reduce_partials_and_rmsnorm_bwd(
    out_grad: torch.Tensor,
    out_mul: torch.Tensor,
    sqrsum: torch.Tensor,
    out_mul_grad: torch.Tensor,
    sqrsum_grad: torch.Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> None:
    """Writes the gradients of out_mul and sqrsum, from that of out and from what the forward operator wrote.

    out_grad: (num_tokens, num_mixes); out_mul, out_mul_grad: (num_tokens, num_groups, num_mixes); sqrsum, sqrsum_grad:
    (num_tokens, num_groups). All fp32 and dense. With r = 1 / sqrt(sqrsum / rms_group_size + rms_eps), out_mul_grad =
    out_grad * r and sqrsum_grad = -r / 2 / (sqrsum + rms_eps * rms_group_size) * the sum over the mixes of out_grad *
    out_mul.
    """
    _mhc_reduce_partials_and_rmsnorm_bwd(out_grad, out_mul, sqrsum, out_mul_grad, sqrsum_grad, rms_group_size, rms_eps)


def mhc_reduce_partials_and_rmsnorm_fwd_ref(
    out_mul_splitted: torch.Tensor,
    sqrsum_splitted: torch.Tensor,
    out_mul: torch.Tensor,
    sqrsum: torch.Tensor,
    out: torch.Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int = 0,
) -> None:
    """`mhc_reduce_partials_and_rmsnorm_fwd` in plain torch."""
    sqrsum.copy_(sum_parts(sqrsum_splitted))
    out_mul.copy_(sum_parts(out_mul_splitted))
    factor = _rms_factor(sqrsum, rms_group_size, rms_eps)
    out.zero_()
    for group in range(out_mul.shape[1]):
        out += out_mul[:, group] * factor[:, group, None]


def mhc_reduce_partials_and_rmsnorm_bwd_ref(
    out_grad: torch.Tensor,
    out_mul: torch.Tensor,
    sqrsum: torch.Tensor,
    out_mul_grad: torch.Tensor,
    sqrsum_grad: torch.Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> None:
    """`mhc_reduce_partials_and_rmsnorm_bwd` in plain torch."""
    factor = _rms_factor(sqrsum, rms_group_size, rms_eps)
    out_mul_grad.copy_(out_grad[:, None] * factor[:, :, None])
    dot = (out_grad[:, None] * out_mul).sum(dim=-1)
    sqrsum_grad.copy_(dot * factor / (sqrsum + rms_eps * rms_group_size) / -2)


def _rms_factor(sqrsum: torch.Tensor, size: int, eps: float) -> torch.Tensor:
    # By a tensor: divided by a number, torch multiplies by its reciprocal on a GPU
    return torch.rsqrt(sqrsum / torch.full_like(sqrsum, size) + eps)


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the first dimension, in order."""
    total = torch.zeros(parts.shape[1:], dtype=parts.dtype, device=parts.device)
    for part in parts:
        total = total + part
    return total


def check_num_splits(operator: str, name: str, parts: Any, n_splits: int) -> None:
    """The number of parts is told twice: by a shape and by an argument."""
    if isinstance(parts, torch.Tensor) and parts.dim() and parts.shape[0] != n_splits:
        raise argument_error(operator, "n_splits", f"be {parts.shape[0]}, the first size of {name}", n_splits)


_mhc_reduce_partials_and_rmsnorm_fwd = kernel(_FORWARD, cpu=mhc_reduce_partials_and_rmsnorm_fwd_ref)
_mhc_reduce_partials_and_rmsnorm_bwd = kernel(_BACKWARD, cpu=mhc_reduce_partials_and_rmsnorm_bwd_ref)


def bench_cases() -> list[BenchCase]:
    """A few tokens, then as many as a batch has."""
    return [
        _case(name, num_tokens, n_splits)
        for name in (_FORWARD, _BACKWARD)
        for num_tokens, n_splits in ((64, 16), (4096, 8), (32768, 16))
    ]


def _case(name: str, num_tokens: int, n_splits: int) -> BenchCase:
    num_mixes = 24

    def make(device: Any) -> dict[str, Any]:
        scalars = {"rms_group_size": 28672, "rms_eps": 1e-6}
        mul = torch.randn((n_splits, num_tokens, 1, num_mixes), device=device)
        squares = torch.rand((n_splits, num_tokens, 1), device=device) * 1000
        sums, norms = torch.ones((num_tokens, 1, num_mixes), device=device), torch.ones((num_tokens, 1), device=device)
        out = torch.randn((num_tokens, num_mixes), device=device)
        if name == _FORWARD:
            tensors = {"out_mul": sums, "sqrsum": norms, "out": out}
            return {"out_mul_splitted": mul, "sqrsum_splitted": squares, **tensors, **scalars, "n_splits": n_splits}
        tensors = {"out_mul": mul[0], "sqrsum": squares[0], "out_mul_grad": sums, "sqrsum_grad": norms}
        return {"out_grad": out, **tensors, **scalars}

    words = (num_mixes + 1) * (n_splits + 1) + num_mixes if name == _FORWARD else 3 * num_mixes + 2
    params = {"num_tokens": num_tokens} | ({"n_splits": n_splits} if name == _FORWARD else {})
    # Backward adds in another order; forward the last bit of torch's rsqrt may differ
    return BenchCase(name, params, make, 4 * num_tokens * words, max_diff=1e-12)
