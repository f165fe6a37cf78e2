"""Peers of mhc.expand_to_mhc_fwd and its gradient, in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest

# (columns of a block, warps)
SETTINGS = [(512, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 8)]


@triton.jit
def _expand(x, o, hidden, streams: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < hidden
    values = tl.load(x + row * hidden + column, inside)
    for stream in tl.static_range(streams):
        tl.store(o + (row * streams + stream) * hidden + column, values, inside)


@triton.jit
def _reduce(o_grad, x_grad, hidden, streams: tl.constexpr, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    inside = column < hidden
    total = tl.zeros((columns,), tl.float32)
    for stream in tl.static_range(streams):
        total += tl.load(o_grad + (row * streams + stream) * hidden + column, inside, other=0.0).to(tl.float32)
    tl.store(x_grad + row * hidden + column, total.to(tl.bfloat16), inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    if operator == "mhc.expand_to_mhc_fwd":
        kernel, source, target = _expand, kwargs["x"], torch.empty_like(kwargs["o"])
        streams = target.shape[1]
    else:
        kernel, source, target = _reduce, kwargs["o_grad"], torch.empty_like(kwargs["x_grad"])
        streams = source.shape[1]
    call = functools.partial(launch, kernel, source, target, streams)
    return {"triton": fastest([functools.partial(call, *setting) for setting in SETTINGS])}


def launch(kernel: Any, source: torch.Tensor, target: torch.Tensor, streams: int, columns: int, warps: int) -> Any:
    hidden = source.shape[-1]
    kernel[(source.shape[0], triton.cdiv(hidden, columns))](source, target, hidden, streams, columns, num_warps=warps)
    return target
