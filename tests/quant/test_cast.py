"""cast: every pair of dtypes against torch and ml_dtypes, and stochastic rounding against its definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.refusals import Refusal
from tilekernels.quant import cast
from tilekernels.quant._stochastic import random_bits
from tilekernels.quant.cast import cast_ref
from tilekernels.testing import assert_equal, quant_level_rank
from tilekernels.testing.generator import generate_rand_float

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP32, FP16, E4M3 = torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn
DTYPES = (BF16, FP32, FP16, E4M3)
PAIRS = list(itertools.permutations(DTYPES, 2))
STOCHASTIC = [(FP32, BF16), (FP32, E4M3), (BF16, E4M3)]
NUMPY: dict[torch.dtype, Any] = {
    BF16: ml_dtypes.bfloat16, FP32: np.float32, FP16: np.float16, E4M3: ml_dtypes.float8_e4m3fn
}  # fmt: skip
SIZES = (1, 3, 4, 7, 8, 31, 500, 2047, 2048, 2049, 4096, 65536 + 12)


def short(value: Any) -> str:
    return str(value).removeprefix("torch.")


def make(count: int, dtype: torch.dtype, device: str, offset: int = 0) -> torch.Tensor:
    """Values of every magnitude that the dtype holds, `offset` elements into their memory."""
    values = generate_rand_float((offset + count,), device)
    values = torch.where(torch.rand_like(values) < 0.5, torch.randn_like(values) * 3, values)
    if dtype is E4M3:
        values = values.clamp(-448, 448)
    return values.to(dtype)[offset:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=short)
def test_equals_the_reference(source: torch.dtype, target: torch.dtype, size: int, device: str) -> None:
    for offset in (0, 1, 4):
        x = make(size, source, device, offset)
        assert_equal(cast(x, target), cast_ref(x, target))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", DTYPES, ids=short)
@pytest.mark.parametrize("source", DTYPES, ids=short)
def test_every_value_of_small_dtypes_equals_numpy(source: torch.dtype, target: torch.dtype, device: str) -> None:
    """All bit patterns of one and two bytes, and as many of fp32; saturating to e4m3."""
    if source is E4M3:
        x = torch.arange(256, dtype=torch.uint8).view(E4M3)
    elif source is FP32:
        x = (torch.arange(65536, dtype=torch.int64) * 65536 + 32768 + torch.arange(65536) % 3 - 1).int().view(FP32)
    else:
        x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source)
    finite = x.float().isfinite()
    x = torch.where(finite, x.float(), 1.5).to(source)
    values = x.float().numpy()
    if target is E4M3:
        values = values.clip(-448, 448)
    with np.errstate(over="ignore"):
        expected = values.astype(NUMPY[target]).astype(np.float32)
    assert_equal(cast(x.to(device), target).float().cpu(), torch.from_numpy(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=short)
def test_infinities_nan_and_zeros(source: torch.dtype, target: torch.dtype, device: str) -> None:
    ends = [float("nan"), 0.0, -0.0] if source is E4M3 else [float("nan"), 0.0, -0.0, float("inf"), -float("inf")]
    out = cast(torch.tensor(ends).to(source).to(device), target).float().cpu()
    assert out[0].isnan()
    assert out[1:3].eq(0).all()
    assert out[1:3].signbit().tolist() == [False, True]
    if source is not E4M3:
        assert out[3:].tolist() == ([448.0, -448.0] if target is E4M3 else [float("inf"), -float("inf")])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5, 7), (2, 3, 4, 5)], ids=str)
def test_any_shape(shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, device=device)
    for target in DTYPES:
        assert_equal(cast(x, target), cast_ref(x, target))
    assert cast(x, FP32) is not x


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [0, 4, 8, 28, 2048, 2052, 65536 + 12])
@pytest.mark.parametrize(("source", "target"), STOCHASTIC, ids=short)
def test_stochastic_equals_the_reference(source: torch.dtype, target: torch.dtype, size: int, device: str) -> None:
    for offset in (0, 1, 4):
        x = make(size, source, device, offset)
        assert_equal(cast(x, target, stochastic_rounding=True), cast_ref(x, target, True))


def hash_of(four: list[float], group: int) -> int:
    """The published definition on Python's integers."""
    weights = (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D)
    bits = np.array(four, dtype=np.float32).view(np.uint32).tolist()
    h = (sum(bit * weight for bit, weight in zip(bits, weights, strict=True)) + group) & 0xFFFFFFFF
    h ^= h >> 23
    h = h * 0x7FEB352D & 0xFFFFFFFF
    return h ^ (h >> 16)


def last_step(h: int, multiplier: int) -> int:
    word = h * multiplier & 0xFFFFFFFF
    return word ^ (word >> 11)


def test_stochastic_bf16_by_the_definition() -> None:
    x = torch.randn(400)
    out = cast(x, BF16, stochastic_rounding=True)
    for group in range(100):
        four = x[4 * group : 4 * group + 4].tolist()
        h = hash_of(four, group)
        r0, r1 = last_step(h, 0x846CA68B), last_step(h, 0xD35A2D97)
        for value, random, actual in zip(
            four, (r0 & 0xFFFF, r0 >> 16, r1 & 0xFFFF, r1 >> 16), out[4 * group : 4 * group + 4], strict=True
        ):
            bits = int(np.array(value, dtype=np.float32).view(np.uint32)) + random >> 16
            assert actual.view(torch.int16).item() & 0xFFFF == bits


