"""The general cast reference against numpy arithmetic of its own, and the storage forms of scales byte by byte."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from tilekernels import config
from tilekernels._outputs import empty_sf
from tilekernels.errors import ArgumentError
from tilekernels.layout import SfLayout, align, ceildiv
from tilekernels.quant._formats import decode, unpack_from_e2m1fn_x2
from tilekernels.quant._reference import cast_back_from_e5m6_ref, cast_back_ref, cast_ref, cast_to_e5m6_ref
from tilekernels.quant._sf import SF_DTYPES, load_sf, make_sf, pack_ue8m0, store_sf, unpack_ue8m0
from tilekernels.testing import assert_equal, check_bias
from tilekernels.testing.generator import generate_rand_float

LIMITS = {"e4m3": 448.0, "e2m1": 6.0, "e5m6": 65024.0}
CLAMPS = {"e4m3": 1e-4, "e2m1": 6 * 2.0**-126, "e5m6": 1e-4}
NUMPY_FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}
LAYOUTS = [
    SfLayout(col, rounded, packed, e4m3)
    for col in (False, True)
    for rounded, packed, e4m3 in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (False, False, True),
    )
]


def flags_of(layout: SfLayout) -> dict[str, bool]:
    return {
        "use_tma_aligned_col_major_sf": layout.col_major,
        "round_sf": layout.rounded,
        "use_packed_ue8m0": layout.packed,
        "use_e4m3_sf": layout.e4m3,
    }


def power_of_two_not_below(value: np.float32) -> Fraction:
    """By exact arithmetic on the number itself, not on its bits."""
    exact, power = Fraction(float(value)), Fraction(1)
    while power < exact:
        power *= 2
    while power / 2 >= exact:
        power /= 2
    return power


def numpy_scale(amax: np.float32, fmt: str, layout: SfLayout) -> tuple[np.float32, np.float32]:
    """sf and inv of one block."""
    clamp = LIMITS[fmt] * 2.0**-9 if layout.e4m3 else CLAMPS[fmt]
    amax, limit = max(amax, np.float32(clamp)), np.float32(LIMITS[fmt])
    if layout.rounded:
        sf = power_of_two_not_below(amax / limit)
        return np.float32(float(sf)), np.float32(float(1 / sf))
    if layout.e4m3:
        sf = np.float32(min(amax / limit, np.float32(448)).astype(ml_dtypes.float8_e4m3fn))
        return sf, np.float32(1) / sf
    return amax / limit, limit / amax


def numpy_cast(x: np.ndarray, fmt: str, block: tuple[int, int], layout: SfLayout) -> tuple[np.ndarray, np.ndarray]:
    """Values after rounding to the format, before they are packed, and the scales; block by block."""
    rows, columns = x.shape
    data = np.zeros_like(x)
    sf = np.zeros((ceildiv(rows, block[0]), ceildiv(columns, block[1])), dtype=np.float32)
    for row, column in itertools.product(range(sf.shape[0]), range(sf.shape[1])):
        part = np.s_[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]]
        sf[row, column], inv = numpy_scale(np.abs(x[part]).max(), fmt, layout)
        scaled = np.clip(x[part] * inv, -LIMITS[fmt], LIMITS[fmt])
        data[part] = scaled.astype(NUMPY_FORMATS[fmt]).astype(np.float32)
    return data, sf


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("block", [(1, 32), (1, 128), (32, 32), (128, 128), (128, 1), (1, 192)], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_cast_equals_numpy(fmt: str, block: tuple[int, int], layout: SfLayout) -> None:
    if layout.packed and block[1] == 1:
        layout = SfLayout(layout.col_major, True, False, False)  # row packing has its own test
    x = torch.cat((torch.randn(40, 192), torch.randn(20, 192) * 1e-3, torch.zeros(2, 192)))
    x[0, 0], x[1, 0], x[2, 5] = 1e4, -0.0, 3e-6
    if not layout.e4m3:
        x = torch.cat((x, generate_rand_float((20, 192), "cpu")))
    data, sf = cast_ref(x, fmt, block, **flags_of(layout))
    expected, expected_sf = numpy_cast(x.numpy(), fmt, block, layout)
    assert_equal(decode(data), torch.from_numpy(expected))
    assert_equal(load_sf(sf, *expected_sf.shape), torch.from_numpy(expected_sf), check_stride=False)
    assert sf.shape == layout.shape(*expected_sf.shape)
    assert sf.stride() == layout.strides(*expected_sf.shape) or 1 in sf.shape


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_bf16_input_is_its_fp32_value(fmt: str, dtype: torch.dtype) -> None:
    x = torch.randn(5, 64).to(dtype)
    for actual, expected in zip(cast_ref(x, fmt, (1, 32)), cast_ref(x.float(), fmt, (1, 32)), strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize("fmt", ["e4m3", "e2m1", "e5m6"])
def test_rounded_scale_of_every_bf16_maximum(fmt: str) -> None:
    amax = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    limit = LIMITS[fmt]
    sf, inv = make_sf(amax, limit, CLAMPS[fmt], round_sf=True)
    quotient = (np.maximum(amax.numpy(), np.float32(CLAMPS[fmt])) / np.float32(limit)).astype(np.float64)
    mantissa, exponent = np.frexp(quotient)  # mantissa in [0.5, 1): one half is a power of two already
    expected = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    assert_equal(sf.double(), torch.from_numpy(expected))
    assert_equal(inv.double(), torch.from_numpy(1 / expected))


def test_clamp_is_read_from_config() -> None:
    x = torch.full((1, 64), 1e-3)
    try:
        config.set_amax_clamp_for_quant("e4m3", False, 448.0)
        data, sf = cast_ref(x, "e4m3", (1, 64))
    finally:
        config.reset_runtime_config()
    assert sf.item() == 1.0
    assert data.float()[0, 0].item() == 2.0**-9 * round(1e-3 / 2.0**-9)
    assert cast_ref(x, "e4m3", (1, 64))[1].item() == pytest.approx(1e-3 / 448)


# ---- pairs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_layout", LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("in_fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("x_block", [(1, 32), (32, 32), (128, 128), (7, 48), (3, 1000)], ids=str)
def test_pair_multiplies_by_both_factors_at_once(x_block: tuple[int, int], in_fmt: str, in_layout: SfLayout) -> None:
    x = torch.randn(70, 192) * 3
    pair = cast_ref(x, in_fmt, x_block, **flags_of(in_layout))
    data, sf = cast_ref(pair, "e4m3", (1, 64), x_block_size=x_block)
    _, x_sf = numpy_cast(x.numpy(), in_fmt, x_block, in_layout)
    values = decode(pair[0]).numpy()
    factor = np.repeat(np.repeat(x_sf, x_block[0], axis=0), x_block[1], axis=1)[:70, :192]
    for block in range(3):
        part = np.s_[:, 64 * block : 64 * block + 64]
        amax = np.maximum(np.abs(values[part] * factor[part]).max(axis=1, keepdims=True), np.float32(1e-4))
        inv = np.float32(448) / amax
        scaled = np.clip(values[part] * (factor[part] * inv), -448, 448)
        expected = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        assert_equal(data[part].view(torch.uint8), torch.from_numpy(expected), check_stride=False)
        assert_equal(sf[:, block], torch.from_numpy((amax / np.float32(448))[:, 0]), check_stride=False)


def test_precomputed_scales_divide_one_by_each() -> None:
    x, sf = torch.randn(9, 128), torch.rand(9, 2) + 0.01
    data = cast_ref(x, "e4m3", (1, 64), sf=sf)
    inv = np.repeat(np.float32(1) / sf.numpy(), 64, axis=1)
    expected = np.clip(x.numpy() * inv, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert_equal(data.view(torch.uint8), torch.from_numpy(expected))


# ---- the way back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize(("fmt", "bound"), [("e4m3", 1 / 16), ("e2m1", 1 / 4)])
@pytest.mark.parametrize("block", [(1, 32), (32, 32), (1, 192)], ids=str)
def test_cast_back_is_close_and_unbiased(fmt: str, bound: float, block: tuple[int, int], layout: SfLayout) -> None:
    x = torch.randn(130, 192) * 10
    pair = cast_ref(x, fmt, block, **flags_of(layout))
    back = cast_back_ref(pair, "fp32", block)
    check_bias(back, x)
    sf = load_sf(pair[1], ceildiv(130, block[0]), ceildiv(192, block[1]))
    spread = sf.repeat_interleave(block[0], 0)[:130].repeat_interleave(block[1], 1)[:, :192]
    # Half a step of the format: relative to the value where it is normal, else of the smallest normal number.
    smallest_normal = 2.0**-6 if fmt == "e4m3" else 1.0
    allowed = torch.maximum(x.abs(), smallest_normal * spread) * bound * (1 + 1e-6)
    if layout.e4m3:
        allowed = allowed + torch.relu(x.abs() - spread * LIMITS[fmt])  # a scale rounded down saturates its maximum
    assert ((back - x).abs() <= allowed).all()
    assert_equal(cast_back_ref(pair, "bf16", block), back.bfloat16())


@pytest.mark.parametrize("num_per_channels", [192, 64])
@pytest.mark.parametrize("layout", [each for each in LAYOUTS if not each.e4m3], ids=lambda layout: layout.label)
def test_e5m6_there_and_back(num_per_channels: int, layout: SfLayout) -> None:
    x = torch.randn(33, 192)
    flags = {name: value for name, value in flags_of(layout).items() if name != "use_e4m3_sf"}
    data, sf = cast_to_e5m6_ref(x, num_per_channels, **flags)
    assert data.shape == (33, 288)
    assert sf.shape == layout.shape(33, 192 // num_per_channels)
    back = cast_back_from_e5m6_ref((data, sf), "fp32", (1, num_per_channels))
    assert ((back - x).abs() <= x.abs() / 128 + 1e-6).all()


def empty_like_layout(layout: SfLayout, rows: int, columns: int) -> torch.Tensor:
    alignment = 16 // layout.itemsize if layout.col_major else 0
    return empty_sf(rows, layout.columns(columns), SF_DTYPES[layout.dtype], alignment, torch.device("cpu"))


# ---- storage of scales -----------------------------------------------------------------------------------------------


def test_packed_words_hold_four_columns_little_endian() -> None:
    sf = torch.tensor([[2.0**-3, 2.0, 1.0, 4.0, 8.0]])
    words = pack_ue8m0(sf)
    assert words.dtype == torch.int32
    assert [f"{word & 0xFFFFFFFF:08x}" for word in words[0].tolist()] == ["817f807c", "00000082"]
    assert unpack_ue8m0(words)[0].tolist() == [0.125, 2.0, 1.0, 4.0, 8.0, 0.0, 0.0, 0.0]


def test_packing_keeps_every_exponent() -> None:
    exponents = torch.arange(256, dtype=torch.int32)
    sf = (exponents << 23).view(torch.float32)[None]
    assert_equal(unpack_ue8m0(pack_ue8m0(sf)), sf)
    raw = pack_ue8m0(sf).view(torch.uint8)[0]
    assert_equal(raw.int(), exponents)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("shape", [(5, 3), (16, 4), (1, 1), (0, 3), (33, 9), (4, 1), (7, 0)], ids=str)
def test_stored_scales_have_the_layouts_shape_strides_and_bytes(layout: SfLayout, shape: tuple[int, int]) -> None:
    rows, columns = shape
    sf = torch.exp2(torch.randint(-6, 7, shape).float())
    stored, empty = store_sf(sf, layout), empty_like_layout(layout, rows, columns)
    assert stored.shape == empty.shape == layout.shape(rows, columns)
    assert stored.dtype == empty.dtype
    loaded = load_sf(stored, rows, columns).clone(memory_format=torch.contiguous_format)
    assert_equal(loaded, sf, check_stride=False)
    if stored.numel():
        assert stored.stride() == empty.stride() == layout.strides(rows, columns)
    for tensor in (stored, empty):
        assert tensor.untyped_storage().nbytes() >= layout.storage_size(rows, columns) * layout.itemsize

    memory = bytes(stored.untyped_storage().tolist()) if stored.numel() else b""
    codes = sf.to(torch.float8_e4m3fn).view(torch.uint8) if layout.e4m3 else (sf.view(torch.int32) >> 23)
    for row, column in itertools.product(range(rows), range(columns)):
        if layout.packed and layout.col_major:
            at = column // 4 * 4 * align(rows, 4) + 4 * row + column % 4
        elif layout.packed:
            at = row * 4 * ceildiv(columns, 4) + column
        elif layout.e4m3:
            at = column * align(rows, 16) + row if layout.col_major else row * columns + column
        else:
            at = 4 * (column * align(rows, 4) + row if layout.col_major else row * columns + column)
            assert memory[at : at + 4] == sf[row, column].numpy().tobytes()
            continue
        assert memory[at] == codes[row, column].item()


def test_words_of_one_column_blocks_hold_four_rows() -> None:
    sf = torch.exp2(torch.arange(6 * 3).reshape(6, 3).float())
    words = store_sf(sf, SfLayout(rounded=True, packed=True), block_cols=1)
    assert words.shape == (2, 3)
    for row, column in itertools.product(range(6), range(3)):
        exponent = words[row // 4, column].item() >> (8 * (row % 4)) & 0xFF
        assert 2.0 ** (exponent - 127) == sf[row, column].item()
    assert_equal(load_sf(words, 6, 3, block_cols=1), sf, check_stride=False)


def test_no_rows_column_major_can_be_viewed_as_bytes() -> None:
    sf = empty_like_layout(SfLayout(col_major=True, rounded=True, packed=True), 0, 8)
    assert sf.shape == (0, 2)
    assert sf.stride() == (1, 0)
    assert sf.t().view(torch.uint8).shape == (2, 0)


@pytest.mark.parametrize(
    "flags",
    [{"use_packed_ue8m0": True}, {"use_e4m3_sf": True, "round_sf": True}],
    ids=["packed without rounding", "e4m3 with rounding"],
)
def test_meaningless_flags_are_refused(flags: dict[str, bool]) -> None:
    with pytest.raises(ArgumentError, match=r"quant\.cast_ref: use_\w+ must come with"):
        cast_ref(torch.zeros(2, 64), "e4m3", (1, 64), **flags)


def test_e2m1_reference_packs_even_columns_low() -> None:
    data, sf = cast_ref(torch.tensor([[6.0, -3.0] + [0.0] * 62]), "e2m1", (1, 64))
    assert sf.item() == 1.0
    assert data.view(torch.uint8)[0, 0].item() == 0xD7
    assert unpack_from_e2m1fn_x2(data)[0, :3].tolist() == [6.0, -3.0, 0.0]
