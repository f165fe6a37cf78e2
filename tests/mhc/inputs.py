"""What the tests of hyper-connections share: inputs at odd addresses, and gradients in float64."""

from __future__ import annotations

import torch


def place_at(x: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose first element lies `offset` elements into its storage: not on 16 bytes, if that is odd."""
    storage = torch.zeros(x.numel() + offset + 8, dtype=x.dtype, device=x.device)
    return storage[offset : offset + x.numel()].view(x.shape).copy_(x)


def randn(*shape: int, device: str, dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    """Normal numbers, `offset` elements into their storage."""
    return place_at(torch.randn(shape, device=device).to(dtype), offset)


def needs_memory(num_bytes: int) -> str:
    """Why a test with so many bytes cannot run on this GPU now; empty if it can."""
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
    return "" if free > 1.2 * num_bytes else f"needs {num_bytes >> 30} GiB of GPU memory"
