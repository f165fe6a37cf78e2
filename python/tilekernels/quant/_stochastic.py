"""Stochastic rounding to e4m3, e2m1 and bf16 in plain torch: random bits come from the data, a cast is reproducible.

Four consecutive columns share one 32-bit word, hashed from their scaled values and their place in the row. Element 0
takes its low 16 bits, element 1 the same bits in reverse order, element 2 the high 16 bits, element 3 those reversed.
The 16 bits are added to the top 16 bits of the discarded fraction; a carry rounds the magnitude up.
"""

from __future__ import annotations

import torch

from ._formats import E2M1, FORMATS, pack_e2m1, sign_bit

_WEIGHTS = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
_MULTIPLIER, _SECOND_MULTIPLIER = 0x846CA68B, 0xD35A2D97
_MASK = 0xFFFFFFFF
_LARGEST_BF16 = 0x7F7F
# format -> (exponent of its smallest normal number, stored mantissa bits)
_GRID = {"e4m3": (-6, 3), "e2m1": (0, 1)}


def encode_stochastic(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """Scaled fp32 values (T, H), H % 4 == 0, to stored data of `fmt`; saturates, keeps NaN and signed zero for e4m3."""
    random = random_bits(values)
    magnitude = values.abs().clamp(max=FORMATS[fmt].max_value)
    lowest_exponent, mantissa_bits = _GRID[fmt]
    # ulp = the spacing of the format at this magnitude; dividing by a power of two is exact, so is the split below.
    exponent = (magnitude.view(torch.int32) >> 23).sub(127).clamp(min=lowest_exponent)
    steps = magnitude * _power_of_two(mantissa_bits - exponent)
    whole = steps.floor()
    discarded = ((steps - whole) * 65536.0).nan_to_num().int()
    whole = whole + (discarded + random >= 65536).float()
    rounded = (whole * _power_of_two(exponent - mantissa_bits)).clamp(max=FORMATS[fmt].max_value)
    if fmt == "e4m3":
        return torch.copysign(rounded, values).to(torch.float8_e4m3fn)
    limits = torch.tensor((0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float32, device=values.device)
    magnitude = torch.where(values.isnan(), E2M1.max_value, rounded)
    codes = torch.bucketize(magnitude, limits, right=True).to(torch.uint8)
    return pack_e2m1(codes | (sign_bit(values).to(torch.uint8) << 3))


def round_to_e4m3_stochastic(values: torch.Tensor) -> torch.Tensor:
    """fp32 values (n,), n % 4 == 0, as one row."""
    return encode_stochastic(values[None], "e4m3")[0]


def round_to_bf16_stochastic(values: torch.Tensor) -> torch.Tensor:
    """fp32 values (n,), n % 4 == 0, to bf16: 16 random bits are added to the 16 that are dropped. Saturates.

    Two words for four elements, from one hash by different multipliers; the first of a pair takes the low half.
    """
    hashed = _hash(values[None])[0]
    words = [(hashed * multiplier) & _MASK for multiplier in (_MULTIPLIER, _SECOND_MULTIPLIER)]
    words = [word ^ (word >> 11) for word in words]
    random = torch.stack([half for word in words for half in (word & 0xFFFF, word >> 16)], dim=-1).flatten()
    bits = values.contiguous().view(torch.int32).long() & _MASK
    magnitude = (((bits & 0x7FFFFFFF) + random) >> 16).clamp(max=_LARGEST_BF16)
    rounded = torch.where(values.isnan(), 0x7FFF, magnitude | ((bits >> 16) & 0x8000))
    return rounded.to(torch.int16).view(torch.bfloat16)


def random_bits(values: torch.Tensor) -> torch.Tensor:
    """The 16 random bits of each element of scaled fp32 values (T, H), as int32 (T, H)."""
    word = (_hash(values) * _MULTIPLIER) & _MASK
    word = word ^ (word >> 11)
    low, high = word & 0xFFFF, word >> 16
    return torch.stack((low, _reverse_16(low), high, _reverse_16(high)), dim=-1).flatten(-2).int()


def _hash(values: torch.Tensor) -> torch.Tensor:
    """One number for four neighbours in a row, int64 (T, H / 4), from which random words are made."""
    rows, columns = values.shape
    bits = (values.contiguous().view(torch.int32).long() & _MASK).view(rows, columns // 4, 4)
    weights = torch.tensor(_WEIGHTS, dtype=torch.int64, device=values.device)
    word = ((bits * weights) & _MASK).sum(-1) + torch.arange(bits.shape[-2], device=values.device)
    word = word & _MASK
    word = word ^ (word >> 23)
    word = (word * 0x7FEB352D) & _MASK
    return word ^ (word >> 16)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent from its bits: pow and ldexp are not exact on every device."""
    return ((exponent + 127) << 23).view(torch.float32)


def _reverse_16(bits: torch.Tensor) -> torch.Tensor:
    """The 16 low bits in reverse order."""
    bits = ((bits & 0x5555) << 1) | ((bits >> 1) & 0x5555)
    bits = ((bits & 0x3333) << 2) | ((bits >> 2) & 0x3333)
    bits = ((bits & 0x0F0F) << 4) | ((bits >> 4) & 0x0F0F)
    return ((bits & 0x00FF) << 8) | (bits >> 8)
