"""The reference of the cast with scales of channels."""

from __future__ import annotations

import torch

from ...quant import QuantTensor
from ...quant.per_channel_cast import per_channel_cast_fused_ref

__all__ = ["per_channel_cast_fused"]


def per_channel_cast_fused(
    x: torch.Tensor | QuantTensor,
    num_per_tokens: int,
    num_per_channels: int | None,
    round_sf: bool,
    pos_to_token: torch.Tensor | None,
) -> QuantTensor:
    """The reference of the operator of that name, in another order of arguments; to e4m3."""
    return per_channel_cast_fused_ref(x, "e4m3", num_per_tokens, round_sf, num_per_channels, pos_to_token)
