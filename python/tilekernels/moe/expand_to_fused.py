"""Copies of token rows into a buffer sorted by expert, with or without their scales."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import empty_sf, requests_of, size_of
from ..errors import argument_error, argument_type_error, shape_of
from ..layout import TMA_ALIGNMENT, ceildiv
from ..testing.cases import BenchCase
from ._cases import TOP6_OF_RANK, TOP8_OF_RANK, Routing
from ._indices import check_below
from .get_fused_mapping import get_fused_mapping_ref

_NAME = "moe.expand_to_fused"
_NAME_WITH_SF = "moe.expand_to_fused_with_sf"

_GROUPS = (32, 128)  # channels that share a scale
_ROWS_OF, _DATA_OF = (requests_of(size_of(pos_to_expert, 0), size_of(0, 1)) for pos_to_expert in (2, 3))
_SF_ALIGNMENT = TMA_ALIGNMENT // 4  # rows that a column of scales is padded to a multiple of

# Scales in columns from which a second launch that turns them costs less than writing each one by itself
_MANY_SCALES = 1 << 17


def expand_to_fused(x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor) -> torch.Tensor:
    """The rows of x where `get_fused_mapping` says, and zeros in padding rows.

    x: (num_tokens, hidden) of elements of 1, 2, 4 or 8 bytes, dense; copied as they are. token_topk_to_pos:
    (num_tokens, num_topk) int32, dense, num_topk at most 32; row t goes to each position that is not negative, no two
    rows to the same. pos_to_expert: (num_positions,) int32, of which only the sign counts: negative is padding.
    Returns (num_positions, hidden); rows that are neither named nor padding are undefined, without tokens all are zero.
    """
    return _expand_to_fused(x, token_topk_to_pos, pos_to_expert, _ROWS_OF.get(getattr(x, "dtype", None)))


def expand_to_fused_with_sf(
    x: tuple[torch.Tensor, torch.Tensor],
    num_per_channels: int,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`expand_to_fused` of quantised rows and of their scales.

    x: (data, sf). data: (num_tokens, hidden) of one-byte elements, dense. sf: dense rows of one scale for each
    num_per_channels (32 or 128) channels, fp32; or int32 with four packed exponents each, which needs
    use_tma_aligned_col_major_sf. The other arguments are those of `expand_to_fused`. Returns (data, sf) of the buffer;
    with use_tma_aligned_col_major_sf the scales lie column after column, each starting on 16 bytes.
    """
    data, sf = _split_pair(x)
    if num_per_channels not in _GROUPS:
        raise argument_error(_NAME_WITH_SF, "num_per_channels", "be 32 or 128", num_per_channels)
    _, hidden = shape_of(_NAME_WITH_SF, "x", data, 2)
    _, num_given = shape_of(_NAME_WITH_SF, "sf", sf, 2)
    (num_positions,) = shape_of(_NAME_WITH_SF, "pos_to_expert", pos_to_expert, 1)
    packed = sf.dtype == torch.int32
    if packed and not use_tma_aligned_col_major_sf:
        flag = "use_tma_aligned_col_major_sf"
        raise argument_error(_NAME_WITH_SF, flag, "be True for packed (int32) scales", use_tma_aligned_col_major_sf)
    num_columns = ceildiv(hidden, num_per_channels * (4 if packed else 1))
    if num_given != num_columns:
        requirement = f"have {num_columns} columns for {hidden} channels in groups of {num_per_channels}"
        raise argument_error(_NAME_WITH_SF, "x[1]", requirement, num_given)
    tokens = None
    if use_tma_aligned_col_major_sf and num_positions * num_columns >= _MANY_SCALES:
        tokens = (torch.int32, 0, num_positions)
    out_sf = (sf.dtype, _SF_ALIGNMENT if use_tma_aligned_col_major_sf else 0, num_positions, num_columns)
    outputs = (_DATA_OF[data.dtype], out_sf, tokens)
    made = _expand_to_fused_with_sf(data, sf, token_topk_to_pos, pos_to_expert, *outputs)
    return made[0], made[1]


def expand_to_fused_ref(x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor) -> torch.Tensor:
    """`expand_to_fused` in plain torch; rows that are neither named nor padding are zero."""
    num_positions, hidden = pos_to_expert.shape[0], x.shape[1]
    # One more row for what goes nowhere. As bytes: not every dtype can be indexed
    rows = x.as_strided((x.numel(),), (1,)).view(torch.uint8).reshape(x.shape[0], hidden * x.element_size())
    out = rows.new_zeros((num_positions + 1, rows.shape[1]))
    target = torch.where(
        (token_topk_to_pos >= 0) & (token_topk_to_pos < num_positions), token_topk_to_pos, num_positions
    )
    for slot in range(token_topk_to_pos.shape[1]):
        out[target[:, slot].long()] = rows
    out = out[:num_positions].masked_fill(pos_to_expert.unsqueeze(1) < 0, 0)
    return out.reshape(-1).view(x.dtype).reshape(num_positions, hidden)


