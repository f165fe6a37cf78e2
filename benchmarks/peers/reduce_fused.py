"""Peer of moe.reduce_fused for plain rows, in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest

# (columns of a block, warps)
SETTINGS = [(512, 2), (1024, 4), (2048, 4), (2048, 8)]


@triton.jit
def _reduce(x, weights, positions, out, hidden, slots: tl.constexpr, columns: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < hidden
    total = tl.zeros((columns,), tl.float32)
    for slot in tl.static_range(slots):
        position = tl.load(positions + token * slots + slot).to(tl.int64)
        if position >= 0:
            weight = tl.load(weights + token * slots + slot)
            total += weight * tl.load(x + position * hidden + column, inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    if not isinstance(kwargs["x"], torch.Tensor) or kwargs["fp8_format"] or kwargs["topk_weights"] is None:
        return {}
    inputs = [kwargs[name] for name in ("x", "topk_weights", "token_topk_to_pos")]
    return {"triton": fastest([functools.partial(launch, *inputs, *setting) for setting in SETTINGS])}


def launch(x: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, columns: int, warps: int) -> torch.Tensor:
    num_tokens, slots = positions.shape
    hidden = x.shape[1]
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    grid = (num_tokens, triton.cdiv(hidden, columns))
    _reduce[grid](x, weights, positions, out, hidden, slots, columns, num_warps=warps)
    return out
