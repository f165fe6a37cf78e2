"""Casts of a matrix to e4m3 with one scale for each channel of neighbouring tokens, of all rows or of a selection."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..layout import PACKED_PER_WORD, ceildiv
from ..testing.cases import BenchCase
from . import _channels as channels
from ._channels import CAST, FUSED, SAME_DATA
from ._reference import QuantTensor, cast_ref
from ._sf import amax_clamps

_SF, _PACKED_SF = channels.asked_sf(), channels.asked_sf(block=PACKED_PER_WORD)
# The same of rows that pos_to_token, argument 2, picks out
_PICKED_DATA, _PICKED_SF = (torch.float8_e4m3fn, 0, size_of(2, 0), size_of(0, 1)), channels.asked_sf(argument=2)


def per_channel_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantised data and its scales: value = data * sf, one scale for num_per_tokens rows of a channel.

    x: (T, H) bf16 or fp32, unit column stride, any row stride, H % 64 == 0; or a pair (data, sf) with data e4m3 and one
    fp32, packed or e4m3 scale, row or column-major, for each num_per_channels = 32 or 128 channels of a row. A pair is
    dequantised first: (data * x_sf) * inv. fmt: 'e4m3'. num_per_tokens: 32 or 128, the last block may be partial.

    round_sf: scales are powers of two. use_packed_ue8m0: the exponents of four blocks of a channel in an int32, needs
    round_sf. Returns data (T, H) e4m3 and sf (B, H) fp32 or (ceil(B / 4), H) int32, with B = ceil(T / num_per_tokens)
    blocks; bytes beyond the last block are zero. Inputs must be finite.
    """
    channels.check_options(CAST, fmt, num_per_tokens, round_sf)
    channels.check_packed(CAST, use_packed_ue8m0, round_sf)
    data, x_sf, group = channels.input_of(CAST, x, num_per_channels)
    sf = (_PACKED_SF if use_packed_ue8m0 else _SF)[num_per_tokens]
    clamp_min = amax_clamps["e4m3", False]
    return _per_channel_cast(data, x_sf, SAME_DATA, sf, num_per_tokens, group, clamp_min, round_sf)


def per_channel_cast_fused(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: torch.Tensor | None = None,
) -> QuantTensor:
    """`per_channel_cast` of rows that are picked out of x: row i of the result is row pos_to_token[i] of x.

    pos_to_token: (M,) int32, or None for all rows in their order. Where it is negative, or beyond the rows of x, the
    row is zero and does not count for the scales. Blocks are num_per_tokens = 32 or 128 rows of the result, the last
    may be partial. Returns data (M, H) e4m3 and sf (ceil(M / num_per_tokens), H) fp32.
    """
    channels.check_options(FUSED, fmt, num_per_tokens, round_sf)
    data, x_sf, group = channels.input_of(FUSED, x, num_per_channels)
    asked = (SAME_DATA, _SF[num_per_tokens])
    if pos_to_token is not None:
        asked = (_PICKED_DATA, _PICKED_SF[num_per_tokens])
    clamp_min = amax_clamps["e4m3", False]
    return _per_channel_cast_fused(data, x_sf, pos_to_token, *asked, num_per_tokens, group, clamp_min, round_sf)


