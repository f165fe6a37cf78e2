"""Routing weights over their sum, in the orders of summation of both generations of the gate."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..errors import argument_error, shape_of
from ..testing.cases import BenchCase
from ._gate import EPSILON, MAX_TOPK, butterfly_sum, sequential_sum

_DENOMINATOR = (torch.float32, 0, size_of(0, 0))
_NORMALIZED = (*_DENOMINATOR, size_of(0, 1))


def normalize_weight(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(denominator, normalized): each token's sum of weights, and the weights over it.

    topk_weights: (num_tokens, num_topk) fp32, dense, num_topk at most 32. The sum is the gate's: pairs at distance
    16, 8, 4, 2 and 1, then 1e-20. Returns fp32 (num_tokens,) and (num_tokens, num_topk); the division is IEEE's.
    """
    num_topk = shape_of("moe.normalize_weight", "topk_weights", topk_weights, 2)[1]
    if num_topk > MAX_TOPK:
        raise argument_error("moe.normalize_weight", "topk_weights", f"have at most {MAX_TOPK} columns", num_topk)
    return _normalize(topk_weights, "butterfly")


def normalize_weight_sequential(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`normalize_weight` of generation 1: the sum starts at 1e-20 and goes from left to right, for any number of
    weights."""
    return _normalize(topk_weights, "sequential")


def normalize_weight_ref(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`normalize_weight` in plain torch."""
    denominator = butterfly_sum(topk_weights) + EPSILON
    return denominator[:, 0].contiguous(), topk_weights / denominator


def normalize_weight_sequential_ref(topk_weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`normalize_weight_sequential` in plain torch."""
    denominator = sequential_sum(topk_weights)
    return denominator[:, 0].contiguous(), topk_weights / denominator


_REFERENCES = {"butterfly": normalize_weight_ref, "sequential": normalize_weight_sequential_ref}


def _normalize(topk_weights: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    num_topk = shape_of("moe.normalize_weight", "topk_weights", topk_weights, 2)[1]
    if num_topk < 1:
        raise argument_error("moe.normalize_weight", "topk_weights", "have at least 1 column", num_topk)
    return _normalize_weight(topk_weights, _DENOMINATOR, _NORMALIZED, order)


def _normalize_weight_cpu(
    topk_weights: torch.Tensor, denominator: torch.Tensor, normalized: torch.Tensor, order: str
) -> None:
    results = _REFERENCES[order](topk_weights)
    denominator.copy_(results[0])
    normalized.copy_(results[1])


_normalize_weight = kernel("moe.normalize_weight", cpu=_normalize_weight_cpu)


def bench_cases() -> list[BenchCase]:
    """Sizes of the published benchmark, a few tokens, and many."""
    sizes = [(32, 8), (4096, 6), (18589, 6), (21671, 8), (65536, 8), (262144, 8)]
    return [_case(*size) for size in sizes]


def _case(num_tokens: int, num_topk: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {"topk_weights": torch.rand((num_tokens, num_topk), device=device)}

    params = {"num_tokens": num_tokens, "num_topk": num_topk}
    return BenchCase("moe.normalize_weight", params, make, num_tokens * (8 * num_topk + 4))
