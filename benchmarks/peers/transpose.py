"""Peers of transpose.transpose and batched_transpose: tiles through Triton's registers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest

# (rows, columns) of a tile, warps
SETTINGS = [(64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 8), (32, 128, 4)]
_CARRIERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@triton.jit
def _transpose(
    x, out, num_rows, num_cols, batch_stride, row_stride, rows: tl.constexpr, columns: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
    at = x + batch * batch_stride + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    tile = tl.load(at, inside)
    to = out + batch * num_rows * num_cols + column.to(tl.int64)[:, None] * num_rows + row[None, :]
    tl.store(to, tl.trans(tile), tl.trans(inside))


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    x = kwargs["x"].view(_CARRIERS[kwargs["x"].element_size()])
    x = x if x.dim() == 3 else x[None]
    return {"triton": fastest([functools.partial(transpose, x, *setting) for setting in SETTINGS])}


def transpose(x: torch.Tensor, rows: int, columns: int, warps: int) -> torch.Tensor:
    num_batches, num_rows, num_cols = x.shape
    out = torch.empty((num_batches, num_cols, num_rows), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_cols, columns), num_batches)
    _transpose[grid](x, out, num_rows, num_cols, x.stride(0), x.stride(1), rows, columns, num_warps=warps)
    return out
