"""Weighted sums of each token's rows in a buffer sorted by expert."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import requests_of, size_of
from ..errors import argument_error, argument_type_error
from ..testing.cases import BenchCase
from ._cases import TOP6_OF_RANK, Routing
from ._fma import fma
from ._indices import check_below
from .get_fused_mapping import get_fused_mapping_ref

_NAME = "moe.reduce_fused"
_E4M3_MAX = 448.0
_HIDDEN_MULTIPLE = 256
_OUT_OF = requests_of(size_of(3, 0), size_of(0, 1))


def reduce_fused(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    fp8_format: str = "",
    sf: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row t = sum of topk_weights[t, s] * x[token_topk_to_pos[t, s]] over the slots s whose position is not negative.

    x: (num_positions, hidden) bf16 or fp32, dense, hidden % 256 == 0; or a pair (x, x_sf) with one fp32 scale for each
    row. topk_weights: (num_tokens, num_topk) fp32, dense, or None for ones. token_topk_to_pos: (num_tokens, num_topk)
    int32, dense, num_topk at most 32. fp8_format: '' for x's dtype or 'e4m3' (saturating); only then sf, fp32 (1,), may
    be given, by which the sums are multiplied. out: (num_tokens, hidden) to write into.

    In fp32, slot after slot: sum = fma(x, weight * x_sf, sum); then times sf, then rounded to nearest even. A token
    without any row gives zeros.
    """
    data, x_sf = _split_pair(x)
    if fp8_format not in ("", "e4m3"):
        raise argument_error(_NAME, "fp8_format", "be '' or 'e4m3'", repr(fp8_format))
    if sf is not None and not fp8_format:
        raise argument_error(_NAME, "sf", "be None unless fp8_format is 'e4m3'", "a tensor")
    dtype = torch.float8_e4m3fn if fp8_format else getattr(data, "dtype", None)
    if out is not None and getattr(out, "dtype", None) is not dtype:
        wanted, given = (
            str(each).removeprefix("torch.") for each in (dtype, getattr(out, "dtype", type(out).__name__))
        )
        raise argument_type_error(_NAME, "out", f"be {wanted}", given)
    _check_hidden(data)
    inputs = (data, x_sf, topk_weights, token_topk_to_pos, sf)
    if out is None:
        return _reduce_fused(*inputs, _OUT_OF.get(dtype))
    _reduce_fused(*inputs, out)
    return out


def reduce_fused_ref(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    fp8_format: str = "",
    sf: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reduce_fused` in plain torch, exact."""
    data, x_sf = _split_pair(x)
    num_positions = data.shape[0]
    # One more row for slots without any
    padded = torch.nn.functional.pad(data.float(), (0, 0, 0, 1))
    scales = None if x_sf is None else torch.nn.functional.pad(x_sf, (0, 1))
    valid = (token_topk_to_pos >= 0) & (token_topk_to_pos < num_positions)
    rows = torch.where(valid, token_topk_to_pos, num_positions).long()
    sums = torch.zeros((token_topk_to_pos.shape[0], data.shape[1]), dtype=torch.float32, device=data.device)
    for slot in range(token_topk_to_pos.shape[1]):
        factor = torch.ones_like(sums[:, 0]) if topk_weights is None else topk_weights[:, slot]
        if scales is not None:
            factor = factor * scales[rows[:, slot]]
        added = fma(padded[rows[:, slot]], factor.unsqueeze(1), sums)
        sums = torch.where(valid[:, slot].unsqueeze(1), added, sums)
    if sf is not None:
        sums = sums * sf
    if not fp8_format:
        return sums.to(data.dtype)
    # Clamped first: older torch versions turn what overflows into NaN
    return sums.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _split_pair(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not isinstance(x, tuple):
        return x, None
    if len(x) != 2 or x[1] is None:
        what = f"{len(x)} of them" if len(x) != 2 else "None for x_sf"
        raise argument_type_error(_NAME, "x", "be a tensor or a tuple of two (x, x_sf)", what)
    return x[0], x[1]


def _check_hidden(x: Any) -> None:
    """In words: the kernel's own guard would not name the argument."""
    if isinstance(x, torch.Tensor) and x.dim() == 2 and x.shape[1] % _HIDDEN_MULTIPLE:
        raise argument_error(_NAME, "x", f"have a multiple of {_HIDDEN_MULTIPLE} columns", x.shape[1])


def _reduce_fused_cpu(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    token_topk_to_pos: torch.Tensor,
    sf: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    check_below(_NAME, "token_topk_to_pos", token_topk_to_pos, x.shape[0])
    fp8_format = "e4m3" if out.dtype == torch.float8_e4m3fn else ""
    pair = x if x_sf is None else (x, x_sf)
    out.copy_(reduce_fused_ref(pair, topk_weights, token_topk_to_pos, fp8_format, sf))


_reduce_fused = kernel(_NAME, cpu=_reduce_fused_cpu)


def bench_cases() -> list[BenchCase]:
    """A batch of a few tokens, then the published benchmark's sizes."""
    cases = [_case(Routing(16, 6, 4, 24), 2048, "bf16", "")]
    for hidden in (4096, 7168):
        for kind, fp8_format in (("bf16", ""), ("bf16", "e4m3"), ("fp32", "")):
            cases.append(_case(TOP6_OF_RANK, hidden, kind, fp8_format))
    return cases


def _case(routing: Routing, hidden: int, kind: str, fp8_format: str) -> BenchCase:
    num_positions = routing.num_positions(1)

    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((num_positions, hidden), device=device)
        mapping = get_fused_mapping_ref(routing.make(device), routing.num_experts, num_positions, 1)
        return {
            "x": x if kind == "fp32" else x.bfloat16(),
            "topk_weights": torch.rand((routing.num_tokens, routing.num_topk), device=device),
            "token_topk_to_pos": mapping[3],
            "fp8_format": fp8_format,
            "sf": torch.rand(1, device=device) if fp8_format else None,
        }

    itemsize = 4 if kind == "fp32" else 2
    out_bytes = routing.num_tokens * hidden * (1 if fp8_format else itemsize)
    num_bytes = routing.num_routed * hidden * itemsize + 8 * routing.num_tokens * routing.num_topk + out_bytes
    params = {**routing.params, "hidden": hidden, "in": kind, "out": fp8_format or kind}
    return BenchCase(_NAME, params, make, num_bytes)
