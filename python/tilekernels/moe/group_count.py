"""How often each group, or expert, was chosen."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..config import num_sms_for
from ..errors import check_int, shape_of
from ..layout import ceildiv
from ..testing.cases import BenchCase
from ._cases import TOP6_OF_RANK, TOP8_OF_RANK, Routing
from ._indices import MAX_EXPERTS, check_below

_NAME = "moe.group_count"

# Entries from which another block pays: it makes the barrier over the grid longer
_ENTRIES_PER_BLOCK = 2048


def group_count(group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The number of entries of each group.

    group_idx: (num_tokens, num_topk) int64, dense; negative entries count nowhere, others are below num_groups.
    num_groups: 1 to 1024. Returns int32 (num_groups,).
    """
    check_int(_NAME, "num_groups", num_groups, 1, MAX_EXPERTS)
    return _group_count(group_idx, (torch.int32, 0, num_groups), num_blocks_for(_NAME, "group_idx", group_idx))


def group_count_ref(group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """`group_count` in plain torch; entries outside of the groups are passed over."""
    flat = group_idx.reshape(-1)
    # One more group for what counts nowhere
    bins = torch.where((flat >= 0) & (flat < num_groups), flat, num_groups)
    counts = torch.zeros(num_groups + 1, dtype=torch.int32, device=flat.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32))[:num_groups]


def num_blocks_for(operator: str, argument: str, indices: torch.Tensor) -> int:
    """Blocks that share the counting of these entries, all at once on the GPU."""
    num_tokens, num_topk = shape_of(operator, argument, indices, 2)
    return min(num_sms_for(indices.device), max(1, ceildiv(num_tokens * num_topk, _ENTRIES_PER_BLOCK)))


def _group_count_cpu(group_idx: torch.Tensor, out: torch.Tensor, num_sms: int) -> None:
    check_below(_NAME, "group_idx", group_idx, out.shape[0])
    out.copy_(group_count_ref(group_idx, out.shape[0]))


_group_count = kernel(_NAME, cpu=_group_count_cpu)


def bench_cases() -> list[BenchCase]:
    """A batch of a few tokens, the published benchmark's sizes, and all experts of a model."""
    sizes = [(8, 8, 256), (8001, 6, 72), (8001, 8, 256), (65536, 8, 256), (131072, 10, 512)]
    return [_case(routing) for routing in (*(Routing.full(*size) for size in sizes), TOP6_OF_RANK, TOP8_OF_RANK)]


def _case(routing: Routing) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {"group_idx": routing.make(device), "num_groups": routing.num_experts}

    return BenchCase(_NAME, routing.params, make, 8 * routing.num_tokens * routing.num_topk + 4 * routing.num_experts)
