"""The groups of experts with the best sums of their best scores."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..errors import argument_error, check_int, shape_of
from ..testing.cases import BenchCase
from ._gate import WARP
from .topk_gate import topk_gate_ref

_NAME = "moe.topk_sum_and_topk_group_idx"
_NUM_TOKENS = size_of(0, 0)


def topk_sum_and_topk_group_idx(scores: torch.Tensor, num_topk_sum: int, num_topk_groups: int) -> torch.Tensor:
    """Group indices by descending sum of each group's num_topk_sum best scores, ties to the smaller index.

    scores: (num_tokens, num_groups, group_size) fp32, dense, num_groups at most 32. num_topk_sum: 1 or 2, at most
    group_size. num_topk_groups: 1 to num_groups. Returns int64 (num_tokens, num_topk_groups). NaN ranks below -inf,
    as a score and as a sum.
    """
    _, num_groups, group_size = shape_of(_NAME, "scores", scores, 3)
    check_int(_NAME, "num_topk_sum", num_topk_sum, 1, 2)
    if num_topk_sum > group_size:
        raise argument_error(_NAME, "num_topk_sum", f"be at most the size of a group {group_size}", num_topk_sum)
    if num_groups > WARP:
        raise argument_error(_NAME, "scores", f"have at most {WARP} groups", num_groups)
    check_int(_NAME, "num_topk_groups", num_topk_groups, 1, num_groups)
    return _topk_sum_and_topk_group_idx(scores, (torch.int64, 0, _NUM_TOKENS, num_topk_groups), num_topk_sum)


def topk_sum_and_topk_group_idx_ref(scores: torch.Tensor, num_topk_sum: int, num_topk_groups: int) -> torch.Tensor:
    """`topk_sum_and_topk_group_idx` in plain torch."""
    num_tokens, num_groups, group_size = scores.shape
    rows = scores.reshape(num_tokens * num_groups, group_size)
    best = rows.gather(-1, topk_gate_ref(rows, num_topk_sum))
    sums = best[:, 0] + best[:, 1] if num_topk_sum == 2 else best[:, 0]
    return topk_gate_ref(sums.view(num_tokens, num_groups), num_topk_groups)


def _topk_sum_and_topk_group_idx_cpu(scores: torch.Tensor, topk_group_idx: torch.Tensor, num_topk_sum: int) -> None:
    topk_group_idx.copy_(topk_sum_and_topk_group_idx_ref(scores, num_topk_sum, topk_group_idx.shape[1]))


_topk_sum_and_topk_group_idx = kernel(_NAME, cpu=_topk_sum_and_topk_group_idx_cpu)


def bench_cases() -> list[BenchCase]:
    """Sizes of the published benchmark, a few tokens, and many."""
    sizes = [(32, 256, 8, 2), (8001, 72, 8, 2), (8001, 256, 8, 2), (8001, 256, 16, 2), (65536, 256, 8, 1)]
    return [_case(*size) for size in sizes]


def _case(num_tokens: int, num_experts: int, num_groups: int, num_topk_sum: int) -> BenchCase:
    num_topk_groups = 4

    def make(device: Any) -> dict[str, Any]:
        scores = torch.randn((num_tokens, num_groups, num_experts // num_groups), device=device)
        return {"scores": scores, "num_topk_sum": num_topk_sum, "num_topk_groups": num_topk_groups}

    params = {
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "num_groups": num_groups,
        "num_topk_sum": num_topk_sum,
        "num_topk_groups": num_topk_groups,
    }
    return BenchCase(_NAME, params, make, num_tokens * (4 * num_experts + 8 * num_topk_groups))