def expand_to_fused_with_sf_ref(
    x: tuple[torch.Tensor, torch.Tensor],
    num_per_channels: int,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`expand_to_fused_with_sf` in plain torch."""
    data, sf = x
    out_sf = _empty_sf(pos_to_expert.shape[0], sf, use_tma_aligned_col_major_sf)
    out_sf.copy_(expand_to_fused_ref(sf, token_topk_to_pos, pos_to_expert))
    return expand_to_fused_ref(data, token_topk_to_pos, pos_to_expert), out_sf


def _split_pair(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(x, tuple) or len(x) != 2:
        what = f"a {type(x).__name__}" if not isinstance(x, tuple) else f"{len(x)} of them"
        raise argument_type_error(_NAME_WITH_SF, "x", "be a tuple of two tensors (data, sf)", what)
    return x


def _empty_sf(num_rows: int, sf: torch.Tensor, col_major: bool) -> torch.Tensor:
    """Uninitialised scales for the buffer, as many columns and of the same dtype as `sf`."""
    alignment = TMA_ALIGNMENT // sf.element_size() if col_major else 0
    return empty_sf(num_rows, sf.shape[1], sf.dtype, alignment, sf.device)


def _expand_to_fused_cpu(
    x: torch.Tensor, token_topk_to_pos: torch.Tensor, pos_to_expert: torch.Tensor, out: torch.Tensor
) -> None:
    check_below(_NAME, "token_topk_to_pos", token_topk_to_pos, pos_to_expert.shape[0])
    out.copy_(expand_to_fused_ref(x, token_topk_to_pos, pos_to_expert))


def _expand_to_fused_with_sf_cpu(
    x: torch.Tensor,
    sf: torch.Tensor,
    token_topk_to_pos: torch.Tensor,
    pos_to_expert: torch.Tensor,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    workspace: torch.Tensor | None,
) -> None:
    check_below(_NAME_WITH_SF, "token_topk_to_pos", token_topk_to_pos, pos_to_expert.shape[0])
    out.copy_(expand_to_fused_ref(x, token_topk_to_pos, pos_to_expert))
    out_sf.copy_(expand_to_fused_ref(sf, token_topk_to_pos, pos_to_expert))


_expand_to_fused = kernel(_NAME, cpu=_expand_to_fused_cpu)
_expand_to_fused_with_sf = kernel(_NAME_WITH_SF, cpu=_expand_to_fused_with_sf_cpu)


def bench_cases() -> list[BenchCase]:
    """A batch of a few tokens, then the published benchmark's sizes."""
    tiny = Routing(16, 6, 4, 24)
    cases = [_case(tiny, 2048), _case_with_sf(tiny, 2048, 128, True, True)]
    for hidden in (4096, 7168):
        cases += [_case(TOP6_OF_RANK, hidden), _case(TOP8_OF_RANK, hidden)]
        for group in _GROUPS:
            cases += [
                _case_with_sf(TOP8_OF_RANK, hidden, group, False, True),
                _case_with_sf(TOP8_OF_RANK, hidden, group, True, True),
            ]
    return [*cases, _case_with_sf(TOP8_OF_RANK, 7168, 128, False, False)]


_ALIGNMENT = 16


def _make_mapping(routing: Routing, device: Any) -> dict[str, Any]:
    mapping = get_fused_mapping_ref(
        routing.make(device), routing.num_experts, routing.num_positions(_ALIGNMENT), _ALIGNMENT
    )
    return {"token_topk_to_pos": mapping[3], "pos_to_expert": mapping[0]}


def _count_rows(routing: Routing, row_bytes: int) -> int:
    """Bytes of rows that are read and written, and of the mapping."""
    num_positions = routing.num_positions(_ALIGNMENT)
    mapping = 4 * (routing.num_tokens * routing.num_topk + num_positions)
    return (routing.num_tokens + num_positions) * row_bytes + mapping


def _case(routing: Routing, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((routing.num_tokens, hidden), device=device).bfloat16()
        return {"x": x, **_make_mapping(routing, device)}

    return BenchCase(_NAME, {**routing.params, "hidden": hidden}, make, _count_rows(routing, 2 * hidden))


def _case_with_sf(routing: Routing, hidden: int, group: int, packed: bool, col_major: bool) -> BenchCase:
    num_columns = ceildiv(hidden, group * (4 if packed else 1))

    def make(device: Any) -> dict[str, Any]:
        data = torch.randn((routing.num_tokens, hidden), device=device).to(torch.float8_e4m3fn)
        sf = torch.rand((routing.num_tokens, num_columns), device=device)
        return {
            "x": (data, sf.view(torch.int32) if packed else sf),
            "num_per_channels": group,
            **_make_mapping(routing, device),
            "use_tma_aligned_col_major_sf": col_major,
        }

    label = f"{'col' if col_major else 'row'}_{'packed' if packed else 'fp32'}"
    params = {**routing.params, "hidden": hidden, "num_per_channels": group, "sf": label}
    return BenchCase(_NAME_WITH_SF, params, make, _count_rows(routing, hidden + 4 * num_columns))
