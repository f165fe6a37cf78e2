"""randn and randn_like: Philox to the bit, the normal transform in float64, and whether the numbers look normal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engram.gates import FULL
from tilekernels import rand
from tilekernels.rand.randn_like import _randn, normal_numbers, philox_words
from tilekernels.testing import assert_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Of fp32 numbers from those in float64 with the same draws. uniform() rounds to 24 bits before the logarithm
TOLERANCE = 3e-6


def philox_in_integers(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds in Python's integers."""
    for _ in range(10):
        even, odd = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        low = 0xFFFFFFFF
        counter = [(odd >> 32) ^ counter[1] ^ key[0], odd & low, (even >> 32) ^ counter[3] ^ key[1], even & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def normal_in_float64(words: list[int]) -> list[float]:
    numbers = []
    for first, second in (words[:2], words[2:]):
        uniform = torch.tensor(float(first)).float() * 2.0**-32 + 2.0**-33
        signed = second - 2**32 if second >= 2**31 else second
        radius = math.sqrt(-2 * math.log(uniform.item()))
        angle = math.pi * torch.tensor(float(signed)).float().item() * 2.0**-31
        numbers += [radius * math.cos(angle), radius * math.sin(angle)]
    return numbers


STATES = [(0, 0), (1, 0), (2**63 - 1, 2**63 - 1), (123456789012345678, 987654321098765432)]


def test_known_answers() -> None:
    """Published ones of Random123."""
    assert philox_in_integers([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox_in_integers([ones] * 4, [ones] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_draws_and_numbers(device: str, state: tuple[int, int]) -> None:
    count = 403
    given = torch.tensor(state, device=device)
    seed, offset = ([value & 0xFFFFFFFF, value >> 32] for value in state)
    expected_words = [philox_in_integers([index, 0, *offset], seed) for index in range(-(-count // 4))]
    assert torch.stack(philox_words(given, len(expected_words)), dim=1).tolist() == expected_words
    expected = [number for words in expected_words for number in normal_in_float64(words)][:count]
    exact = torch.tensor(expected, dtype=torch.float64, device=device)
    for numbers in (normal_numbers(given, count), fill(given, count)):
        assert (numbers.double() - exact).abs().max() < TOLERANCE


def fill(state: torch.Tensor, count: int, dtype: torch.dtype = torch.float32, offset: int = 0) -> torch.Tensor:
    """Straight from the kernel, behind `offset` elements that stay as they are."""
    storage = torch.full((count + offset + 3,), 9.0, dtype=dtype, device=state.device)
    out = storage[offset : offset + count]
    _randn(state, out)
    assert (storage[:offset] == 9).all()
    assert (storage[offset + count :] == 9).all()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("device", DEVICES)
def test_a_number_depends_on_its_place_alone(device: str, dtype: torch.dtype) -> None:
    state = torch.tensor([5, 6], device=device)
    whole = fill(state, 5000)
    for count in (0, 1, 2, 3, 4, 7, 8, 9, 1023, 1024, 1025, 2047, 2048, 2049, 4999):
        for offset in (0, 1, 4):
            assert_equal(fill(state, count, dtype, offset), whole[:count].to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_shapes_dtypes_and_seed(device: str) -> None:
    rand.set_seed(7)
    first = [rand.randn(3, 5, device=device), rand.randn((3, 5), dtype=torch.bfloat16, device=device)]
    like = rand.randn_like(torch.zeros((4, 6), dtype=torch.float16, device=device).T)
    assert (like.shape, like.dtype, like.device.type) == ((6, 4), torch.float16, device)
    assert like.is_contiguous()
    assert [each.dtype for each in first] == [torch.float32, torch.bfloat16]
    assert not torch.equal(first[0].bfloat16(), first[1])  # another call, other numbers
    torch.manual_seed(7)
    assert_equal(rand.randn(3, 5, device=device), first[0])
    assert rand.randn(0, 3, device=device).shape == (0, 3)
    assert rand.randn((), device=device).shape == ()
    assert rand.randn(device=device).shape == ()
    assert rand.randn(4).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.gpu
def test_replayed_graph_gives_fresh_numbers() -> None:
    import tilekernels

    tilekernels.preload("rand.randn")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        numbers = rand.randn(1000, device="cuda")
    torch.manual_seed(3)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(numbers.clone())
    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[1], results[2])
    torch.manual_seed(3)
    assert_equal(rand.randn(1000, device="cuda"), results[0])  # and the numbers that the seed promises


@pytest.mark.gpu
def test_more_than_2_to_the_32_numbers() -> None:
    """The upper half of the counter."""
    state, count = torch.tensor([11, 12], device="cuda"), 2**34 + 40
    if torch.cuda.mem_get_info()[0] < 3 * count:
        pytest.skip("needs 34 GB")
    out = torch.empty(count, dtype=torch.bfloat16, device="cuda")
    _randn(state, out)
    index = torch.tensor([2**32 - 1, 2**32, 2**32 + 9], device="cuda")
    low, high = state & 0xFFFFFFFF, state >> 32
    from tilekernels.moe._random import philox

    zero = torch.zeros_like(index)
    words = philox([index & 0xFFFFFFFF, index >> 32, zero + low[1], zero + high[1]], (int(low[0]), int(high[0])))
    for at, each in zip(index.tolist(), torch.stack(words, dim=1).tolist(), strict=True):
        expected = torch.tensor(normal_in_float64(each))
        torch.testing.assert_close(out[4 * at : 4 * at + 4].float().cpu(), expected, rtol=0.01, atol=1e-4)


# ---- whether they look normal ----------------------------------------------------------------------------------------


def check_normal(numbers: torch.Tensor) -> None:
    """Moments, the largest distance of the distributions, tails, and correlations: each within 5 standard errors."""
    x = numbers.double()
    error = len(x) ** -0.5
    assert abs(x.mean()) < 5 * error
    assert abs(x.square().mean() - 1) < 5 * math.sqrt(2) * error
    assert abs(x.pow(3).mean()) < 5 * math.sqrt(15) * error
    assert abs(x.pow(4).mean() - 3) < 5 * math.sqrt(96) * error
    # Kolmogorov-Smirnov: beyond 2.5 / sqrt(n) is one in 134,000
    ordered = numbers.sort().values.double()
    share = torch.special.ndtr(ordered)
    steps = torch.arange(len(x) + 1, device=x.device, dtype=torch.float64) / len(x)
    assert max((share - steps[:-1]).max(), (steps[1:] - share).max()) < 2.5 * error
    for limit in (2.0, 3.0, 4.0, 4.5):
        expected = len(x) * math.erfc(limit / math.sqrt(2))
        assert abs((x.abs() > limit).sum() - expected) < 5 * math.sqrt(expected) + 5
    # Neighbours, those of a Philox call, of a thread, a warp and a block: of the numbers, and of their squares
    for lag in (1, 2, 3, 4, 8, 32, 128, 256, 1024, 2048):
        assert abs((x[lag:] * x[:-lag]).mean()) < 5 * error
        assert abs(((x[lag:].square() - 1) * (x[:-lag].square() - 1)).mean()) < 10 * error


def test_numbers_look_normal() -> None:
    check_normal(rand.randn(200_000, device="cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20) if FULL else [])
def test_seeds_look_normal(seed: int) -> None:
    rand.set_seed(seed)
    check_normal(rand.randn(8001, 7168, device="cuda").view(-1))


@pytest.mark.gpu
def test_ten_to_the_eight_numbers_look_normal() -> None:
    numbers = rand.randn(10**8, device="cuda")
    for part in numbers.split(10**8 // 2):  # of two calls nothing is left in common either
        check_normal(part)
    check_normal(numbers)
    other = rand.randn(10**8, device="cuda")
    assert abs((numbers.double() * other.double()).mean()) < 5e-4


# ---- invalid calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: rand.randn(3, dtype=torch.float64), TypeError, "randn: dtype must be float32, .*, got float64"),
        (lambda: rand.randn(3, dtype=torch.int32), TypeError, "randn: dtype must be float32, .*, got int32"),
        (lambda: rand.randn_like(torch.zeros(3).long()), TypeError, "randn_like: input must be float32, .*, got int64"),
        (lambda: rand.randn_like([1.0]), TypeError, "randn_like: input must be a tensor, got list"),
        (lambda: rand.set_seed(1.5), TypeError, "set_seed: seed must be an int, got float"),
    ],
)
def test_refused(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=rf"^rand\.{text}$"):
        call()
