"""Scaling factors in plain torch: from block maxima to scales, and between scales and the tensors that store them.

A scale is always the factor that turns data back into values (value = data * sf), one for each block of rows x columns.
How scales are stored is an `SfLayout`; everything here computes in fp32.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import config
from .._outputs import size_of
from ..layout import PACKED_PER_WORD, TMA_ALIGNMENT, SfLayout, align, ceildiv
from ._formats import encode_e4m3

SF_DTYPES = {"float32": torch.float32, "int32": torch.int32, "float8_e4m3fn": torch.float8_e4m3fn}  # of SfLayout.dtype

# (format, scales stored as e4m3) -> the lower bound of a block's maximum before its scale is formed. The very table of
# `config`, which only ever changes its entries, so that a call reads it without a function; e5m6 has no setting there.
amax_clamps = config._amax_clamp
E5M6_AMAX_CLAMP = 1e-4


def amax_clamp_min(fmt: str, use_e4m3_sf: bool = False) -> float:
    """The lower bound of a block's absolute maximum before its scale is formed."""
    return E5M6_AMAX_CLAMP if fmt == "e5m6" else amax_clamps[fmt, use_e4m3_sf]


def sf_alignment(layout: SfLayout) -> int:
    """Rows that a stored column is padded to a multiple of; 0 for row-major. What `_outputs` takes as an alignment."""
    return TMA_ALIGNMENT // layout.itemsize if layout.col_major else 0


def asked_sf(layout: SfLayout, span: int) -> tuple[Any, ...]:
    """The scales of each row of a kernel's first argument as the extension is asked for them (_outputs.py).

    span: columns of the argument that share a scale, 0 for one scale a row.
    """
    columns = size_of(0, 1, 1, span * PACKED_PER_WORD if layout.packed else span) if span else 1
    return SF_DTYPES[layout.dtype], sf_alignment(layout), _NUM_ROWS, columns


_NUM_ROWS = size_of(0, 0)


def make_sf(
    amax: torch.Tensor, max_value: float, clamp_min: float, round_sf: bool = False, use_e4m3_sf: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and the factors applied to the values, both fp32, for fp32 block maxima.

    round_sf gives the smallest power of two that is not below amax / max_value, and its exact reciprocal; e4m3 scales
    are rounded to that format first and then inverted. Otherwise both are divisions of their own: inv is not 1 / sf.
    """
    limit = torch.tensor(max_value, dtype=torch.float32, device=amax.device)
    amax = torch.maximum(amax, torch.tensor(clamp_min, dtype=torch.float32, device=amax.device))
    sf = amax / limit
    if round_sf:
        exponent = ((sf.view(torch.int32) - 1) >> 23) + 1
        return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)
    if use_e4m3_sf:
        sf = encode_e4m3(sf).float()
        return sf, 1.0 / sf
    return sf, limit / amax


def store_sf(sf: torch.Tensor, layout: SfLayout, block_cols: int = 0) -> torch.Tensor:
    """fp32 scales (rows, columns of blocks) in a new tensor of that layout; unused bytes and padding rows are zero.

    Packed words hold the exponents of four neighbouring columns, but of four neighbouring rows where block_cols is 1.
    """
    if layout.packed:
        sf = pack_ue8m0(sf.t()).t() if block_cols == 1 else pack_ue8m0(sf)
    stored = sf.to(SF_DTYPES[layout.dtype])
    if not layout.col_major:
        return stored.contiguous()
    rows, columns = stored.shape
    pitch = align(rows, 16 // stored.element_size())
    padded = torch.nn.functional.pad(stored.t().view(torch.uint8 if layout.e4m3 else stored.dtype), (0, pitch - rows))
    return padded.contiguous().view(stored.dtype).as_strided((rows, columns), (1, pitch))


def load_sf(sf: torch.Tensor, num_rows: int, num_columns: int, block_cols: int = 0) -> torch.Tensor:
    """Stored scales of any dtype and strides as fp32 (rows, columns of blocks)."""
    if sf.dtype != torch.int32:
        return sf.float()
    return unpack_ue8m0(sf.t())[:, :num_rows].t() if block_cols == 1 else unpack_ue8m0(sf)[:, :num_columns]


def pack_ue8m0(sf: torch.Tensor) -> torch.Tensor:
    """The exponent bytes of fp32 powers of two (R, C), four columns to an int32 word: (R, ceil(C / 4))."""
    rows, columns = sf.shape
    num_words = ceildiv(columns, PACKED_PER_WORD)
    exponents = sf.contiguous().view(torch.int32) >> 23
    exponents = torch.nn.functional.pad(exponents, (0, num_words * PACKED_PER_WORD - columns))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=sf.device)
    return (exponents.view(rows, num_words, PACKED_PER_WORD) << shifts).sum(-1, dtype=torch.int32)


def unpack_ue8m0(words: torch.Tensor) -> torch.Tensor:
    """int32 words (R, W) to fp32 powers of two (R, 4 W); exponent byte 0 is 0.0."""
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=words.device)
    exponents = (words.unsqueeze(-1) >> shifts).flatten(-2) & 0xFF
    return (exponents << 23).view(torch.float32)


def block_amax(values: torch.Tensor, block_rows: int, block_cols: int) -> torch.Tensor:
    """The largest magnitude in each block of fp32 values (T, H), NaN ignored; the last blocks may be partial."""
    rows, columns = values.shape
    num_row_blocks, num_col_blocks = ceildiv(rows, block_rows), ceildiv(columns, block_cols)
    magnitude = torch.where(values.isnan(), 0.0, values.abs())
    padding = (0, num_col_blocks * block_cols - columns, 0, num_row_blocks * block_rows - rows)
    if any(padding):
        magnitude = torch.nn.functional.pad(magnitude, padding)
    return magnitude.view(num_row_blocks, block_rows, num_col_blocks, block_cols).amax(dim=(1, 3))


def spread(per_block: torch.Tensor, block_rows: int, block_cols: int, rows: int, columns: int) -> torch.Tensor:
    """One value per block to one per element: (rows, columns)."""
    if block_rows > 1:
        per_block = per_block.repeat_interleave(block_rows, dim=0)[:rows]
    if block_cols > 1:
        per_block = per_block.repeat_interleave(block_cols, dim=1)[:, :columns]
    return per_block