def test_random_bits_by_the_definition() -> None:
    x = torch.randn(1, 400)
    bits = random_bits(x)[0].tolist()
    for group in range(100):
        word = last_step(hash_of(x[0, 4 * group : 4 * group + 4].tolist(), group), 0x846CA68B)
        low, high = word & 0xFFFF, word >> 16
        expected = [low, int(f"{low:016b}"[::-1], 2), high, int(f"{high:016b}"[::-1], 2)]
        assert bits[4 * group : 4 * group + 4] == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("target", [BF16, E4M3], ids=short)
def test_stochastic_saturates_and_keeps_what_is_exact(target: torch.dtype, device: str) -> None:
    largest = torch.finfo(target).max
    inputs = [float("inf"), -float("inf"), 3.4e38, -3.4e38, 0.0, -0.0, 1.0, largest]
    out = cast(torch.tensor(inputs, device=device), target, stochastic_rounding=True).float().cpu()
    assert out[:4].tolist() == [largest, -largest, largest, -largest]
    assert out[4:].tolist() == [0.0, 0.0, 1.0, largest]
    assert out[5].signbit()
    nan = cast(torch.full((4,), float("nan"), device=device), target, stochastic_rounding=True)
    assert nan.float().isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "target"), STOCHASTIC, ids=short)
def test_stochastic_rounding_is_unbiased_over_ten_million_values(source: torch.dtype, target: torch.dtype) -> None:
    count = 10_000_000
    x = (torch.rand(count, device="cuda") * 2 + 1).to(source)  # in [1, 4): two binades
    out = cast(x, target, stochastic_rounding=True).double()
    step = (2.0**-7 if target is BF16 else 2.0**-3) * torch.where(x >= 2, 2.0, 1.0).double()
    error = (out - x.double()) / step
    assert error.abs().max() < 1
    # The error of one value is at most one step and its standard deviation at most half of one. The 16 random bits cut
    # the probability of rounding up off, by half of 2^-16 on average.
    assert abs(error.mean().item()) < 6 * 0.5 / count**0.5 + 2.0**-16
    up = (out > x.double()).double()
    below = (x.double() / step - (x.double() / step).floor()) * (out != x.double())
    assert abs((up - below).mean().item()) < 6 * 0.5 / count**0.5 + 2.0**-16


@pytest.mark.parametrize("device", DEVICES)
def test_stochastic_takes_one_of_the_two_neighbours(device: str) -> None:
    x = torch.randn(40_000, device=device) * 100
    nearest, stochastic = cast(x, E4M3), cast(x, E4M3, stochastic_rounding=True)
    distance = (quant_level_rank(nearest) - quant_level_rank(stochastic)).abs()
    assert distance.max() == 1
    assert 0.1 < distance.float().mean() < 0.4
    assert_equal(cast(x, E4M3, stochastic_rounding=True), stochastic)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("source", "target", "stochastic"), [(BF16, E4M3, False), (BF16, E4M3, True), (E4M3, BF16, False)], ids=short
)
def test_more_than_two_to_the_31_elements(source: torch.dtype, target: torch.dtype, stochastic: bool) -> None:
    count = 2**31 + 4_000_004
    if 8 * count > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    pattern = torch.randn(1_000_003, device="cuda").to(source)
    x = torch.empty(count, dtype=source, device="cuda")
    for start in range(0, count, len(pattern)):
        x[start : start + len(pattern)] = pattern[: count - start]
    out = cast(x, target, stochastic_rounding=stochastic)
    if not stochastic:
        for start in (0, 2**31 - 2000, count - 4000):
            assert_equal(out[start : start + 4000], cast_ref(x[start : start + 4000], target))
        return
    distance = quant_level_rank(out[-4000:]) - quant_level_rank(cast_ref(x[-4000:], target))
    assert distance.abs().max() == 1


# ---- refusals --------------------------------------------------------------------------------------------------------


def call(label: str, text: str, **changes: Any) -> Refusal:
    def make(device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"x": lambda device: torch.ones(64, device=device), "dtype": BF16, **changes}
        build: Callable[[str], torch.Tensor] | Any = kwargs["x"]
        return {**kwargs, "x": build(device) if callable(build) else build}

    return Refusal(label, make, text)


NAMES = "bfloat16, float32, float16, float8_e4m3fn"
REFUSALS = [
    call("x None", "x must be a tensor, got None", x=None),
    call("x a list", "x must be a tensor, got list", x=[1.0]),
    call("x of int32", f"x must be one of {NAMES}, got int32", x=lambda device: torch.ones(4, device=device).int()),
    call("to int8", f"dtype must be one of {NAMES}, got int8", dtype=torch.int8),
    call("to a name", "dtype must be a torch.dtype, got 'bf16'", dtype="bf16"),
    call("x transposed", "x must be dense, got strides .*", x=lambda device: torch.ones((4, 5), device=device).t()),
    call("x with gaps", "x must be dense, got strides .*", x=lambda device: torch.ones(9, device=device)[::2]),
    call("flag an int", "stochastic_rounding must be a bool, got int", stochastic_rounding=1),
    call(
        "stochastic to fp16",
        "dtype must be bfloat16 or float8_e4m3fn for stochastic rounding of float32, got float16",
        dtype=FP16,
        stochastic_rounding=True,
    ),
    call(
        "stochastic from e4m3",
        "dtype must be absent for stochastic rounding of float8_e4m3fn, got bfloat16",
        x=lambda device: torch.ones(4, device=device).to(E4M3),
        stochastic_rounding=True,
    ),
    call(
        "stochastic of 6",
        "x must have a multiple of 4 elements for stochastic rounding, got 6",
        x=lambda device: torch.ones(6, device=device),
        stochastic_rounding=True,
    ),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused(refusal: Refusal, device: str) -> None:
    refusal.check("quant.cast", cast, device)
