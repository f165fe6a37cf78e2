"""Peers of quant.norm_forward: a Triton kernel of one row a block, and torch's rms_norm where there is no residual."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tilekernels.bench.peers import fastest

WARPS = (2, 4, 8, 16)


@triton.jit
def _norm(
    x, weight, residual, out, z_out, rstd_out, hidden, eps, has_residual: tl.constexpr, width: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    inside = column < hidden
    z = tl.load(x + row * hidden + column, inside, other=0.0).to(tl.float32)
    if has_residual:
        z += tl.load(residual + row * hidden + column, inside, other=0.0).to(tl.float32)
        tl.store(z_out + row * hidden + column, z.to(z_out.dtype.element_ty), inside)
    rstd = tl.rsqrt(tl.sum(z * z, axis=0) / hidden + eps)
    tl.store(rstd_out + row, rstd)
    weights = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + column, (z * rstd * weights).to(out.dtype.element_ty), inside)


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    if operator != "quant.norm_forward":
        return {}
    x, weight, eps, residual = kwargs["x"], kwargs["weight"], kwargs["eps"], kwargs.get("residual")
    candidates = [functools.partial(norm, x, weight, residual, eps, warps) for warps in WARPS]
    peers: dict[str, Callable[[], object]] = {"triton": fastest(candidates)}
    if residual is None:
        peers["torch.rms_norm"] = functools.partial(torch.nn.functional.rms_norm, x, x.shape[-1:], weight, eps)
    return peers


def norm(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, eps: float, warps: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x)
    z = x if residual is None else torch.empty_like(x)
    rstd = torch.empty(x.shape[0], device=x.device)
    width = triton.next_power_of_2(x.shape[1])
    _norm[(x.shape[0],)](
        x, weight, x if residual is None else residual, out, z, rstd, x.shape[1], eps, residual is not None, width,
        num_warps=warps,
    )  # fmt: skip
    return out, rstd, z
