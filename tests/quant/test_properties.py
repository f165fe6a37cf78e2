"""What holds between the casts for every input, tried with inputs that hypothesis makes up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.quant.cast_cases import make_values
from tilekernels.layout import ceildiv
from tilekernels.quant import (
    cast_back,
    per_block_cast,
    per_block_cast_lossless,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
    per_token_cast,
    per_token_cast_and_cast_back,
    per_token_cast_back,
    per_token_cast_with_precomputed_sf,
    per_token_cast_with_sf_only,
)
from tilekernels.quant._sf import load_sf
from tilekernels.testing import assert_equal, quant_level_rank

# Half the distance between neighbours, of normal numbers relative to the value, and the smallest normal number
HALF_STEP = {"e4m3": (1 / 16, 2.0**-6), "e2m1": (1 / 4, 1.0)}

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FEW = settings(max_examples=25, deadline=None)

tokens = st.integers(1, 70)
hiddens = st.sampled_from([64, 128, 192, 320])
formats = st.sampled_from(["e4m3", "e2m1"])
dtypes = st.sampled_from([torch.bfloat16, torch.float32])
kinds = st.sampled_from(["normal", "zeros", "tiny", "mixed"])
seeds = st.integers(0, 2**32)
layouts = st.sampled_from(
    [
        {},
        {"round_sf": True},
        {"use_tma_aligned_col_major_sf": True},
        {"round_sf": True, "use_packed_ue8m0": True},
        {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True},
    ]
)
sides = st.sampled_from([32, 128])
groups = st.sampled_from([16, 32, 64, 128])


@st.composite
def matrices(draw: Any) -> Any:
    """device -> a matrix; the same one for the same draw."""
    shape, dtype, kind, seed = (draw(tokens), draw(hiddens)), draw(dtypes), draw(kinds), draw(seeds)

    def make(device: str) -> torch.Tensor:
        torch.manual_seed(seed)
        return make_values(kind, shape, torch.float32, "cpu").to(dtype).to(device)

    return make


def without_small_numbers(x: torch.Tensor, least: float) -> torch.Tensor:
    """Magnitudes from `least` to 4, in fp32."""
    return torch.where(x < 0, -1.0, 1.0) * x.float().abs().clamp(least, 4)


def spread(sf: torch.Tensor, block: tuple[int, int], shape: Any) -> torch.Tensor:
    scales = load_sf(sf, ceildiv(shape[0], block[0]), ceildiv(shape[1], block[1]))
    return scales.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def check_half_step(x: torch.Tensor, back: torch.Tensor, scales: torch.Tensor, fmt: str) -> None:
    relative, smallest_normal = HALF_STEP[fmt]
    allowed = torch.maximum(x.float().abs(), smallest_normal * scales) * relative * (1 + 1e-6)
    assert ((back - x.float()).abs() <= allowed).all()


@DEVICES
@FEW
@given(make=matrices(), fmt=formats, rows=sides, columns=sides, flags=layouts)
def test_block_cast_and_back(device: str, make: Any, fmt: str, rows: int, columns: int, flags: dict[str, bool]) -> None:
    x, block = make(device), (rows, columns)
    data, sf = per_block_cast(x, fmt, block, **flags)
    check_half_step(x, cast_back((data, sf), "fp32", block), spread(sf, block, x.shape), fmt)
    only = per_block_cast_with_sf_only(x, fmt, block, **flags)
    shape = ceildiv(x.shape[0], rows), ceildiv(x.shape[1], columns)
    assert_equal(load_sf(only, *shape), load_sf(sf, *shape), check_stride=False)


@DEVICES
@FEW
@given(make=matrices(), fmt=formats, group=groups, flags=layouts)
def test_token_cast_and_back(device: str, make: Any, fmt: str, group: int, flags: dict[str, bool]) -> None:
    x = make(device)
    data, sf = per_token_cast(x, fmt, group, **flags)
    check_half_step(x, per_token_cast_back((data, sf), "fp32", group), spread(sf, (1, group), x.shape), fmt)
    only = per_token_cast_with_sf_only(x, fmt, group, **flags)
    shape = x.shape[0], ceildiv(x.shape[1], group)
    assert_equal(load_sf(only, *shape), load_sf(sf, *shape), check_stride=False)


@DEVICES
@FEW
@given(make=matrices(), fmt=formats, group=groups)
def test_powers_of_two_given_or_made_give_the_same_data(device: str, make: Any, fmt: str, group: int) -> None:
    x = make(device)
    data, sf = per_token_cast(x, fmt, group, round_sf=True)
    assert_equal(per_token_cast_with_precomputed_sf(x, fmt, group, sf), data)
    data, sf = per_block_cast(x, fmt, (32, 128), round_sf=True)
    assert_equal(per_block_cast_with_precomputed_sf(x, fmt, (32, 128), sf), data)


@DEVICES
@FEW
@given(make=matrices(), source=formats, fmt=formats, x_group=groups, group=groups)
def test_requantising_is_casting_back_and_casting(
    device: str, make: Any, source: str, fmt: str, x_group: int, group: int
) -> None:
    """With powers of two no product is rounded, so the order of the factors does not matter. No group becomes all zero:
    there the inverse of the clamp times the scale of x would be infinite."""
    pair = per_token_cast(without_small_numbers(make(device), 0.5), source, x_group, round_sf=True)
    actual = per_token_cast(pair, fmt, group, x_block_size=(1, x_group), round_sf=True)
    expected = per_token_cast(per_token_cast_back(pair, "fp32", x_group), fmt, group, round_sf=True)
    for x, y in zip(actual, expected, strict=True):
        assert_equal(x, y)


@DEVICES
@FEW
@given(
    make=matrices(), fmt=formats, group=groups, flags=st.sampled_from([{}, {"round_sf": True}, {"use_e4m3_sf": True}])
)
def test_cast_and_cast_back_is_both(device: str, make: Any, fmt: str, group: int, flags: dict[str, bool]) -> None:
    x = make(device)
    if x.shape[1] % group:
        return
    out = "fp32" if x.dtype == torch.float32 else "bf16"
    expected = per_token_cast_back(per_token_cast(x, fmt, group, **flags), out, group)
    per_token_cast_and_cast_back(x, fmt, group, **flags)
    assert_equal(x, expected)


@DEVICES
@FEW
@given(
    make=matrices(),
    x_flags=st.sampled_from([{"round_sf": True}, {"round_sf": True, "use_packed_ue8m0": True}]),
    flags=layouts,
    block=st.sampled_from([(1, 32), (1, 128), (2, 64), (32, 32), (128, 128), (256, 512)]),
)
def test_lossless_is_lossless(
    device: str, make: Any, x_flags: dict[str, bool], flags: dict[str, bool], block: tuple[int, int]
) -> None:
    x = without_small_numbers(make(device), 0.01)  # scales within the range that fits
    pair = per_token_cast(x, "e2m1", 32, **x_flags)
    out = per_block_cast_lossless(pair, "e4m3", (1, 32), block, **flags)
    assert_equal(cast_back(out, "fp32", block), cast_back(pair, "fp32", (1, 32)))


@DEVICES
@FEW
@given(make=matrices(), fmt=formats, group=groups)
def test_stochastic_rounding_takes_a_neighbour(device: str, make: Any, fmt: str, group: int) -> None:
    x = make(device)
    nearest, sf = per_token_cast(x, fmt, group)
    stochastic, stochastic_sf = per_token_cast(x, fmt, group, stochastic_cast=True)
    assert_equal(stochastic_sf, sf)
    assert ((quant_level_rank(nearest) - quant_level_rank(stochastic)).abs() <= 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_cast_is_unbiased_over_ten_million_values(fmt: str) -> None:
    """Scales are one: each group holds the format's largest number."""
    x = torch.rand((80_000, 128), device="cuda") * 1.99 + 2
    x[:, 0] = 448.0 if fmt == "e4m3" else 6.0
    data, sf = per_token_cast(x, fmt, 128, stochastic_cast=True)
    assert (sf == 1).all()
    error = (cast_back((data, sf), "fp32", (1, 128)).double() - x)[:, 1:]
    step = 0.25 if fmt == "e4m3" else 1.0  # of values between two and four
    assert error.abs().max() < step
    assert abs(error.mean().item()) < (6 * 0.5 / error.numel() ** 0.5 + 2.0**-16) * step
