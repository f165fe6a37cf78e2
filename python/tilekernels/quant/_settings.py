"""What the options of a cast come to: dtypes and sizes of its outputs, and arguments of the kernel.

A call in a loop repeats its options, and taking them apart in Python costs half as much as launching the kernel. So
each combination that was found valid is kept, and later calls look it up. Nothing here depends on the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._dispatch import is_dynamo_compiling
from .._outputs import size_of
from ..layout import PACKED_PER_WORD, SfLayout
from . import _checks as checks
from ._formats import E5M6
from ._sf import E5M6_AMAX_CLAMP, SF_DTYPES, sf_alignment

# Combinations that are kept; numbers of channels are among them where rows are cast whole.
_MOST_KEPT = 4096


@dataclass(slots=True)
class CastSettings:
    """One combination of operator, format, group or block, and layout of the scales.

    Not a named tuple: slots are read in a quarter of its time, and a call reads eight.
    """

    operator: str
    fmt: str
    num_per_channels: int
    group: int  # channels that share a scale; 0 where that is a whole row, which has to be num_per_channels long
    out_dtype: torch.dtype
    bits: int  # of one output value
    multiple: int  # that the number of channels has to be of
    max_value: float
    stochastic: bool
    rounded: bool
    fixed_clamp: float | None  # the lower bound of a group's maximum; None: as `config` says at the time of the call
    clamp_key: tuple[str, bool]  # where `config` says it
    sf_dtype: torch.dtype
    sf_span: int  # channels that one stored column of scales covers: ceildiv(channels, sf_span) columns
    sf_alignment: int  # rows that a column of scales is padded to a multiple of; 0 for row-major
    asked_data: tuple[Any, ...]  # the outputs of an unquantised input, as the extension is asked for them (_outputs.py)
    asked_sf: tuple[Any, ...]
    block_rows: int = 1  # tokens that share a scale


# operator, fmt, num_per_channels, the four flags of SfLayout.from_flags, stochastic_cast
Options = tuple[str, str, int, bool, bool, bool, bool, bool]
# operator, fmt, block_size, the first three flags
BlockOptions = tuple[str, str, tuple[int, int], bool, bool, bool]


def find_settings(options: Options) -> CastSettings:
    """The settings of a call; raises ArgumentError for options that have no meaning."""
    if is_dynamo_compiling():  # numbers may be symbols, which are no keys
        return _make_settings(*options)
    if type(options[2]) is not int:  # 128.0 is the same key as 128
        return _make_settings(*options)
    try:
        return _kept[options]
    except (KeyError, TypeError):  # TypeError: an option that cannot be a key, so it is wrong
        settings = _make_settings(*options)
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[options] = settings
    return settings


def find_block_settings(options: BlockOptions) -> CastSettings:
    """The settings of a per-block cast; raises ArgumentError for options that have no meaning."""
    block_size = options[2]
    if is_dynamo_compiling():
        return _make_block_settings(*options)
    if type(block_size) is not tuple or not all(type(side) is int for side in block_size):
        return _make_block_settings(*options)
    try:
        return _kept[options]
    except (KeyError, TypeError):
        settings = _make_block_settings(*options)
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[options] = settings
    return settings


_kept: dict[Options | BlockOptions, CastSettings] = {}


def _make_block_settings(
    operator: str,
    fmt: str,
    block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
) -> CastSettings:
    block_rows, block_cols = checks.find_block(operator, block_size)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, False)
    return _make_settings(operator, fmt, block_cols, *flags, False, block_rows)


def _make_settings(
    operator: str,
    fmt: str,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
    stochastic_cast: bool,
    block_rows: int = 1,
) -> CastSettings:
    layout = SfLayout.from_flags(operator, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)
    format = checks.find_format(operator, fmt)
    if format is E5M6:
        checks.check_e5m6(operator, layout, stochastic_cast)
    group = checks.find_group(operator, format, num_per_channels)
    sf_dtype = SF_DTYPES[layout.dtype]
    sf_span = (group or num_per_channels) * (PACKED_PER_WORD if layout.packed else 1)
    alignment = sf_alignment(layout)
    return CastSettings(
        operator=operator,
        fmt=format.name,
        num_per_channels=num_per_channels,
        group=group,
        out_dtype=format.dtype,
        bits=format.bits,
        multiple=checks.multiple_of_channels(format),
        max_value=format.max_value,
        stochastic=bool(stochastic_cast),
        rounded=layout.rounded,
        fixed_clamp=E5M6_AMAX_CLAMP if format is E5M6 else None,
        clamp_key=(format.name, layout.e4m3),
        sf_dtype=sf_dtype,
        sf_span=sf_span,
        sf_alignment=alignment,
        asked_data=(format.dtype, 0, size_of(0, 0), size_of(0, 1, format.bits, 8)),
        asked_sf=(sf_dtype, alignment, size_of(0, 0, 1, block_rows), size_of(0, 1, 1, sf_span)),
        block_rows=block_rows,
    )


# The casts that servers make most are known from the start: the first call of a process is spared taking options apart
# with cold code, which is 20 of its 50 us.
for _operator in (checks.CAST, checks.SF_ONLY, checks.PRECOMPUTED):
    find_settings((_operator, "e4m3", 128, False, False, False, False, False))
