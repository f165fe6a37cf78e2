"""Segments of experts and extreme numbers for the tests of SwiGLU forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

from tilekernels import config
from tilekernels._outputs import is_request, make_output
from tilekernels.layout import align

# Ends of the range of exp, of the division and of fp32; zeros of both signs; what saturates
GATES = [0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 1e-20, 0.5, -0.5, 17.0, -17.0, 86.9, -86.9, 87.1, -87.1, 88.5, -88.5]
GATES += [88.73, -88.73, 100.0, -100.0, 104.0, -104.0, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]


def segments(counts: list[int], alignment: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ends of the experts' rows, which rows of the buffer belong to an expert)."""
    ends, valid = [], []
    for count in counts:
        ends.append(len(valid) + count)
        valid += [True] * count + [False] * (align(count, alignment) - count)
    psum = torch.tensor(ends, dtype=torch.int32, device=device)
    return psum, torch.tensor(valid, dtype=torch.bool, device=device)


@contextmanager
def token_alignment(alignment: int) -> Iterator[None]:
    original = config.get_token_alignment()
    config.set_token_alignment(alignment)
    try:
        yield
    finally:
        config.set_token_alignment(original)


def fill_outputs(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *names: str) -> None:
    """Launches of an operator's file find 0x5A in every byte of the outputs that they would be asked to make."""
    for name in names:
        monkeypatch.setattr(module, name, _with_filled_outputs(getattr(module, name)))


def _with_filled_outputs(launch: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        outputs = [make_output(each, args, args[0].device) for each in args if is_request(each)]
        for output in outputs:
            output.untyped_storage().fill_(0x5A)
        rest = iter(outputs)
        launch(*(next(rest) if is_request(each) else each for each in args))
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return call
