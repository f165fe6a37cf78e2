"""Element formats of quantised data: the table of their names and limits, and encoders and decoders in plain torch.

The encoders are the references that kernels are compared with, bit by bit, and what CPU tensors run. Every one takes
fp32 values that were already scaled, rounds to nearest even (e5m6 with the quirk below) and saturates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import argument_error, argument_type_error


@dataclass(frozen=True)
class Format:
    """One element format: how it is stored and how large its values get."""

    name: str
    dtype: torch.dtype  # of the tensor that stores it
    max_value: float
    bits: int  # of one element


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0, 8)
E2M1 = Format("e2m1", torch.int8, 6.0, 4)
E5M6 = Format("e5m6", torch.uint8, 65024.0, 12)
FORMATS = {format.name: format for format in (E4M3, E2M1, E5M6)}

# Values of the e2m1 codes 0..7, and the largest fp32 values that still round to each code but the last: a tie goes to
# the even code, so at 0.75, 1.75 and 3.5 the limit is the fp32 value below.
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_LIMITS = (0.25, 0.75 - 2.0**-24, 1.25, 1.75 - 2.0**-23, 2.5, 3.5 - 2.0**-22, 5.0)


def storage_width(hidden: int, format: Format) -> int:
    """Bytes, which are elements of the storage dtype, that a row of `hidden` values takes."""
    return hidden * format.bits // 8


def encode(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """Scaled fp32 values to stored data of `fmt` (the last dimension shrinks or grows by its packing)."""
    return {"e4m3": encode_e4m3, "e2m1": encode_e2m1, "e5m6": encode_e5m6}[fmt](values)


def decode(data: torch.Tensor) -> torch.Tensor:
    """Stored data to fp32 values; the format follows from the dtype: float8_e4m3fn, int8 (e2m1) or uint8 (e5m6)."""
    if data.dtype == torch.int8:
        return unpack_from_e2m1fn_x2(data)
    return decode_e5m6(data) if data.dtype == torch.uint8 else data.float()


def encode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest even, saturating at +-448 (infinities too); NaN stays NaN, the sign of zero is kept."""
    # Clamped first: older torch versions turn what overflows into NaN.
    return values.float().clamp(-E4M3.max_value, E4M3.max_value).to(torch.float8_e4m3fn)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Two e2m1 codes per int8, the even column in the low nibble; the sign bit is copied, so -0 is code 8."""
    values = values.float()
    limits = torch.tensor(_E2M1_LIMITS, dtype=torch.float32, device=values.device)
    magnitude = torch.where(values.isnan(), torch.inf, values.abs())
    return pack_e2m1(torch.bucketize(magnitude, limits).to(torch.uint8) | (sign_bit(values).to(torch.uint8) << 3))


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0..15 (..., H) to int8 (..., H / 2)."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).view(torch.int8)


def unpack_from_e2m1fn_x2(x: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of packed e2m1 data: the last dimension doubles, the low nibble comes first.

    x: int8 or uint8 with at least one dimension. Plain torch, for debugging and references.
    """
    operator = "quant.unpack_from_e2m1fn_x2"
    if not isinstance(x, torch.Tensor):
        raise argument_type_error(operator, "x", "be a tensor", type(x).__name__)
    if x.dtype not in (torch.int8, torch.uint8):
        raise argument_error(operator, "x", "be int8 or uint8", name_of_dtype(x.dtype))
    if x.dim() == 0:
        raise argument_error(operator, "x", "have at least one dimension", "a scalar")
    data = x.contiguous().view(torch.uint8)
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(-2)
    table = torch.tensor(_E2M1_VALUES + tuple(-value for value in _E2M1_VALUES), dtype=torch.float32, device=x.device)
    return table[codes.int()].to(out_dtype)


def encode_e5m6(values: torch.Tensor) -> torch.Tensor:
    """12-bit codes (the top of an IEEE half), eight of them in twelve bytes; the last dimension is a multiple of 8.

    Nearest even for normal halves. Below 2^-14 the value is cut off and then raised by one code where the bits below a
    6-bit mantissa of the fp32 value say so, although those are not the bits that were cut off: that is the format's
    published behaviour, and exact comparison needs it.
    """
    values = values.float().contiguous()
    half = values.half()
    bits = half.view(torch.int16).int() & 0xFFFF
    bits = bits - (half.float().abs() > values.abs()).int()  # nearest to toward-zero: step back what was rounded up
    code = (bits >> 4) & 0xFFF
    low = values.view(torch.int32) & 0x1FFFF
    code = (code + ((code & 1) + low > 0x10000).int()) & 0xFFF
    return _pack_12_bits(code)


def decode_e5m6(data: torch.Tensor) -> torch.Tensor:
    """uint8 (..., 3 H / 2) to fp32 (..., H)."""
    # Cloned: a view may start between two words
    words = data.clone(memory_format=torch.contiguous_format).view(torch.int32).long()
    words = words.unflatten(-1, (-1, 3)) & 0xFFFFFFFF
    w0, w1, w2 = words.unbind(-1)
    codes = torch.stack(
        (
            w0 >> 20,
            w0 >> 8,
            (w0 << 4) | (w1 >> 28),
            w1 >> 16,
            w1 >> 4,
            (w1 << 8) | (w2 >> 24),
            w2 >> 12,
            w2,
        ),
        dim=-1,
    ).flatten(-2)
    return ((codes & 0xFFF) << 4).to(torch.int16).view(torch.half).float()


def _pack_12_bits(codes: torch.Tensor) -> torch.Tensor:
    """Eight codes as one 96-bit string, most significant bit first, cut into three little-endian 32-bit words."""
    h0, h1, h2, h3, h4, h5, h6, h7 = codes.long().unflatten(-1, (-1, 8)).unbind(-1)
    words = torch.stack(
        (
            (h0 << 20) | (h1 << 8) | (h2 >> 4),
            ((h2 & 0xF) << 28) | (h3 << 16) | (h4 << 4) | (h5 >> 8),
            ((h5 & 0xFF) << 24) | (h6 << 12) | h7,
        ),
        dim=-1,
    )
    return words.flatten(-2).to(torch.int32).view(torch.uint8)


def sign_bit(values: torch.Tensor) -> torch.Tensor:
    """Whether the sign bit of an fp32 value is set (-0 and NaN included)."""
    return values.contiguous().view(torch.int32) < 0


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
