"""What the operators on expert indices share: the checks of their numbers, and of values where these can be read."""

from __future__ import annotations

import torch

from ..errors import argument_error

MAX_EXPERTS = 1024  # a block counts them in shared memory


def check_below(operator: str, argument: str, indices: torch.Tensor, limit: int) -> None:
    """Raises where a value reaches `limit`: what a GPU skips without a word, the CPU path tells."""
    if type(indices) is not torch.Tensor or indices.numel() == 0:  # fake tensors hold no values
        return
    highest = int(indices.max())
    if highest >= limit:
        raise argument_error(operator, argument, f"hold values below {limit}", highest)
