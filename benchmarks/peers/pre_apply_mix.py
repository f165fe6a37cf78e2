"""Peer of mhc.mhc_pre_apply_mix_fwd in Triton."""

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
def _apply_mix(x, mix, o, hidden, streams: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < hidden
    total = tl.zeros((columns,), tl.float32)
    for stream in tl.static_range(streams):
        weight = tl.load(mix + row * streams + stream)
        total += weight * tl.load(x + (row * streams + stream) * hidden + column, inside, other=0.0).to(tl.float32)
    tl.store(o + row * hidden + column, total.to(tl.bfloat16), inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    if operator != "mhc.mhc_pre_apply_mix_fwd":
        return {}
    o = torch.empty_like(kwargs["o"])
    return {"triton": fastest([functools.partial(launch, kwargs["x"], kwargs["mix"], o, *each) for each in SETTINGS])}


def launch(x: torch.Tensor, mix: torch.Tensor, o: torch.Tensor, columns: int, warps: int) -> torch.Tensor:
    num_tokens, streams, hidden = x.shape
    _apply_mix[(num_tokens, triton.cdiv(hidden, columns))](x, mix, o, hidden, streams, columns, num_warps=warps)
    return o
