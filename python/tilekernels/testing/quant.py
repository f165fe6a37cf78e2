"""Blanking of the bytes of packed (UE8M0) scale tensors that carry nothing, which kernels may leave unwritten."""

import torch

from ..layout import PACKED_PER_WORD, align, ceildiv

__all__ = ["clear_unused_sf", "clear_unused_sf_col_pack"]


def clear_unused_sf(sf: torch.Tensor, hidden: int, num_per_channels: int) -> torch.Tensor:
    """Packed scales of blocks of several channels as bytes: (rows, align(blocks, 4)) uint8, unused ones zero.

    sf: int32 (rows, ceildiv(blocks, 4)), row- or column-major; byte k % 4 of word k // 4 is the exponent of block k.
    """
    num_blocks = ceildiv(hidden, num_per_channels)
    raw = sf.contiguous().view(torch.uint8).clone().reshape(sf.shape[0], align(num_blocks, PACKED_PER_WORD))
    raw[:, num_blocks:] = 0
    return raw


def clear_unused_sf_col_pack(sf: torch.Tensor, num_tokens: int, num_per_tokens: int) -> torch.Tensor:
    """Packed scales of blocks of one channel as bytes: (align(blocks, 4), channels) uint8, unused ones zero.

    sf: int32 (ceildiv(blocks, 4), channels); byte m % 4 of word (m // 4, c) is the exponent of block m of channel c.
    """
    num_blocks = ceildiv(num_tokens, num_per_tokens)
    num_channels = sf.shape[1]
    raw = sf.contiguous().view(torch.uint8).reshape(-1, num_channels, PACKED_PER_WORD).transpose(1, 2)
    raw = raw.reshape(align(num_blocks, PACKED_PER_WORD), num_channels).clone()
    raw[num_blocks:] = 0
    return raw
