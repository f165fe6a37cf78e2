"""Removal of repeated group indices within each token's row, in place."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_type_error, check_int
from ..testing.cases import BenchCase
from ._cases import Routing
from ._indices import check_below

_NAME = "moe.inplace_unique_group_indices"
MAX_GROUPS = 128


def inplace_unique_group_indices(group_indices: torch.Tensor, num_groups: int) -> None:
    """Sets every entry to -1 that repeats an earlier entry of its row.

    group_indices: (num_tokens, num_topk) int64, dense, num_topk at most 256, changed in place; entries are below
    num_groups, negative ones stay as they are. num_groups: 1 to 128.
    """
    check_int(_NAME, "num_groups", num_groups, 1, MAX_GROUPS)
    if not isinstance(group_indices, torch.Tensor):  # the only one: the kernel's own check takes None for an output
        raise argument_type_error(_NAME, "group_indices", "be a tensor", type(group_indices).__name__)
    _inplace_unique_group_indices(group_indices, num_groups)


def inplace_unique_group_indices_ref(group_indices: torch.Tensor, num_groups: int) -> None:
    """`inplace_unique_group_indices` in plain torch."""
    valid = (group_indices >= 0) & (group_indices < num_groups)
    for slot in range(1, group_indices.shape[1]):
        group = group_indices[:, slot]
        # The first entry of a value is never blanked: what was blanked before does not matter
        repeated = (group_indices[:, :slot] == group.unsqueeze(1)).any(dim=1)
        group.masked_fill_(repeated & valid[:, slot], -1)


def _inplace_unique_group_indices_cpu(group_indices: torch.Tensor, num_groups: int) -> None:
    check_below(_NAME, "group_indices", group_indices, num_groups)
    inplace_unique_group_indices_ref(group_indices, num_groups)


_inplace_unique_group_indices = kernel(_NAME, cpu=_inplace_unique_group_indices_cpu)


def bench_cases() -> list[BenchCase]:
    """A batch of a few tokens, the published benchmark's sizes, and a large one; experts of a rank as groups."""
    sizes = [(8, 8, 8), (18658, 6, 8), (21942, 8, 8), (32755, 8, 8), (131072, 8, 16)]
    return [_case(Routing.full(*size)) for size in sizes]


def _case(routing: Routing) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {"group_indices": routing.make(device), "num_groups": routing.num_experts}

    # Entries are written only where they change, which is not counted
    num_bytes = 8 * routing.num_tokens * routing.num_topk
    return BenchCase(_NAME, routing.params, make, num_bytes)
