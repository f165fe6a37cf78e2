"""Peer of quant.cast_back and per_token_cast_back from e4m3 with row-major fp32 scales, in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest

# (rows, columns) of a tile, warps
SETTINGS = [(1, 2048, 4), (4, 512, 4), (8, 512, 4), (16, 256, 4), (16, 512, 8)]
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@triton.jit
def _cast_back(
    x, sf, out, num_rows, num_cols, x_stride, sf_stride, block_rows: tl.constexpr, block_columns: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * x_stride + column[None, :], inside).to(tl.float32)
    scales = tl.load(sf + (row // block_rows)[:, None] * sf_stride + (column // block_columns)[None, :], inside)
    to = out + row.to(tl.int64)[:, None] * num_cols + column[None, :]
    tl.store(to, (values * scales).to(out.dtype.element_ty), inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    (data, sf), dtype = kwargs["x"], _DTYPES[kwargs["fmt"]]
    block = kwargs.get("x_block_size") or (1, kwargs["num_per_channels"])
    if data.dtype != torch.float8_e4m3fn or sf.dtype != torch.float32 or sf.stride(1) != 1:
        return {}
    return {"triton": fastest([functools.partial(cast_back, data, sf, dtype, block, *each) for each in SETTINGS])}


def cast_back(
    data: torch.Tensor,
    sf: torch.Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    rows: int,
    columns: int,
    warps: int,
) -> torch.Tensor:
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    grid = (triton.cdiv(data.shape[0], rows), triton.cdiv(data.shape[1], columns))
    _cast_back[grid](
        data, sf, out, *data.shape, data.stride(0), sf.stride(0), *block, rows, columns, num_warps=warps
    )  # fmt: skip
    return out
