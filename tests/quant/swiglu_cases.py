"""Segments of experts and extreme numbers for the tests of SwiGLU forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tilekernels import config
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


def filled_matrix(num_rows: int, num_cols: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In place of an uninitialised one: every byte is 0x5A."""
    raw = torch.full((num_rows, num_cols * dtype.itemsize), 0x5A, dtype=torch.uint8, device=device)
    return raw.view(dtype)
