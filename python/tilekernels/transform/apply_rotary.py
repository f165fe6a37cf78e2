"""Rotary position embedding, in place."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error, argument_type_error, check_int
from ..moe._fma import fma
from ..testing.cases import BenchCase

_NAME = "transform.apply_rotary"
_RANKS, _DIMS = (3, 4), (64, 128)


def apply_rotary(
    query: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Rotates every head of query, and of key, in place, by the angles of its token's position.

    query, key: (num_tokens, num_heads, dim) or (num_batches, num_tokens, num_heads, dim), bf16 or fp32, dim 64 or 128,
    any strides but for the last, so that they may be columns of wider heads; key has heads and strides of its own.
    cos_sin_cache: (num_positions, dim) fp32, dim / 2 cosines and then as many sines in a row, any row stride.
    positions: (num_tokens,) or (num_batches, num_tokens), int32 or int64, or None for a token's own number.
    seqlen_offset is added to either.

    A pair (a, b) is the channels (i, i + dim / 2), or (2i, 2i + 1) if interleaved, and becomes (a * cos - b * sin,
    a * sin + b * cos), with conjugate (a * cos + b * sin, b * cos - a * sin): in fp32, the second factor's product
    rounded and the first's fused into the sum, then rounded to the tensor's dtype. Positions outside of the cache are a
    caller's mistake: on a GPU such heads become zero, on a CPU they are refused.
    """
    check_int(_NAME, "seqlen_offset", seqlen_offset)
    rank = _check_rank("query", query)
    if key is not None and _check_rank("key", key) != rank:
        raise argument_error(_NAME, "key", f"have {rank} dimensions like query", key.dim())
    if isinstance(positions, torch.Tensor) and positions.dim() != rank - 2:
        raise argument_error(_NAME, "positions", f"have {rank - 2} dimensions", positions.dim())
    if rank == 3:
        query = query.unsqueeze(0)
        key, positions = (x.unsqueeze(0) if isinstance(x, torch.Tensor) else x for x in (key, positions))
    _apply_rotary(query, key, cos_sin_cache, positions, interleaved, conjugate, seqlen_offset)


def apply_rotary_ref(
    query: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """`apply_rotary` in plain torch, exact."""
    for x in (query,) if key is None else (query, key):
        own = torch.arange(x.shape[-3], device=x.device) if positions is None else positions.long()
        rows = own + seqlen_offset
        is_known = (rows >= 0) & (rows < cos_sin_cache.shape[0])
        angles = torch.where(is_known[..., None], cos_sin_cache[torch.where(is_known, rows, 0)], 0)
        cos, sin = angles[..., None, :].chunk(2, dim=-1)
        sin = -sin if conjugate else sin
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
        wide_a, wide_b = a.float(), b.float()
        turned_a, turned_b = fma(wide_a, cos, -(wide_b * sin)), fma(wide_a, sin, wide_b * cos)
        a.copy_(turned_a)
        b.copy_(turned_b)


def _check_rank(name: str, x: Any) -> int:
    """Raises unless x is a tensor of heads; returns its rank."""
    if not isinstance(x, torch.Tensor):  # the kernel's own check takes None for an output
        raise argument_type_error(_NAME, name, "be a tensor", type(x).__name__)
    if x.dim() not in _RANKS:
        raise argument_error(_NAME, name, "have 3 or 4 dimensions", x.dim())
    if x.shape[-1] not in _DIMS:  # the kernel's own guard would not name the argument
        raise argument_error(_NAME, name, "have 64 or 128 channels", x.shape[-1])
    return x.dim()


def _apply_rotary_cpu(
    query: torch.Tensor,
    key: torch.Tensor | None,
    cos_sin_cache: torch.Tensor,
    positions: torch.Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
) -> None:
    if not query.shape[0] * query.shape[1]:
        return
    num_positions = cos_sin_cache.shape[0]
    if positions is None:
        lowest, highest = seqlen_offset, seqlen_offset + query.shape[1] - 1
    else:
        lowest, highest = (int(limit) + seqlen_offset for limit in positions.aminmax())
    if lowest < 0 or highest >= num_positions:
        wrong = lowest if lowest < 0 else highest
        raise argument_error(_NAME, "positions", f"lie in the cache's {num_positions} rows", wrong)
    apply_rotary_ref(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)


_apply_rotary = kernel(_NAME, cpu=_apply_rotary_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens; a model's latent attention (64 of 192 columns of 128 heads, one key head); whole heads."""
    return [
        _case(16, 4, 1, 64, 64, torch.int64),
        _case(64, 16, 2, 128, 128, None, interleaved=True, conjugate=True),
        _case(8001, 128, 1, 64, 192, torch.int64),
        _case(8001, 128, 1, 64, 192, torch.int64, interleaved=True),
        _case(8001, 32, 8, 128, 128, torch.int32),
        _case(8001, 32, 8, 128, 128, None, dtype=torch.float32),
    ]


def _case(
    num_tokens: int,
    num_heads: int,
    num_key_heads: int,
    dim: int,
    width: int,
    position: torch.dtype | None,
    interleaved: bool = False,
    conjugate: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        angles = torch.rand((num_tokens + 8, dim // 2), device=device) * 100
        kwargs = {
            "query": torch.randn((num_tokens, num_heads, width), device=device).to(dtype)[..., width - dim :],
            "key": torch.randn((num_tokens, num_key_heads, width), device=device).to(dtype)[..., width - dim :],
            "cos_sin_cache": torch.cat([angles.cos(), angles.sin()], dim=1),
            "positions": None if position is None else torch.randperm(num_tokens, device=device).to(position),
        }
        return {**kwargs, "interleaved": interleaved, "conjugate": conjugate, "seqlen_offset": 8}

    num_bytes = 2 * num_tokens * (num_heads + num_key_heads) * dim * dtype.itemsize + 4 * num_tokens * dim
    num_bytes += 0 if position is None else num_tokens * position.itemsize
    params = {"num_tokens": num_tokens, "heads": f"{num_heads}+{num_key_heads}", "dim": dim, "width": width}
    names = {"dtype": dtype, "positions": position}
    params |= {name: str(each).removeprefix("torch.") for name, each in names.items()}
    return BenchCase(_NAME, {**params, "interleaved": interleaved}, make, num_bytes)
