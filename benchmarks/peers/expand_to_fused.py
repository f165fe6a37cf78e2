"""Peer of moe.expand_to_fused in Triton: each token's row is read once and written to all its places."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest

# (columns of a block, warps)
SETTINGS = [(1024, 4), (2048, 4), (4096, 8), (8192, 8)]


@triton.jit
def _expand(
    x, positions, experts, out, num_tokens, hidden, slots: tl.constexpr, columns: tl.constexpr
):  # fmt: skip
    """The first programs copy tokens, those behind them clear padding rows."""
    at = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < hidden
    if at < num_tokens:
        row = tl.load(x + at * hidden + column, inside)
        for slot in tl.static_range(slots):
            position = tl.load(positions + at * slots + slot).to(tl.int64)
            if position >= 0:
                tl.store(out + position * hidden + column, row, inside)
    else:
        position = at - num_tokens
        if tl.load(experts + position) < 0:
            tl.store(out + position * hidden + column, tl.zeros((columns,), out.dtype.element_ty), inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    if operator != "moe.expand_to_fused":
        return {}
    inputs = [kwargs[name] for name in ("x", "token_topk_to_pos", "pos_to_expert")]
    return {"triton": fastest([functools.partial(launch, *inputs, *setting) for setting in SETTINGS])}


def launch(x: torch.Tensor, positions: torch.Tensor, experts: torch.Tensor, columns: int, warps: int) -> torch.Tensor:
    num_tokens, slots = positions.shape
    hidden, num_positions = x.shape[1], experts.shape[0]
    out = torch.empty((num_positions, hidden), dtype=x.dtype, device=x.device)
    grid = (num_tokens + num_positions, triton.cdiv(hidden, columns))
    _expand[grid](x, positions, experts, out, num_tokens, hidden, slots, columns, num_warps=warps)
    return out
