"""What the gate's operators ask of a hidden size, in words: the kernels' own guards would not name the argument."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import argument_error

HIDDEN_MULTIPLE = 256
GATE_LEAST_HIDDEN = 512


def check_hidden(operator: str, argument: str, tensor: Any, rank: int, least: int = 0) -> None:
    """Raises unless the last of `rank` dimensions is a multiple of 256 and at least `least`; other mistakes are for
    the kernel's check."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != rank:
        return
    hidden = tensor.shape[-1]
    if hidden % HIDDEN_MULTIPLE or hidden < least:
        at_least = f", at least {least}" if least else ""
        raise argument_error(operator, argument, f"have a multiple of {HIDDEN_MULTIPLE} columns{at_least}", hidden)
