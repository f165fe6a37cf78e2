"""The per-token casts in the argument order of generation 1: x_block_size is an argument of all three."""

from __future__ import annotations

import torch

from ... import quant as _quant
from ...errors import argument_error
from ...quant import QuantTensor
from .._asserting import asserting


@asserting
def per_token_cast(
    x: torch.Tensor | QuantTensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """`tilekernels.quant.per_token_cast` with the options of generation 1."""
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _quant.per_token_cast(x, fmt, num_per_channels, x_block_size, *flags)


@asserting
def per_token_cast_with_sf_only(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """`tilekernels.quant.per_token_cast_with_sf_only`; x_block_size must be None."""
    _check_no_block("per_token_cast_with_sf_only", x_block_size)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _quant.per_token_cast_with_sf_only(x, fmt, num_per_channels, *flags)


@asserting
def per_token_cast_with_precomputed_sf(
    x: torch.Tensor,
    fmt: str,
    num_per_channels: int,
    sf: torch.Tensor,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> torch.Tensor:
    """`tilekernels.quant.per_token_cast_with_precomputed_sf`; x_block_size must be None."""
    _check_no_block("per_token_cast_with_precomputed_sf", x_block_size)
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _quant.per_token_cast_with_precomputed_sf(x, fmt, num_per_channels, sf, *flags)


@asserting
def per_token_cast_to_e5m6(
    x: torch.Tensor,
    num_per_channels: int,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """`tilekernels.quant.per_token_cast` to 'e5m6': num_per_channels is the number of channels."""
    flags = (use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return _quant.per_token_cast(x, "e5m6", num_per_channels, None, *flags)


def _check_no_block(operator: str, x_block_size: object) -> None:
    if x_block_size is not None:
        raise argument_error(f"quant.{operator}", "x_block_size", "be None", x_block_size)
