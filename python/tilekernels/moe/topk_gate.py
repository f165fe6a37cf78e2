"""The indices of each token's highest expert scores."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..errors import ArgumentError, argument_error, check_int, shape_of
from ..testing.cases import BenchCase

MAX_TOPK = 32  # a warp holds one selected expert per lane
_NUM_TOKENS = size_of(0, 0)


def topk_gate(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """Expert indices by descending score, ties to the smaller index.

    scores: (num_tokens, num_experts) fp32, dense. num_topk: 1 to 32, at most num_experts.
    Returns int64 (num_tokens, num_topk). The indices of a row are distinct whatever its scores; NaN ranks below -inf.
    """
    if type(num_topk) is not int or not 0 < num_topk <= MAX_TOPK:
        check_int("moe.topk_gate", "num_topk", num_topk, 1, MAX_TOPK)
    try:
        return _topk_gate(scores, (torch.int64, 0, _NUM_TOKENS, num_topk))
    except ArgumentError:
        _, num_experts = shape_of("moe.topk_gate", "scores", scores, 2)
        if num_topk > num_experts:
            requirement = f"be at most the number of experts {num_experts}"
            raise argument_error("moe.topk_gate", "num_topk", requirement, num_topk) from None
        raise


def topk_gate_ref(scores: torch.Tensor, num_topk: int) -> torch.Tensor:
    """`topk_gate` in plain torch: the first columns of a stable descending sort, with NaN moved behind -inf."""
    is_nan = scores.isnan()
    order = torch.sort(torch.where(is_nan, -torch.inf, scores), dim=-1, descending=True, stable=True).indices
    nan_last = torch.sort(is_nan.gather(-1, order).int(), dim=-1, stable=True).indices
    return order.gather(-1, nan_last[:, :num_topk])


def _topk_gate_cpu(scores: torch.Tensor, topk_idx: torch.Tensor) -> None:
    topk_idx.copy_(topk_gate_ref(scores, topk_idx.shape[1]))


_topk_gate = kernel("moe.topk_gate", cpu=_topk_gate_cpu)


def bench_cases() -> list[BenchCase]:
    """Sizes of the published benchmark between a batch of a few tokens and a large one."""
    sizes = [(8, 256, 8), (8001, 16, 6), (8001, 72, 6), (8001, 128, 6), (8001, 256, 8), (65536, 256, 8)]
    return [_case(*size) for size in sizes]


def _case(num_tokens: int, num_experts: int, num_topk: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {"scores": torch.randn((num_tokens, num_experts), device=device), "num_topk": num_topk}

    params = {"num_tokens": num_tokens, "num_experts": num_experts, "num_topk": num_topk}
    return BenchCase("moe.topk_gate", params, make, num_tokens * (4 * num_experts + 8 * num_topk))
