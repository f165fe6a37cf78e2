"""Invalid tensors of expert indices, as every operator that takes one has to refuse them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.refusals import Refusal


def index_refusals(
    argument: str, others: dict[str, Any], dtypes: tuple[torch.dtype, ...] = (torch.int64,)
) -> Iterator[Refusal]:
    """`argument` is the tensor's name, `others` the remaining arguments, `dtypes` those that are taken."""
    taken = dtypes[0]

    def refusal(label: str, make: Any, text: str) -> Refusal:
        return Refusal(label, lambda device: {argument: make(device), **others}, text)

    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float64):
        if dtype in dtypes:
            continue
        name = str(dtype).removeprefix("torch.")

        def wrong_dtype(device: str, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros((4, 2), device=device).to(dtype)

        yield refusal(f"dtype {name}", wrong_dtype, rf"{argument} must be .*int64.*, got {name}")
    for rank in (0, 1, 3):

        def wrong_rank(device: str, rank: int = rank) -> torch.Tensor:
            return torch.zeros((4,) * rank, device=device, dtype=taken)

        yield refusal(f"{rank} dimensions", wrong_rank, rf"{argument} must have 2 dimensions, got {rank}.*")
    views: dict[str, Any] = {
        "transposed": lambda device: torch.zeros((2, 4), device=device, dtype=taken).t(),
        "every second column": lambda device: torch.zeros((4, 4), device=device, dtype=taken)[:, ::2],
        "every second row": lambda device: torch.zeros((8, 2), device=device, dtype=taken)[::2],
    }
    for label, make in views.items():
        yield refusal(f"strides: {label}", make, rf"{argument} must have strides .*, got .*")
    for value in (None, [[1]], 1, "indices"):
        label = type(value).__name__
        yield refusal(label, lambda device, value=value: value, rf"{argument} must be a .*tensor, got .*")


def int_refusals(
    argument: str, values: tuple[Any, ...], requirement: str, make_others: Any, label: str = ""
) -> Iterator[Refusal]:
    """Values of an int argument that are refused, and others that are no ints; `make_others(device)`: the rest."""

    def refusal(value: Any, text: str) -> Refusal:
        return Refusal(
            f"{argument} {value}{label}",
            lambda device: {**make_others(device), argument: value},
            f"{argument} must {text}",
        )

    for value in values:
        yield refusal(value, rf"{requirement}, got {value}")
    for wrong in (1.0, "1", None):
        yield refusal(wrong, rf"be an int, got {type(wrong).__name__}")
