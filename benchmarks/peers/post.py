"""Peer of mhc.mhc_post_fwd in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest

# (columns of a block, warps)
SETTINGS = [(256, 2), (512, 4), (1024, 4), (1024, 8)]


@triton.jit
def _post(x, residual, post, comb, out, hidden, streams: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < hidden
    stream = tl.arange(0, streams)
    at = (row * streams + stream[:, None]) * hidden + column[None, :]
    layer = tl.load(x + row * hidden + column, inside, other=0.0).to(tl.float32)
    streams_in = tl.load(residual + at, inside[None, :], other=0.0).to(tl.float32)
    for to in tl.static_range(streams):
        weights = tl.load(comb + (row * streams + stream) * streams + to)
        total = tl.load(post + row * streams + to) * layer + tl.sum(weights[:, None] * streams_in, axis=0)
        tl.store(out + (row * streams + to) * hidden + column, total.to(tl.bfloat16), inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    if operator != "mhc.mhc_post_fwd":
        return {}
    inputs = [kwargs[name] for name in ("x", "residual", "post_layer_mix", "comb_res_mix")]
    return {"triton": fastest([functools.partial(launch, *inputs, *setting) for setting in SETTINGS])}


def launch(
    x: torch.Tensor, residual: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, columns: int, warps: int
) -> torch.Tensor:
    out = torch.empty_like(residual)
    streams, hidden = residual.shape[-2:]
    grid = (residual.numel() // (streams * hidden), triton.cdiv(hidden, columns))
    _post[grid](x, residual, post, comb, out, hidden, streams, columns, num_warps=warps)
    return out
