"""batched_transpose_weight_sf: every byte by the definition, results given again, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.refusals import Refusal
from tilekernels.errors import ArgumentError
from tilekernels.quant import batched_transpose_weight_sf
from tilekernels.quant.batched_transpose_weight_sf import batched_transpose_weight_sf_ref
from tilekernels.testing import assert_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAME = "quant.batched_transpose_weight_sf"
# Shapes of scales: with and without groups, not all multiples of four
SHAPES = {128: [(1, 1), (2, 3), (3, 5, 2), (1, 8, 4), (56, 16)], 32: [(4, 8), (2, 4, 12), (1, 16, 4)]}


def make(shape: tuple[int, ...], device: str) -> torch.Tensor:
    exponents = torch.randint(0, 255, shape, device=device)
    return (exponents.int() << 23).view(torch.float32)


def make_all(block_size: int, device: str) -> list[torch.Tensor]:
    return [make(shape, device) for shape in SHAPES[block_size]]


def byte(words: torch.Tensor, *index: int) -> int:
    """Byte `index[-1] % 4` of the word that holds it."""
    return (int(words[(*index[:-1], index[-1] // 4)].item()) >> (8 * (index[-1] % 4))) & 0xFF


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block_size", [32, 128])
def test_every_byte_by_the_definition(block_size: int, transposed: bool, device: str) -> None:
    sf = make_all(block_size, device)[:3]
    pairs = batched_transpose_weight_sf(sf, block_size, [transposed] * len(sf), [None] * len(sf))
    for scales, (sf0, sf1) in zip(sf, pairs, strict=True):
        grouped = scales if scales.dim() == 3 else scales[None]
        groups, rows, columns = grouped.shape
        exponents = (grouped.view(torch.int32) >> 23).tolist()
        assert sf0.shape == (*scales.shape[:-2], rows * block_size, -(-columns // 4))
        assert sf0.stride()[-2:] == (1, rows * block_size)
        length = columns * block_size
        lines = -(-rows // 4)
        assert sf1.shape == (*scales.shape[:-2], *((lines, length) if transposed else (length, lines)))
        assert sf1.stride()[-2:] == ((length, 1) if transposed else (1, length))
        words0 = (sf0 if scales.dim() == 3 else sf0[None]).cpu()
        words1 = (sf1.transpose(-1, -2) if transposed else sf1).cpu()
        words1 = words1 if scales.dim() == 3 else words1[None]
        for group, row, column in itertools.product(
            range(groups), range(-(-rows // 4) * 4), range(-(-columns // 4) * 4)
        ):
            exists = row < rows and column < columns
            for inside in (0, block_size - 1):
                if row < rows:
                    expected = exponents[group][row][column] if exists else 0
                    assert byte(words0, group, row * block_size + inside, column) == expected
                if column < columns:
                    expected = exponents[group][row][column] if exists else 0
                    assert byte(words1, group, column * block_size + inside, row) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("block_size", [32, 128])
def test_equals_the_reference(block_size: int, device: str) -> None:
    sf = make_all(block_size, device)
    flags = [i % 2 == 0 for i in range(len(sf))]
    actual = batched_transpose_weight_sf(sf, block_size, flags, [None] * len(sf))
    expected = batched_transpose_weight_sf_ref(sf, block_size, flags)
    for pair, expected_pair in zip(actual, expected, strict=True):
        for x, y in zip(pair, expected_pair, strict=True):
            assert_equal(x, y)
    storages = {x.untyped_storage().data_ptr() for pair in actual for x in pair}
    assert len(storages) == 1, "the new results of a call share one buffer"


@pytest.mark.parametrize("device", DEVICES)
def test_results_are_written_again(device: str) -> None:
    sf, flags = make_all(128, device), [False, True, True, False, True]
    pairs = batched_transpose_weight_sf(sf, 128, flags, [None] * 5)
    later = [make(tuple(scales.shape), device) for scales in sf]
    again = batched_transpose_weight_sf(later, 128, flags, [pairs[0], None, pairs[2], pairs[3], None])
    expected = batched_transpose_weight_sf_ref(later, 128, flags)
    for pair, expected_pair in zip(again, expected, strict=True):
        for x, y in zip(pair, expected_pair, strict=True):
            assert_equal(x, y)
    for i in (0, 2, 3):
        assert again[i][0] is pairs[i][0]
        assert again[i][1] is pairs[i][1]


@pytest.mark.parametrize("device", DEVICES)
def test_tuples_and_no_weights(device: str) -> None:
    assert batched_transpose_weight_sf([], 128, [], []) == []
    sf = (make((2, 3), device),)
    assert_equal(
        batched_transpose_weight_sf(sf, 128, (True,), (None,))[0][1],
        batched_transpose_weight_sf_ref(sf, 128, [True])[0][1],
    )


def test_scales_that_are_no_powers_of_two_are_refused_on_cpu() -> None:
    for value in (3.0, -1.0, 1e-40):
        sf = torch.ones((2, 2))
        sf[1, 0] = value
        with pytest.raises(ArgumentError, match="sf must hold positive powers of two"):
            batched_transpose_weight_sf([sf], 128, [False], [None])


def call(label: str, text: str, **changes: Any) -> Refusal:
    def make_arguments(device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "sf": lambda device: [torch.ones((2, 3), device=device)],
            "block_size": 128,
            "transpose_sf1s": [False],
            "outs": [None],
            **changes,
        }
        return {name: value(device) if callable(value) else value for name, value in kwargs.items()}

    return Refusal(label, make_arguments, text)


def one(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    return lambda device: [torch.ones(shape, dtype=dtype, device=device)]


def int_pair(device: str, shape: tuple[int, int] = (256, 1), strides: tuple[int, int] = (1, 256)) -> list[Any]:
    first = torch.zeros(2048, dtype=torch.int32, device=device).as_strided(shape, strides)
    return [(first, torch.zeros(384, dtype=torch.int32, device=device).as_strided((384, 1), (1, 384)))]


REFUSALS = [
    call("sf a tensor", "sf must be a list, got Tensor", sf=lambda device: torch.ones((1, 2, 3), device=device)),
    call("outs None", "outs must be a list, got NoneType", outs=None),
    call("too few flags", "transpose_sf1s must have an entry for each of 1 weights, got 0", transpose_sf1s=[]),
    call("too many outs", "outs must have an entry for each of 1 weights, got 2", outs=[None, None]),
    call("block 64", "block_size must be 32 or 128, got 64", block_size=64),
    call("block a float", "block_size must be an int, got float", block_size=128.0),
    call("flag an int", "transpose_sf1s must hold bools, got int", transpose_sf1s=[1]),
    call("sf None", r"sf\[0\] must be a tensor, got NoneType", sf=[None]),
    call("sf of bf16", r"sf\[0\] must be float32, got bfloat16", sf=one((2, 3), torch.bfloat16)),
    call("sf of rank 1", r"sf\[0\] must have 2 or 3 dimensions, got 1", sf=one((4,))),
    call(
        "3 blocks of 32",
        r"sf\[0\] must have rows and columns for multiples of 128 channels, and at least one of each, got \(4, 3\)",
        sf=lambda device: [torch.ones((4, 3), device=device)],
        block_size=32,
    ),
    call("no groups", r"sf\[0\] must have rows .*, got \(0, 2, 2\)", sf=one((0, 2, 2))),
    call("sf transposed", r"sf\[0\] must be dense, got .*", sf=lambda device: [torch.ones((3, 2), device=device).t()]),
    call("out one tensor", r"outs\[0\] must be None or a pair \(sf0, sf1\), got Tensor", outs=[torch.zeros(2, 2)]),
    call(
        "out shorter",
        r"outs\[0\]\[0\] must have shape \(256, 1\) and strides .*, got shape \(255, 1\) and .*",
        outs=lambda device: int_pair(device, (255, 1)),
    ),
    call(
        "out row-major",
        r"outs\[0\]\[0\] must have shape .*, got .*strides \(2, 1\)",
        outs=lambda device: int_pair(device, (256, 1), (2, 1)),
    ),
    call("sf1 not transposed", r"outs\[0\]\[1\] must have shape \(1, 384\) .*", outs=int_pair, transpose_sf1s=[True]),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused(refusal: Refusal, device: str) -> None:
    refusal.check(NAME, batched_transpose_weight_sf, device)
