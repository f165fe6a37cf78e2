"""Random residual streams and mixes for tests, and views of them that lie badly in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# (num_tokens, m, hidden): none, one, ragged in both, whole and partial blocks, odd channels
SHAPES = [
    (0, 4, 256),
    (1, 4, 8),
    (3, 4, 1),
    (5, 4, 1283),
    (2, 4, 1024),
    (7, 2, 2560),
    (7, 2, 129),
    (3, 8, 1288),
    (3, 8, 57),
    (2, 4, 7168),
]

DTYPES = {"activation": torch.bfloat16, "mix": torch.float32}


@dataclass(frozen=True)
class Batch:
    """Inputs of one shape; tensors are made in the order of the calls."""

    num_tokens: int
    mult: int
    hidden: int
    device: str = "cpu"

    def layer(self) -> torch.Tensor:
        return torch.randn((self.num_tokens, self.hidden), device=self.device).bfloat16()

    def streams(self) -> torch.Tensor:
        return torch.randn((self.num_tokens, self.mult, self.hidden), device=self.device).bfloat16()

    def mix(self) -> torch.Tensor:
        return torch.randn((self.num_tokens, self.mult), device=self.device)

    def matrix(self) -> torch.Tensor:
        return torch.randn((self.num_tokens, self.mult, self.mult), device=self.device)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    """The same values, dense, one element behind a multiple of 16 bytes."""
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    storage[1:] = x.reshape(-1)
    return storage[1:].view(x.shape)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """The largest difference is below `tolerance` times the largest expected magnitude."""
    assert actual.shape == expected.shape
    if actual.numel() == 0:
        return
    largest = expected.double().abs().max()
    difference = (actual.double() - expected.double()).abs().max()
    assert difference <= tolerance * largest, f"largest difference {difference:.3e}, largest value {largest:.3e}"
