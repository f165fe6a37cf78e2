"""The share of the tokens that each expert gets: the f of a load-balancing loss."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import check_int
from ..testing.cases import BenchCase
from ._cases import TOP6_OF_RANK, TOP8_OF_RANK, Routing
from ._indices import MAX_EXPERTS, check_below
from .group_count import group_count_ref, num_blocks_for

_NAME = "moe.aux_fi"
_MAX_INT32 = 2**31 - 1


def aux_fi(topk_idx: torch.Tensor, num_experts: int, num_aux_topk: int) -> torch.Tensor:
    """f[e] = (entries of expert e) * num_experts / (num_tokens * num_aux_topk): one for all where the spread is even.

    topk_idx: (num_tokens, num_topk) int64, dense; negative entries count nowhere, others are below num_experts.
    num_experts: 1 to 1024. Both products are exact integers; each is rounded to fp32, then divided. Returns fp32
    (num_experts,), zeros without tokens.
    """
    check_int(_NAME, "num_experts", num_experts, 1, MAX_EXPERTS)
    check_int(_NAME, "num_aux_topk", num_aux_topk, 1, _MAX_INT32)
    workspace = (torch.int32, 0, num_blocks_for(_NAME, "topk_idx", topk_idx), num_experts)
    _, out = _aux_fi(topk_idx, workspace, (torch.float32, 0, num_experts), num_aux_topk)
    return out


def aux_fi_ref(topk_idx: torch.Tensor, num_experts: int, num_aux_topk: int) -> torch.Tensor:
    """`aux_fi` in plain torch."""
    routed = group_count_ref(topk_idx, num_experts).long() * num_experts
    # A tensor: torch multiplies by the reciprocal of a number
    slots = torch.full_like(routed, max(topk_idx.shape[0], 1) * num_aux_topk)
    return routed.float() / slots.float()


def _aux_fi_cpu(topk_idx: torch.Tensor, workspace: torch.Tensor, out: torch.Tensor, num_aux_topk: int) -> None:
    check_below(_NAME, "topk_idx", topk_idx, out.shape[0])
    out.copy_(aux_fi_ref(topk_idx, out.shape[0], num_aux_topk))


_aux_fi = kernel(_NAME, cpu=_aux_fi_cpu)


def bench_cases() -> list[BenchCase]:
    """A batch of a few tokens, the published benchmark's sizes, and all experts of a model."""
    sizes = [(8, 8, 256), (8001, 8, 256), (65536, 8, 256), (131072, 10, 512)]
    return [_case(routing) for routing in (*(Routing.full(*size) for size in sizes), TOP6_OF_RANK, TOP8_OF_RANK)]


def _case(routing: Routing) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        kwargs = {"num_experts": routing.num_experts, "num_aux_topk": routing.num_topk}
        return {"topk_idx": routing.make(device), **kwargs}

    return BenchCase(_NAME, routing.params, make, 8 * routing.num_tokens * routing.num_topk + 4 * routing.num_experts)