def per_channel_cast_ref(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """`per_channel_cast` in plain torch."""
    x_block_size = None if num_per_channels is None else (1, num_per_channels)
    data, sf = cast_ref(
        x,
        fmt,
        (num_per_tokens, 1),
        x_block_size=x_block_size,
        round_sf=round_sf,
        use_packed_ue8m0=use_packed_ue8m0,
    )
    return data, sf.clone(memory_format=torch.contiguous_format)  # a packed row has other strides


def per_channel_cast_fused_ref(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: torch.Tensor | None = None,
) -> QuantTensor:
    """`per_channel_cast_fused` in plain torch."""
    if pos_to_token is not None:
        if isinstance(x, tuple):
            x = _picked(x[0], pos_to_token), _picked(x[1], pos_to_token)
        else:
            x = _picked(x, pos_to_token)
    return per_channel_cast_ref(x, fmt, num_per_tokens, round_sf, num_per_channels)


def _picked(matrix: torch.Tensor, pos_to_token: torch.Tensor) -> torch.Tensor:
    """Rows of a matrix, zeros where there is no such row."""
    num_rows = matrix.shape[0]
    exists = (pos_to_token >= 0) & (pos_to_token < num_rows)
    if num_rows == 0:
        return matrix.new_zeros((pos_to_token.shape[0], matrix.shape[1]))
    raw = matrix.view(torch.uint8) if matrix.dtype == torch.float8_e4m3fn else matrix
    picked = raw[torch.where(exists, pos_to_token, 0).long()]
    return torch.where(exists[:, None], picked, 0).to(raw.dtype).view(matrix.dtype)


def _per_channel_cast_cpu(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    num_per_tokens: int,
    num_per_channels: int,
    clamp_min: float,
    round_sf: bool,
) -> None:
    result = cast_ref(
        x if x_sf is None else (x, x_sf),
        "e4m3",
        (num_per_tokens, 1),
        x_block_size=(1, num_per_channels),
        round_sf=round_sf,
        use_packed_ue8m0=out_sf.dtype == torch.int32,
        clamp_min=clamp_min,
    )
    out.copy_(result[0])
    out_sf.copy_(result[1])


def _per_channel_cast_fused_cpu(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    pos_to_token: torch.Tensor | None,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    num_per_tokens: int,
    num_per_channels: int,
    clamp_min: float,
    round_sf: bool,
) -> None:
    if pos_to_token is not None:
        x = _picked(x, pos_to_token)
        x_sf = None if x_sf is None else _picked(x_sf, pos_to_token)
    _per_channel_cast_cpu(x, x_sf, out, out_sf, num_per_tokens, num_per_channels, clamp_min, round_sf)


_per_channel_cast = kernel(CAST, cpu=_per_channel_cast_cpu)
_per_channel_cast_fused = kernel(FUSED, cpu=_per_channel_cast_fused_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's sizes, then other inputs, blocks and small calls."""
    cases = []
    for num_tokens, hidden in ((128, 4096), (4096, 4096), (8064, 4096), (8064, 7168), (8192, 7168)):
        cases.append(_case(CAST, num_tokens, hidden, "bf16", 128, round_sf=True))
    cases.append(_case(CAST, 8064, 7168, "bf16", 128))
    cases.append(_case(CAST, 8064, 7168, "bf16", 32, round_sf=True, use_packed_ue8m0=True))
    cases.append(_case(CAST, 8064, 7168, "fp32", 128, round_sf=True))
    cases.append(_case(CAST, 8064, 7168, "e4m3", 128, round_sf=True))
    cases.append(_case(FUSED, 128, 4096, "bf16", 128, round_sf=True))
    for hidden in (4096, 7168):
        for kind in ("bf16", "e4m3"):
            cases.append(_case(FUSED, 4096, hidden, kind, 128, round_sf=True))
            cases.append(_case(FUSED, 16384, hidden, kind, 128, num_positions=24576, round_sf=True))
    return cases


def _case(
    operator: str,
    num_tokens: int,
    hidden: int,
    kind: str,
    num_per_tokens: int,
    num_positions: int | None = None,
    **options: bool,
) -> BenchCase:
    """`num_positions`: rows of the result where it is a selection of tokens, each an eighth of it padding."""
    group = 128

    def make(device: Any) -> dict[str, Any]:
        plain = torch.randn((num_tokens, hidden), device=device)
        kwargs: dict[str, Any] = {"x": plain if kind == "fp32" else plain.bfloat16(), "fmt": "e4m3"}
        if kind == "e4m3":
            kwargs["x"] = cast_ref(plain, "e4m3", (1, group), round_sf=True)
            kwargs["num_per_channels"] = group
        if num_positions is not None:
            positions = torch.randint(num_tokens, (num_positions,), device=device, dtype=torch.int32)
            kwargs["pos_to_token"] = positions.masked_fill_(torch.arange(num_positions, device=device) % 128 >= 112, -1)
        return {**kwargs, "num_per_tokens": num_per_tokens, **options}

    num_rows = num_positions or num_tokens
    num_read = num_tokens if num_positions is None else num_positions // 128 * 112
    num_bytes = num_read * hidden * {"bf16": 2, "fp32": 4, "e4m3": 1}[kind] + num_rows * hidden
    num_bytes += ceildiv(num_rows, num_per_tokens) * hidden * (1 if "use_packed_ue8m0" in options else 4)
    if kind == "e4m3":
        num_bytes += num_read * ceildiv(hidden, group) * 4
    params = {"num_tokens": num_tokens, "hidden": hidden, "in": kind, "num_per_tokens": num_per_tokens}
    params |= {} if num_positions is None else {"num_positions": num_positions}
    return BenchCase(operator, {**params, **options}, make, num_bytes)
