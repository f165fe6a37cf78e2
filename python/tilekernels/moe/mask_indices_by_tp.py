"""Expert indices of all ranks to those of one tensor-parallel rank."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import requests_of, size_of
from ..errors import argument_error, check_int
from ..testing.cases import BenchCase
from ._cases import Routing

_NAME = "moe.mask_indices_by_tp"
_MAX_INT32 = 2**31 - 1
_OUT_OF = requests_of(size_of(0, 0), size_of(0, 1))


def mask_indices_by_tp(
    indices: torch.Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int
) -> torch.Tensor:
    """The indices that lie on tensor-parallel rank tp_rank, counted without the experts of other ranks; all others -1.

    indices: (num_tokens, num_topk) int64, int32, int16 or int8, dense; negative entries stay -1. n: experts of all
    num_ep_ranks GPUs, n // num_ep_ranks on each; num_tp_ranks neighbouring GPUs share their tokens, which may be more
    than there are. Returns a tensor of the same dtype and shape.
    """
    check_int(_NAME, "num_ep_ranks", num_ep_ranks, 1, _MAX_INT32)
    check_int(_NAME, "n", n, 1, _MAX_INT32)
    check_int(_NAME, "num_tp_ranks", num_tp_ranks, 1, _MAX_INT32)
    check_int(_NAME, "tp_rank", tp_rank, 0, num_tp_ranks - 1)
    if n < num_ep_ranks:
        raise argument_error(_NAME, "n", f"be at least num_ep_ranks {num_ep_ranks}", n)
    asked = _OUT_OF.get(getattr(indices, "dtype", None))
    return _mask_indices_by_tp(indices, asked, n // num_ep_ranks, tp_rank, num_tp_ranks)


def mask_indices_by_tp_ref(
    indices: torch.Tensor, n: int, num_ep_ranks: int, tp_rank: int, num_tp_ranks: int
) -> torch.Tensor:
    """`mask_indices_by_tp` in plain torch."""
    per_gpu = n // num_ep_ranks
    per_group = per_gpu * num_tp_ranks
    wide = indices.long()
    elsewhere = (wide < 0) | (wide // per_gpu % num_tp_ranks != tp_rank)
    local = wide - tp_rank * per_gpu
    local = local - local // per_group * (per_group - per_gpu)
    return torch.where(elsewhere | (local < 0), -1, local).to(indices.dtype)


def _mask_indices_by_tp_cpu(
    indices: torch.Tensor, out: torch.Tensor, num_experts_per_gpu: int, tp_rank: int, num_tp_ranks: int
) -> None:
    out.copy_(mask_indices_by_tp_ref(indices, num_experts_per_gpu, 1, tp_rank, num_tp_ranks))


_mask_indices_by_tp = kernel(_NAME, cpu=_mask_indices_by_tp_cpu)


def bench_cases() -> list[BenchCase]:
    """A batch of a few tokens, the published benchmark's sizes, and a large one."""
    sizes = [(8, 8, 8), (18653, 6, 2), (21838, 8, 2), (65536, 8, 8)]
    return [
        _case(Routing.full(num_tokens, num_topk, 256), num_tp_ranks) for num_tokens, num_topk, num_tp_ranks in sizes
    ]


def _case(routing: Routing, num_tp_ranks: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        kwargs = {"n": routing.num_experts, "num_ep_ranks": 8, "tp_rank": 1, "num_tp_ranks": num_tp_ranks}
        return {"indices": routing.make(device), **kwargs}

    num_bytes = 16 * routing.num_tokens * routing.num_topk
    return BenchCase(_NAME, {**routing.params, "num_tp_ranks": num_tp_ranks}, make, num_bytes)
