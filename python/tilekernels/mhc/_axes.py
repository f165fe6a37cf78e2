"""The sizes of hyper-connections that kernels are compiled for, and the words for others."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import argument_error

# Streams of a residual; and mixes of a token: two for each stream and one for each pair
STREAMS = (2, 4, 8)
MIXES = tuple(streams * (streams + 2) for streams in STREAMS)


def num_streams(operator: str, name: str, tensor: Any) -> int:
    """The streams of a tensor (num_tokens, mhc_mult, ...), as the axis of a kernel."""
    return _axis(operator, name, tensor, 1, "streams", STREAMS)


def num_mixes(operator: str, name: str, fn: Any) -> int:
    """The rows of a matrix that makes mixes."""
    return _axis(operator, name, fn, 0, "rows", MIXES)


def _axis(operator: str, name: str, tensor: Any, dim: int, what: str, known: tuple[int, ...]) -> int:
    if not isinstance(tensor, torch.Tensor) or tensor.dim() <= dim:
        return known[1]  # the kernel's own check has the words for it
    size = tensor.shape[dim]
    if size not in known:
        raise argument_error(operator, name, f"have {', '.join(map(str, known[:-1]))} or {known[-1]} {what}", size)
    return size
