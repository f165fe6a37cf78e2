"""What the tests of the gates share: logits of every kind, ranking in plain Python, tensors that every gate
refuses, repetition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tests.refusals import Refusal
from tilekernels.testing import assert_equal

# normal: ranking is easy; ties, constant, zeros: the index decides; infinite, nan: where numbers end; tiny: subnormal
# scores; wide: where the scoring functions saturate
KINDS = ("normal", "ties", "constant", "zeros", "infinite", "nan", "tiny", "wide")
FINITE_KINDS = ("normal", "ties", "constant", "zeros", "tiny", "wide")


def make_logits(kind: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    normal = torch.randn(shape, device=device)
    if kind == "ties":
        return torch.randint(-2, 3, shape, device=device).float()
    if kind == "constant":
        return torch.full(shape, -1.5, device=device)
    if kind == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if kind in ("infinite", "nan"):
        chosen = torch.randint(0, 4, shape, device=device)
        other = torch.inf if kind == "infinite" else torch.nan
        return normal.masked_fill(chosen == 0, -torch.inf).masked_fill(chosen == 1, other)
    if kind == "tiny":
        return normal * 2.0**-130
    return normal * 60 if kind == "wide" else normal


def rank(row: Sequence[float], num_topk: int) -> list[int]:
    """The best of a row by sorting: descending, NaN behind everything, ties by index."""

    def order(at: int) -> tuple[bool, float]:
        return math.isnan(row[at]), 0.0 if math.isnan(row[at]) else -row[at]

    return sorted(range(len(row)), key=order)[:num_topk]


def assert_repeats(call: Callable[[], Any], times: int = 100) -> None:
    """The same bytes every time."""
    first = [tensor.clone() for tensor in _tensors(call())]
    for _ in range(times - 1):
        for x, y in zip(_tensors(call()), first, strict=True):
            assert_equal(x, y)


def tensor_refusals(
    argument: str, dtype: torch.dtype, shape: tuple[int, ...], make_others: Callable[[str], dict[str, Any]]
) -> Iterator[Refusal]:
    """Wrong dtypes, ranks, strides and kinds of one dense tensor; make_others(device) gives all arguments of a
    valid call."""
    name = str(dtype).removeprefix("torch.")

    def refusal(label: str, make: Callable[[str], Any], text: str) -> Refusal:
        return Refusal(f"{argument} {label}", lambda device: make_others(device) | {argument: make(device)}, text)

    for wrong in (torch.bfloat16, torch.float64, torch.float32, torch.int32, torch.int64, torch.uint8, torch.bool):
        if wrong != dtype:
            text = rf"{argument} must be {name}, got {str(wrong).removeprefix('torch.')}"
            yield refusal(
                f"dtype {wrong}", lambda device, wrong=wrong: torch.zeros(shape, device=device).to(wrong), text
            )
    for ranks in (len(shape) + 1, len(shape) + 2):
        text = rf"{argument} must have {len(shape)} dimensions?, got {ranks}.*"
        yield refusal(
            f"{ranks} dimensions", lambda device, ranks=ranks: torch.zeros((2,) * ranks, device=device).to(dtype), text
        )

    def every_second(device: str) -> torch.Tensor:
        return torch.zeros((*shape[:-1], 2 * shape[-1]), device=device).to(dtype)[..., ::2]

    yield refusal("every second column", every_second, rf"{argument} must have strides .*, got .*")
    for value in (1, "x", (1,), {}):
        kind = type(value).__name__
        yield refusal(f"is a {kind}", lambda device, value=value: value, rf"{argument} must be a .*tensor.*, got .*")


def _tensors(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)
