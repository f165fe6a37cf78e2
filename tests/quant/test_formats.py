"""The element encoders against independent formulations: ml_dtypes, exact enumeration, and the text of the formats."""

from __future__ import annotations

import itertools
import struct

import ml_dtypes
import numpy as np
import pytest
import torch

from tilekernels.errors import ArgumentError, ArgumentTypeError
from tilekernels.quant._formats import (
    E4M3,
    decode_e5m6,
    encode_e2m1,
    encode_e4m3,
    encode_e5m6,
    unpack_from_e2m1fn_x2,
)
from tilekernels.quant._stochastic import encode_stochastic, random_bits
from tilekernels.testing import assert_equal, quant_level_rank

E2M1_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1_TIES = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)]


def all_bf16() -> torch.Tensor:
    """Every bf16 value, as fp32."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def fp32_around(values: list[float], steps: int = 3) -> torch.Tensor:
    """Both signs of each value and of its nearest fp32 neighbours."""
    bits = torch.tensor(values, dtype=torch.float32).view(torch.int32)
    near = torch.cat([bits + step for step in range(-steps, steps + 1)])
    near = near[near >= 0].view(torch.float32)
    return torch.cat((near, -near))


def random_fp32(count: int, smallest: int, largest: int) -> torch.Tensor:
    """Normal numbers times a power of two of their own."""
    generator = torch.Generator().manual_seed(count)
    exponent = torch.randint(smallest, largest, (count,), generator=generator)
    return torch.randn(count, generator=generator) * torch.exp2(exponent.float())


def pad_to(values: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, -values.numel() % multiple))


def e4m3_values() -> list[float]:
    """The finite magnitudes of e4m3 in order."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    return codes.tolist()


def nearest_even(value: float, grid: list[float]) -> int:
    """Index of the nearest magnitude in `grid`, ties to the even index, in exact float64 arithmetic."""
    above = next((at for at, magnitude in enumerate(grid) if magnitude >= value), len(grid) - 1)
    if grid[above] <= value or above == 0:
        return above
    down, up = value - grid[above - 1], grid[above] - value
    return above if up < down or (up == down and above % 2 == 0) else above - 1


# ---- e4m3 ------------------------------------------------------------------------------------------------------------


def test_e4m3_of_every_bf16_value_equals_ml_dtypes() -> None:
    values = all_bf16()
    is_nan = values.isnan()
    saturated = np.clip(values[~is_nan].numpy(), -448, 448)  # ml_dtypes turns what overflows into NaN
    expected = torch.from_numpy(saturated.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    actual = encode_e4m3(values).view(torch.uint8)
    assert_equal(actual[~is_nan], expected)
    assert ((actual[is_nan] & 0x7F) == 0x7F).all()


def test_e4m3_around_every_tie_equals_exact_enumeration() -> None:
    grid = e4m3_values()
    middles = [(low + high) / 2 for low, high in itertools.pairwise(grid)]
    values = fp32_around(middles + grid)
    actual = encode_e4m3(values).view(torch.uint8).tolist()
    for value, code in zip(values.tolist(), actual, strict=True):
        sign = 0x80 if np.signbit(value) else 0
        assert code == sign | nearest_even(abs(value), grid), f"{value!r} became code {code:#x}"


@pytest.mark.parametrize(
    ("value", "code"),
    [(0.0, 0x00), (-0.0, 0x80), (-1e-30, 0x80), (449.0, 0x7E), (1e30, 0x7E), (-1e30, 0xFE)]
    + [(float("inf"), 0x7E), (float("-inf"), 0xFE), (2.0**-9, 0x01), (2.0**-10, 0x00)],
)
def test_e4m3_edges(value: float, code: int) -> None:
    assert encode_e4m3(torch.tensor([value])).view(torch.uint8).item() == code


# ---- e2m1 ------------------------------------------------------------------------------------------------------------


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    raw = encode_e2m1(pad_to(values, 2)).view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), dim=-1).flatten()[: values.numel()]


def test_e2m1_of_every_bf16_value_equals_ml_dtypes() -> None:
    values = all_bf16()
    values = values[~values.isnan()]
    saturated = np.clip(values.numpy(), -6, 6)
    expected = saturated.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert_equal(e2m1_codes(values), torch.from_numpy(expected))


def test_e2m1_around_every_tie_equals_exact_enumeration() -> None:
    values = fp32_around([tie for tie, _ in E2M1_TIES] + E2M1_MAGNITUDES)
    for value, code in zip(values.tolist(), e2m1_codes(values).tolist(), strict=True):
        sign = 8 if np.signbit(value) else 0
        assert code == sign | nearest_even(abs(value), E2M1_MAGNITUDES), f"{value!r} became code {code}"


