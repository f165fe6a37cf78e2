"""Peer of transform.apply_rotary in Triton: query and key one after the other, in place."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest

HEADS, WARPS = (1, 4, 8, 16, 32), (1, 2, 4, 8)


@triton.jit
def _rotate(
    x, cache, positions, offset, token_stride, head_stride, cache_stride, num_heads,
    half: tl.constexpr, num: tl.constexpr, has_positions: tl.constexpr, interleaved: tl.constexpr,
    conjugate: tl.constexpr,
):  # fmt: skip
    """One token and `num` of its heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * num + tl.arange(0, num)
    inside = (head < num_heads)[:, None]
    row = (tl.load(positions + token).to(tl.int64) if has_positions else token) + offset
    column = tl.arange(0, half)
    cos = tl.load(cache + row * cache_stride + column)[None, :]
    sin = tl.load(cache + row * cache_stride + half + column)[None, :]
    if conjugate:
        sin = -sin
    start = x + token * token_stride + head[:, None] * head_stride
    if interleaved:
        at = start + tl.arange(0, 2 * half)[None, :]
        a, b = tl.split(tl.reshape(tl.load(at, inside).to(tl.float32), (num, half, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (num, 2 * half))
        tl.store(at, turned.to(x.dtype.element_ty), inside)
    else:
        at = start + column[None, :]
        a, b = tl.load(at, inside).to(tl.float32), tl.load(at + half, inside).to(tl.float32)
        tl.store(at, (a * cos - b * sin).to(x.dtype.element_ty), inside)
        tl.store(at + half, (a * sin + b * cos).to(x.dtype.element_ty), inside)


def rotate(call: dict[str, Any], heads: int, warps: int) -> list[Any]:
    """The peer's apply_rotary, for three dimensions."""
    cache, positions = call["cos_sin_cache"], call["positions"]
    for x in (call["query"], call["key"]):
        grid = (x.shape[0], triton.cdiv(x.shape[1], heads))
        _rotate[grid](
            x, cache, cache if positions is None else positions, call["seqlen_offset"],
            x.stride(0), x.stride(1), cache.stride(0), x.shape[1],
            half=x.shape[2] // 2, num=heads, has_positions=positions is not None,
            interleaved=call["interleaved"], conjugate=call["conjugate"], num_warps=warps,
        )  # fmt: skip
    return [call["query"], call["key"]]


def _clone(x: torch.Tensor) -> torch.Tensor:
    """With the gaps between rows that x has, which clone() would close."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    call = {**kwargs, **{name: _clone(kwargs[name]) for name in ("query", "key")}}
    settings = itertools.product(HEADS, WARPS)
    return {"triton": fastest([functools.partial(rotate, call, heads, warps) for heads, warps in settings])}
