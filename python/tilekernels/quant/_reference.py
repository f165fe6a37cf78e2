"""The general references of every block cast and of the way back, in plain torch.

The references of the cast operators are calls of these, and tests of other operators build their data with them.
"""

from __future__ import annotations

import torch

from ..layout import SfLayout, ceildiv
from ._formats import FORMATS, decode, encode
from ._sf import amax_clamp_min, block_amax, load_sf, make_sf, spread, store_sf
from ._stochastic import encode_stochastic

QuantTensor = tuple[torch.Tensor, torch.Tensor]
Block = tuple[int, int]


def cast_ref(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    block_size: Block = (32, 32),
    sf: torch.Tensor | None = None,
    x_block_size: Block | None = None,
    round_sf: bool = False,
    use_tma_aligned_col_major_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    clamp_min: float | None = None,
) -> QuantTensor | torch.Tensor:
    """Cast to `fmt` with one scale for each block of rows x columns: (data, sf), or data alone where sf is given.

    x: (T, H) bf16 or fp32, or (data, sf) with blocks of x_block_size. Blocks at the edges may be partial. A pair is
    multiplied by (x_sf * inv) as one factor, but by one after the other in blocks of one column. Unused packed bytes
    and padding rows of the scales are zero. clamp_min replaces the format's own lower bound of a block's maximum.
    """
    layout = SfLayout.from_flags(
        "quant.cast_ref", use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    )
    values, x_factor = _values_and_factor(x, x_block_size)
    rows, columns = values.shape
    if sf is None:
        if clamp_min is None:
            clamp_min = amax_clamp_min(fmt, use_e4m3_sf)
        amax = block_amax(values if x_factor is None else values * x_factor, *block_size)
        out_sf, inv = make_sf(amax, FORMATS[fmt].max_value, clamp_min, round_sf, use_e4m3_sf)
    else:
        inv = 1.0 / sf.float()

    inv = spread(inv, *block_size, rows, columns)
    if x_factor is None:
        values = values * inv
    elif block_size[1] == 1:
        values = (values * x_factor) * inv
    else:
        values = values * (x_factor * inv)
    data = encode_stochastic(values, fmt) if stochastic_cast else encode(values, fmt)
    return data if sf is not None else (data, store_sf(out_sf, layout, block_size[1]))


def cast_back_ref(x: QuantTensor, fmt: str, block_size: Block = (32, 32)) -> torch.Tensor:
    """data * sf in fp32, then rounded to bf16 unless fmt is 'fp32'; data may be e4m3, e2m1 or e5m6."""
    values, factor = _values_and_factor(x, block_size)
    assert factor is not None
    values = values * factor
    return values if fmt == "fp32" else values.bfloat16()


def cast_to_e5m6_ref(
    x: torch.Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """(T, H) bf16 or fp32 to e5m6 bytes (T, 3 H / 2) and one scale for each num_per_channels columns of a row."""
    result = cast_ref(
        x,
        "e5m6",
        (1, num_per_channels),
        round_sf=round_sf,
        use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
        use_packed_ue8m0=use_packed_ue8m0,
    )
    assert isinstance(result, tuple)
    return result


def cast_back_from_e5m6_ref(x: QuantTensor, fmt: str, x_block_size: Block) -> torch.Tensor:
    """e5m6 bytes and their scales back to bf16, or to fp32 where fmt is 'fp32'."""
    return cast_back_ref(x, fmt, x_block_size)


def _values_and_factor(x: torch.Tensor | QuantTensor, block: Block | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """fp32 values before scaling and, for a pair, the scale of each element."""
    if isinstance(x, torch.Tensor):
        return x.float(), None
    assert block is not None, "a pair needs the size of its blocks"
    values = decode(x[0])
    rows, columns = values.shape
    sf = load_sf(x[1], ceildiv(rows, block[0]), ceildiv(columns, block[1]), block[1])
    return values, spread(sf, *block, rows, columns)
