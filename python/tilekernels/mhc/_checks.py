"""Checks of what a kernel's signature does not say: the number of residual streams, and shapes before flattening."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import argument_error, argument_type_error

# Numbers of residual streams that kernels are built for
MULTS = (2, 4, 8)


def check_tensor(operator: str, argument: str, value: Any, dtype: torch.dtype, num_dims: int | None = None) -> None:
    """Raises unless value is a tensor of that dtype and number of dimensions."""
    if not isinstance(value, torch.Tensor):
        raise argument_type_error(operator, argument, "be a tensor", type(value).__name__)
    if value.dtype != dtype:
        names = [str(each).removeprefix("torch.") for each in (dtype, value.dtype)]
        raise argument_type_error(operator, argument, f"be {names[0]}", names[1])
    if num_dims is not None and value.ndim != num_dims:
        raise argument_error(operator, argument, f"have {num_dims} dimensions", value.ndim)


def check_mult(operator: str, argument: str, value: int) -> int:
    """The number of residual streams as an int."""
    if value not in MULTS:
        raise argument_error(operator, argument, "have 2, 4 or 8 residual streams", value)
    return int(value)


def mult_of(operator: str, argument: str, value: Any, dtype: torch.dtype, num_dims: int, dim: int) -> int:
    """The number of residual streams that a dimension of `value` has."""
    check_tensor(operator, argument, value, dtype, num_dims)
    return check_mult(operator, argument, value.shape[dim])


def mult_of_columns(operator: str, argument: str, value: Any) -> int:
    """The number m of residual streams of a (num_tokens, m * (m + 2)) tensor of mixes."""
    check_tensor(operator, argument, value, torch.float32, 2)
    for mult in MULTS:
        if value.shape[1] == mult * (mult + 2):
            return mult
    raise argument_error(operator, argument, "have 8, 24 or 80 columns", value.shape[1])


def mixes_of(operator: str, argument: str, fn: Any) -> int:
    """The number of mixes that a matrix (num_mixes, num_channels) makes."""
    check_tensor(operator, argument, fn, torch.float32, 2)
    if fn.shape[0] not in (mult * (mult + 2) for mult in MULTS):
        raise argument_error(operator, argument, "have 8, 24 or 80 rows", fn.shape[0])
    return int(fn.shape[0])


def flatten(
    operator: str, argument: str, value: Any, dtype: torch.dtype, leading: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """(*leading, *sizes) as (num_tokens, *sizes), a view; raises unless that is value's shape and it is dense."""
    check_tensor(operator, argument, value, dtype)
    expected = (*leading, *sizes)
    if tuple(value.shape) != expected:
        raise argument_error(operator, argument, f"have shape {show(expected)}", show(value.shape))
    if not value.is_contiguous():
        raise argument_error(operator, argument, "be contiguous", f"strides {value.stride()}")
    if len(leading) == 1:
        result: torch.Tensor = value
        return result
    flat: torch.Tensor = value.view(count(leading), *sizes)
    return flat


def count(leading: Sequence[int]) -> int:
    """The number of tokens that the leading dimensions hold."""
    num_tokens = 1
    for size in leading:
        num_tokens *= size
    return num_tokens


def show(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))})"
