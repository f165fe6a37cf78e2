"""What has no tensor to say where and what: shapes, and the seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import check_int
from .randn_like import check_dtype, fill_normal

_NAME = "rand.randn"


def randn(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, device: torch.device | str | int | None = None
) -> torch.Tensor:
    """A dense tensor of normal random numbers: randn(2, 3) or randn((2, 3)).

    dtype: float32, bfloat16 or float16, by default torch's default dtype. device: by default the current CUDA device,
    or the CPU where there is none. `randn_like` says how the numbers are made.
    """
    shape: Any = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.get_default_dtype() if dtype is None else dtype
    check_dtype(_NAME, "dtype", dtype)
    return fill_normal(torch.empty(shape, dtype=dtype, device=device))


def set_seed(seed: int) -> None:
    """Seeds torch's generators of all devices, from which `randn` draws: `torch.manual_seed`."""
    check_int("rand.set_seed", "seed", seed)
    torch.manual_seed(seed)
