"""Leading dimensions: these functions take any, the operators one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....errors import argument_error


def num_tokens_of(leading: Sequence[int]) -> int:
    """How many tokens the leading dimensions hold."""
    num_tokens = 1
    for size in leading:
        num_tokens *= size
    return num_tokens


def merge_leading(x: torch.Tensor, num_kept: int) -> torch.Tensor:
    """All but the last `num_kept` dimensions as one; dense, copied if x is not."""
    split = x.ndim - num_kept
    return x.contiguous().view(num_tokens_of(x.shape[:split]), *x.shape[split:])


def check_num_dims(function: str, argument: str, x: torch.Tensor, lowest: int) -> None:
    if x.ndim < lowest:
        raise argument_error(function, argument, f"have at least {lowest} dimensions", x.ndim)


def check_last(function: str, argument: str, x: torch.Tensor, size: int) -> None:
    if x.shape[-1] != size:
        raise argument_error(function, argument, f"have a last dimension of {size}", x.shape[-1])
