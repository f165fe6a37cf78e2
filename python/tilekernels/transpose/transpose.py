"""Transposition of a matrix, or of each matrix of a batch, into a dense tensor: exact copies of the elements."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import requests_of, size_of
from ..testing.cases import BenchCase

# By the dtype of x; where nothing is found, x is refused before the output is looked at.
_TRANSPOSED = requests_of(size_of(0, 1), size_of(0, 0))
_BATCH_TRANSPOSED = requests_of(size_of(0, 0), size_of(0, 2), size_of(0, 1))


def transpose(x: torch.Tensor) -> torch.Tensor:
    """The transpose of x as a new dense tensor.

    x: (M, N) of any dtype of 1, 2 or 4 bytes, unit column stride, any row stride. Returns (N, M) of that dtype.
    """
    return _transpose(x, _TRANSPOSED.get(getattr(x, "dtype", None)))


def batched_transpose(x: torch.Tensor) -> torch.Tensor:
    """The transpose of each matrix of a batch as a new dense tensor.

    x: (B, M, N) of any dtype of 1, 2 or 4 bytes, unit column stride, any row and batch stride. Returns (B, N, M).
    """
    return _batched_transpose(x, _BATCH_TRANSPOSED.get(getattr(x, "dtype", None)))


def transpose_ref(x: torch.Tensor) -> torch.Tensor:
    """`transpose` in plain torch."""
    return x.t().clone(memory_format=torch.contiguous_format)


def batched_transpose_ref(x: torch.Tensor) -> torch.Tensor:
    """`batched_transpose` in plain torch."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def _transpose_cpu(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.t())


def _batched_transpose_cpu(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x.transpose(1, 2))


_transpose = kernel("transpose.transpose", cpu=_transpose_cpu)
_batched_transpose = kernel("transpose.batched_transpose", cpu=_batched_transpose_cpu)


def bench_cases() -> list[BenchCase]:
    """Small ones, the published benchmark's (rows with a stride of twice their length, batches dense), and sizes that
    16-byte accesses do not fit: 8004 rows are a multiple of 4 bytes, 8001 of none."""
    dtypes = (torch.float8_e4m3fn, torch.bfloat16, torch.float32)
    single = [_transpose_case(8064, hidden, dtype) for hidden in (4096, 7168) for dtype in dtypes]
    batched = [_batched_case(8, 8064, hidden, dtype) for hidden in (4096, 7168) for dtype in dtypes]
    small = [_transpose_case(64, 512, torch.bfloat16), _batched_case(2, 100, 300, torch.bfloat16)]
    odd = [_transpose_case(num_rows, 7168, dtype) for num_rows in (8001, 8004) for dtype in dtypes]
    odd += [_batched_case(8, 1001, 4099, torch.bfloat16), _batched_case(8, 1002, 4098, torch.bfloat16)]
    return small + single + batched + odd


def _transpose_case(num_rows: int, num_cols: int, dtype: torch.dtype) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {"x": torch.randn((num_rows, 2 * num_cols), device=device).to(dtype)[:, :num_cols]}

    params = {"num_rows": num_rows, "num_cols": num_cols, "dtype": str(dtype).removeprefix("torch.")}
    return BenchCase("transpose.transpose", params, make, 2 * num_rows * num_cols * dtype.itemsize)


def _batched_case(num_batches: int, num_rows: int, num_cols: int, dtype: torch.dtype) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {"x": torch.randn((num_batches, num_rows, num_cols), device=device).to(dtype)}

    params = {"num_batches": num_batches, "num_rows": num_rows, "num_cols": num_cols}
    params_with_dtype = {**params, "dtype": str(dtype).removeprefix("torch.")}
    num_bytes = 2 * num_batches * num_rows * num_cols * dtype.itemsize
    return BenchCase("transpose.batched_transpose", params_with_dtype, make, num_bytes)
