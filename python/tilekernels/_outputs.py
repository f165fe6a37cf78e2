"""Uninitialised outputs from torch's allocator.

An operator asks for an output by a request, `(dtype, alignment, *sizes)`, in the place of the tensor: the extension
makes it after its check and before the launch, which takes 2 us less than doing the three from Python (measured
2026-12-01 on an H200). Alignment 0 is a dense tensor. Otherwise it is a matrix that is stored column after column, each
starting on a multiple of `alignment` rows; its storage owns the rows in between, outside the view. A size is a number,
or what `size_of` makes; a request of those alone is the same for every call.
"""

from collections.abc import Sequence
from typing import Any

import torch

from .layout import align, ceildiv

__all__ = [
    "empty_batch",
    "empty_matrix",
    "empty_sf",
    "is_request",
    "make_output",
    "requests_of",
    "size_of",
    "with_made",
]


def size_of(argument: int, dim: int, factor: int = 1, divisor: int = 1) -> tuple[int, int, int, int]:
    """An output's size that follows from an argument of the kernel: its size times factor, over divisor, rounded up."""
    return argument, dim, factor, divisor


_DTYPES = tuple(each for each in vars(torch).values() if isinstance(each, torch.dtype))


def requests_of(*sizes: Any) -> dict[Any, Any]:
    """The request for a dense output of each dtype: a call looks its own up, as building one takes 0.2 us."""
    return {dtype: (dtype, 0, *sizes) for dtype in _DTYPES}


def is_request(value: object) -> bool:
    return type(value) is tuple and len(value) > 2 and isinstance(value[0], torch.dtype)


def with_made(outputs: Sequence[Any], made: Any) -> list[Any]:
    """The outputs of a call as it was handed them, but what it made in the place of its requests."""
    rest = iter(made if type(made) is tuple else (made,))
    return [next(rest) if is_request(each) else each for each in outputs]


def make_output(request: tuple[Any, ...], args: Sequence[Any], device: torch.device | None) -> torch.Tensor:
    """What the extension makes of a request, for tensors that it leaves to torch. args: those of the kernel."""
    dtype, alignment, *sizes = request
    sizes = [_derive(size, args) if type(size) is tuple else size for size in sizes]
    if alignment:
        num_rows, num_columns = sizes
        return empty_sf(num_rows, num_columns, dtype, alignment, device)
    return torch.empty(sizes, dtype=dtype, device=device)


def _derive(size: tuple[int, int, int, int], args: Sequence[Any]) -> int:
    argument, dim, factor, divisor = size
    columns: int = ceildiv(args[argument].shape[dim] * factor, divisor)
    return columns


# `torch.empty_strided` with the strides written out returns a microsecond sooner than `torch.empty`.


def empty_matrix(num_rows: int, num_cols: int, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """A dense (num_rows, num_cols) tensor, with the strides that `torch.empty` gives it."""
    return torch.empty_strided((num_rows, num_cols), (num_cols or 1, 1), dtype=dtype, device=device)


def empty_batch(
    num_batches: int, num_rows: int, num_cols: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A dense (num_batches, num_rows, num_cols) tensor, with the strides that `torch.empty` gives it."""
    row_stride = num_cols or 1
    strides = ((num_rows or 1) * row_stride, row_stride, 1)
    return torch.empty_strided((num_batches, num_rows, num_cols), strides, dtype=dtype, device=device)


def empty_sf(
    num_rows: int, num_columns: int, dtype: torch.dtype, alignment: int, device: torch.device | None
) -> torch.Tensor:
    """An uninitialised scale tensor of that many stored rows and columns.

    alignment: 0 for row-major; else the tensor is column-major and owns padding rows outside the view, up to a multiple
    of `alignment`.
    """
    if not alignment:
        return empty_matrix(num_rows, num_columns, dtype, device)
    pitch = align(num_rows, alignment)
    padded = torch.empty_strided((pitch, num_columns), (1, pitch), dtype=dtype, device=device)
    return padded if pitch == num_rows else padded[:num_rows]
