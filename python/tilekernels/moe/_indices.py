"""What the operators on expert indices share: the checks of their numbers, and of values where these can be read."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import argument_error, argument_type_error

MAX_EXPERTS = 1024  # a block counts them in shared memory


def check_int(operator: str, argument: str, value: Any, lowest: int, highest: int | None = None) -> None:
    """Raises unless `value` is an int from `lowest` to `highest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise argument_type_error(operator, argument, "be an int", type(value).__name__)
    if highest is None and value < lowest:
        raise argument_error(operator, argument, f"be at least {lowest}", value)
    if highest is not None and not lowest <= value <= highest:
        raise argument_error(operator, argument, f"be between {lowest} and {highest}", value)


def check_below(operator: str, argument: str, indices: torch.Tensor, limit: int) -> None:
    """Raises where a value reaches `limit`: what a GPU skips without a word, the CPU path tells."""
    if type(indices) is not torch.Tensor or indices.numel() == 0:  # fake tensors hold no values
        return
    highest = int(indices.max())
    if highest >= limit:
        raise argument_error(operator, argument, f"hold values below {limit}", highest)
