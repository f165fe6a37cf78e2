"""Peer of quant.swiglu_forward_and_per_token_cast of all rows, bf16 to e4m3 with packed scales, in Triton."""

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
SETTINGS = [(1, 1), (2, 2), (4, 4), (8, 4), (8, 8)]
_WORD = 4  # exponents in an int32


@triton.jit
def _swiglu(
    x, out, out_sf, num_rows, hidden, x_stride, sf_stride, clamp_value, clamped: tl.constexpr, rows: tl.constexpr,
    groups: tl.constexpr, group: tl.constexpr,
):  # fmt: skip
    width: tl.constexpr = groups * group
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = (row < num_rows)[:, None] & (column < hidden)[None, :]
    at = x + row.to(tl.int64)[:, None] * x_stride + column[None, :]
    gate = tl.load(at, inside, other=0.0).to(tl.float32)
    value = tl.load(at + hidden, inside, other=0.0).to(tl.float32)
    if clamped:
        gate = tl.minimum(gate, clamp_value)
        value = tl.minimum(tl.maximum(value, -clamp_value), clamp_value)
    values = tl.reshape(gate / (1.0 + tl.exp(-gate)) * value, (rows, groups, group))
    amax = tl.maximum(tl.max(tl.abs(values), axis=2), 1e-4)
    bits = (amax * (1.0 / 448.0)).to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    word = tl.sum(exponent << (8 * tl.arange(0, groups))[None, :], axis=1)
    tl.store(out_sf + tl.program_id(1).to(tl.int64) * sf_stride + row, word, row < num_rows)
    cast = tl.reshape(values * inverse[:, :, None], (rows, width)).to(tl.float8e4nv)
    tl.store(out + row.to(tl.int64)[:, None] * hidden + column[None, :], cast, inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    x, group = kwargs["x"], kwargs.get("num_per_channels", 0)
    if operator != "quant.swiglu_forward_and_per_token_cast" or not kwargs.get("use_packed_ue8m0"):
        return {}
    others = ("psum_num_tokens_per_expert", "topk_weights", "clamped_count")
    if any(kwargs.get(name) is not None for name in others) or x.shape[1] // 2 % (_WORD * group):
        return {}
    call = functools.partial(swiglu, x, group, kwargs.get("clamp_value"))
    return {"triton": fastest([functools.partial(call, *setting) for setting in SETTINGS])}


def swiglu(
    x: torch.Tensor, group: int, clamp_value: float | None, rows: int, warps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, hidden = x.shape[0], x.shape[1] // 2
    out = torch.empty((num_rows, hidden), dtype=torch.float8_e4m3fn, device=x.device)
    padded = align(num_rows, 4)
    words = torch.empty((hidden // (_WORD * group), padded), dtype=torch.int32, device=x.device)
    grid = (triton.cdiv(num_rows, rows), hidden // (_WORD * group))
    _swiglu[grid](
        x, out, words, num_rows, hidden, x.stride(0), padded, clamp_value or 0.0, clamp_value is not None, rows, _WORD,
        group, num_warps=warps,
    )  # fmt: skip
    return out, words.t()[:num_rows]
