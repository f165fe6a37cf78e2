"""Peer of quant.per_token_cast from bf16 and fp32 to e4m3 with scales of 32 to 128 channels, in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest
from tilekernels.layout import align

# (rows of a block, warps)
SETTINGS = [(1, 1), (2, 2), (4, 4), (8, 4), (8, 8), (16, 8)]
_WORD = 4  # exponents in an int32


@triton.jit
def _cast(
    x, out, out_sf, num_rows, num_cols, x_stride, sf_stride, rows: tl.constexpr, groups: tl.constexpr,
    group: tl.constexpr, packed: tl.constexpr,
):  # fmt: skip
    """`rows` rows of `groups` groups: a word's four where scales are packed, column after column."""
    width: tl.constexpr = groups * group
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = (row < num_rows)[:, None] & (column < num_cols)[None, :]
    at = row.to(tl.int64)[:, None] * x_stride + column[None, :]
    values = tl.reshape(tl.load(x + at, inside, other=0.0).to(tl.float32), (rows, groups, group))
    amax = tl.maximum(tl.max(tl.abs(values), axis=2), 1e-4)
    sf = amax * (1.0 / 448.0)
    place = tl.program_id(1) * groups + tl.arange(0, groups)
    if packed:
        bits = sf.to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        shifted = exponent << (8 * tl.arange(0, groups))[None, :]
        tl.store(out_sf + tl.program_id(1).to(tl.int64) * sf_stride + row, tl.sum(shifted, axis=1), row < num_rows)
    else:
        inverse = 448.0 / amax
        to = out_sf + row.to(tl.int64)[:, None] * sf_stride + place[None, :]
        tl.store(to, sf, (row < num_rows)[:, None] & (place * group < num_cols)[None, :])
    cast = tl.reshape(values * inverse[:, :, None], (rows, width)).to(tl.float8e4nv)
    tl.store(out + row.to(tl.int64)[:, None] * num_cols + column[None, :], cast, inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    x, group = kwargs["x"], kwargs["num_per_channels"]
    packed, col_major = (bool(kwargs.get(name)) for name in ("use_packed_ue8m0", "use_tma_aligned_col_major_sf"))
    is_ours = operator == "quant.per_token_cast" and isinstance(x, torch.Tensor) and kwargs["fmt"] == "e4m3"
    plain = not kwargs.get("stochastic_cast") and packed == col_major == bool(kwargs.get("round_sf"))
    if not is_ours or not plain or group not in (32, 64, 128) or x.shape[1] % (_WORD * group):
        return {}
    return {"triton": fastest([functools.partial(cast, x, group, packed, *setting) for setting in SETTINGS])}


def cast(x: torch.Tensor, group: int, packed: bool, rows: int, warps: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_cols = x.shape
    out = torch.empty((num_rows, num_cols), dtype=torch.float8_e4m3fn, device=x.device)
    if packed:
        padded = align(num_rows, 4)
        words = torch.empty((num_cols // (_WORD * group), padded), dtype=torch.int32, device=x.device)
        sf, sf_stride = words.t()[:num_rows], padded
    else:
        sf = torch.empty((num_rows, num_cols // group), device=x.device)
        sf_stride = sf.stride(0)
    grid = (triton.cdiv(num_rows, rows), num_cols // (_WORD * group))
    _cast[grid](
        x, out, sf, num_rows, num_cols, x.stride(0), sf_stride, rows, _WORD, group, packed, num_warps=warps
    )  # fmt: skip
    return out, sf