@pytest.mark.parametrize(("tie", "expected"), E2M1_TIES)
def test_e2m1_ties_go_to_the_even_code(tie: float, expected: float) -> None:
    assert unpack_from_e2m1fn_x2(encode_e2m1(torch.tensor([tie, -tie]))).tolist() == [expected, -expected]


def test_e2m1_sign_is_copied_and_nan_is_six() -> None:
    codes = e2m1_codes(torch.tensor([-0.0, -1e-38, 1e-38, float("inf"), float("-inf"), 100.0]))
    assert codes.tolist() == [8, 8, 0, 7, 15, 7]
    assert e2m1_codes(torch.tensor([float("nan")])).item() & 7 == 7


def test_e2m1_even_columns_lie_in_the_low_nibble() -> None:
    packed = encode_e2m1(torch.tensor([[0.5, -6.0, 1.0, 0.0]]))
    assert packed.dtype == torch.int8
    assert packed.view(torch.uint8).tolist() == [[0xF1, 0x02]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_unpack_gives_every_pair_of_codes(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(2, 128)
    values = torch.tensor([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], dtype=out_dtype)
    low, high = torch.arange(256) & 15, torch.arange(256) >> 4
    expected = values[torch.stack((low, high), dim=-1)].reshape(2, 256)
    assert_equal(unpack_from_e2m1fn_x2(packed, out_dtype), expected)


def test_unpack_takes_strided_and_one_dimensional_tensors() -> None:
    packed = torch.arange(32, dtype=torch.uint8).reshape(4, 8)
    assert_equal(unpack_from_e2m1fn_x2(packed[:, ::2]), unpack_from_e2m1fn_x2(packed[:, ::2].contiguous()))
    assert_equal(unpack_from_e2m1fn_x2(packed[0]), unpack_from_e2m1fn_x2(packed)[0])


def test_unpack_refuses_a_scalar_and_other_dtypes() -> None:
    with pytest.raises(ArgumentError, match=r"quant\.unpack_from_e2m1fn_x2: x must have at least one dimension"):
        unpack_from_e2m1fn_x2(torch.tensor(1, dtype=torch.int8))
    with pytest.raises(ArgumentError, match=r"quant\.unpack_from_e2m1fn_x2: x must be int8 or uint8, got float32"):
        unpack_from_e2m1fn_x2(torch.zeros(4))
    with pytest.raises(ArgumentTypeError, match=r"quant\.unpack_from_e2m1fn_x2: x must be a tensor, got list"):
        unpack_from_e2m1fn_x2([1, 2])  # type: ignore[arg-type]


# ---- e5m6 ------------------------------------------------------------------------------------------------------------


def e5m6_code(value: float) -> int:
    """The format's text followed with struct and integers: half toward zero, then the carry of the 17 low fp32 bits."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    sign, exponent, mantissa = bits >> 31, (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if exponent - 127 > 15:
        half = 0x7BFF  # 65504, the largest
    elif exponent - 127 >= -14:
        half = ((exponent - 127 + 15) << 10) | (mantissa >> 13)
    else:  # subnormal half: an integer number of 2^-24
        half = int(abs(np.float64(np.float32(value))) * 2.0**24)
    code = ((sign << 15) | half) >> 4
    return (code + (1 if (code & 1) + (bits & 0x1FFFF) > 0x10000 else 0)) & 0xFFF


def e5m6_bytes(codes: list[int]) -> bytes:
    """Eight codes written as text of ones and zeros, cut into words, each little endian."""
    text = "".join(f"{code:012b}" for code in codes)
    return b"".join(int(text[at : at + 32], 2).to_bytes(4, "little") for at in range(0, len(text), 32))


def e5m6_inputs() -> torch.Tensor:
    largest = 65024.0
    special = fp32_around([largest, 2.0**-14, 2.0**-14 * 63 / 64, 2.0**-20, 2.0**-24, 2.0**-25, 1.0, 1.0 + 1 / 128])
    bf16 = all_bf16()
    bf16 = bf16[bf16.abs() <= largest]
    return torch.cat(
        (special[special.abs() <= largest + 100], bf16, random_fp32(20000, -30, 15).clamp(-largest, largest))
    )


def test_e5m6_bytes_equal_the_formats_text() -> None:
    values = pad_to(e5m6_inputs(), 8)
    actual = encode_e5m6(values)
    assert actual.dtype == torch.uint8
    assert actual.numel() == values.numel() * 3 // 2
    codes = [e5m6_code(value) for value in values.tolist()]
    expected = b"".join(e5m6_bytes(codes[at : at + 8]) for at in range(0, len(codes), 8))
    assert_equal(actual, torch.frombuffer(bytearray(expected), dtype=torch.uint8))


def test_e5m6_decodes_every_code() -> None:
    codes = [code for code in range(4096) if code & 0x7C0 != 0x7C0 or code & 0x3F == 0]  # NaN payloads may change
    codes = codes[: len(codes) // 8 * 8]
    data = b"".join(e5m6_bytes(codes[at : at + 8]) for at in range(0, len(codes), 8))
    halves = np.array([code << 4 for code in codes], dtype=np.uint16).view(np.float16).astype(np.float32)
    assert_equal(decode_e5m6(torch.frombuffer(bytearray(data), dtype=torch.uint8)), torch.from_numpy(halves))


def test_e5m6_rounds_normal_values_to_nearest_even() -> None:
    values = random_fp32(4096, -13, 15)
    values = values[(values.abs() >= 2.0**-14) & (values.abs() < 65024)]
    values = values[: values.numel() // 8 * 8]
    mantissa, exponent = np.frexp(values.double().numpy())
    expected = np.ldexp(np.rint(np.ldexp(mantissa, 7)), exponent - 7)  # rint: nearest even; 7 bits with the leading one
    assert_equal(decode_e5m6(encode_e5m6(values)).double(), torch.from_numpy(expected))


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def hash_in_python(bits: list[int], group: int) -> int:
    weights = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
    word = (sum(weight * each for weight, each in zip(weights, bits, strict=True)) + group) % 2**32
    word ^= word >> 23
    word = word * 0x7FEB352D % 2**32
    word ^= word >> 16
    word = word * 0x846CA68B % 2**32
    return word ^ (word >> 11)


def test_random_bits_equal_the_hash_in_python_integers() -> None:
    values = random_fp32(3 * 64, -20, 20).reshape(3, 64)
    actual = random_bits(values)
    for row in range(3):
        for group in range(16):
            columns = values[row, 4 * group : 4 * group + 4].numpy()
            word = hash_in_python(columns.view(np.uint32).tolist(), group)
            low, high = word & 0xFFFF, word >> 16
            reverse = [int(f"{half:016b}"[::-1], 2) for half in (low, high)]
            assert actual[row, 4 * group : 4 * group + 4].tolist() == [low, reverse[0], high, reverse[1]]


def stochastic_in_float64(values: torch.Tensor, fmt: str) -> torch.Tensor:
    """Neighbours on the format's grid and the carry of 16 bits, in float64."""
    grid = np.array(e4m3_values() if fmt == "e4m3" else E2M1_MAGNITUDES)
    magnitude = np.minimum(values.abs().double().numpy(), grid[-1])
    below = np.searchsorted(grid, magnitude, side="right") - 1
    above = np.minimum(below + 1, len(grid) - 1)
    gap = np.where(above > below, grid[above] - grid[below], 1.0)
    discarded = np.floor((magnitude - grid[below]) / gap * 65536)
    chosen = np.where(discarded + random_bits(values).numpy() >= 65536, above, below)
    return torch.from_numpy(chosen)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_rounding_equals_float64(fmt: str) -> None:
    values = torch.cat((random_fp32(60000, -14, 9), random_fp32(4000, -140, 127), torch.zeros(64), -torch.zeros(64)))
    values = values[: values.numel() // 64 * 64].reshape(-1, 64)
    actual = quant_level_rank(encode_stochastic(values, fmt))
    assert_equal(actual.abs().long(), stochastic_in_float64(values, fmt))
    raw = encode_stochastic(values, fmt).view(torch.uint8)
    signs = raw >> 7 if fmt == "e4m3" else torch.stack((raw >> 3 & 1, raw >> 7), dim=-1).flatten(-2)
    assert_equal(signs.bool(), torch.from_numpy(np.signbit(values.numpy())))


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_rounding_takes_a_neighbour(fmt: str) -> None:
    values = random_fp32(64 * 512, -9, 6).reshape(-1, 64)
    nearest = quant_level_rank(encode_e4m3(values) if fmt == "e4m3" else encode_e2m1(values))
    assert (quant_level_rank(encode_stochastic(values, fmt)) - nearest).abs().max() <= 1


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand((4096, 256), generator=generator) * 400 + 1  # far from subnormals and saturation
    rounded = encode_stochastic(values, "e4m3")
    assert_equal(rounded, encode_stochastic(values, "e4m3"))
    error = (rounded.double() - values.double()) / values.double()
    # The spacing is at most 1/8 of the value, so a rounding error's deviation is below 1/16; six standard errors.
    assert abs(error.mean().item()) < 6 / 16 / error.numel() ** 0.5


def test_stochastic_rounding_saturates_and_keeps_nan_and_zero() -> None:
    row = [448.0, 1e30, float("inf"), float("-inf"), -0.0, 0.0, float("nan"), -500.0]
    codes = encode_stochastic(torch.tensor([row]), "e4m3").view(torch.uint8)[0].tolist()
    assert codes[:6] == [0x7E, 0x7E, 0x7E, 0xFE, 0x80, 0x00]
    assert codes[6] & 0x7F == 0x7F
    assert codes[7] == 0xFE
    assert E4M3.max_value == 448.0
