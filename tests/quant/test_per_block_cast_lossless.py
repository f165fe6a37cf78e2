"""per_block_cast_lossless: values stay what they were; data and scales are the reference's, bit by bit."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.quant.cast_cases import (
    COL,
    COL_PACKED,
    COL_ROUNDED,
    HIDDEN,
    PACKED,
    ROUNDED,
    SIZES,
    assert_same_sf,
    with_gap,
)
from tilekernels.errors import ArgumentError
from tilekernels.layout import SfLayout, ceildiv
from tilekernels.quant import cast_back, per_block_cast_lossless
from tilekernels.quant._formats import pack_e2m1
from tilekernels.quant._reference import cast_back_ref
from tilekernels.quant._sf import load_sf, store_sf
from tilekernels.quant.per_block_cast_lossless import per_block_cast_lossless_ref
from tilekernels.testing import assert_equal

FULL = os.environ.get("TK_FULL_TEST", "0").lower() in ("1", "true")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
IN_LAYOUTS = (ROUNDED, PACKED, COL_ROUNDED, COL_PACKED)
OUT_LAYOUTS = (*IN_LAYOUTS, COL)
TYPICAL = (((1, 32), (1, 128)), ((1, 32), (32, 32)), ((1, 32), (128, 128)))
BLOCKS = (
    *TYPICAL,
    ((1, 16), (1, 16)), ((1, 16), (2, 64)), ((2, 32), (4, 32)), ((1, 32), (8, 64)), ((4, 64), (16, 128)),
    ((32, 32), (64, 128)), ((5, 32), (5, 64)), ((3, 8), (6, 32)), ((1, 2), (1, 8)), ((1, 32), (1, 512)),
    ((1, 4096), (7, 8192)), ((1, 32), (256, 256)), ((1, 32), (1000, 32)),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    num_tokens: int
    hidden: int
    x_block: tuple[int, int]
    block: tuple[int, int]
    x_layout: SfLayout
    layout: SfLayout
    highest: int = 5  # binades that scales of a block of the output may be apart, up to 11
    center: int = 0  # exponent that scales are around
    row_gap: int = 0
    offset: int = 0

    @property
    def id(self) -> str:
        blocks = "to".join(f"{rows}x{columns}" for rows, columns in (self.x_block, self.block))
        layouts = f"{self.x_layout.label}-to-{self.layout.label}"
        place = f"-gap{self.row_gap}-at{self.offset}" if self.row_gap or self.offset else ""
        return f"{self.num_tokens}x{self.hidden}-{blocks}-{layouts}-spread{self.highest}-around{self.center}{place}"

    def options(self) -> dict[str, Any]:
        return {
            "fmt": "e4m3",
            "x_block_size": self.x_block,
            "out_block_size": self.block,
            "use_tma_aligned_col_major_sf": self.layout.col_major,
            "round_sf": self.layout.rounded,
            "use_packed_ue8m0": self.layout.packed,
        }

    def make(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Every code, with scales that differ by up to `highest` binades."""
        data = pack_e2m1(torch.randint(0, 16, (self.num_tokens, self.hidden), device=device).to(torch.uint8))
        shape = ceildiv(self.num_tokens, self.x_block[0]), ceildiv(self.hidden, self.x_block[1])
        exponent = self.center + torch.randint(0, self.highest + 1, shape, device=device)
        sf = ((exponent + 127).clamp(1, 254).int() << 23).view(torch.float32)
        return with_gap(data, self.row_gap, self.offset) if self.row_gap or self.offset else data, store_sf(
            sf, self.x_layout
        )


def random_cases(count: int, seed: int) -> Iterator[Case]:
    choose = random.Random(seed)
    for at in range(count):
        hidden = choose.choice((32, 96, *HIDDEN))
        num_tokens = choose.choice(SIZES if hidden <= 2112 else SIZES[:12])
        blocks = BLOCKS[at % len(BLOCKS)]
        layouts = choose.choice(IN_LAYOUTS), choose.choice(OUT_LAYOUTS)
        spread, center = choose.choice((0, 5, 11)), choose.choice((0, -3, 40, -127, -124, 116))
        gap, offset = choose.choice((0, 0, 1, 8, 24)), choose.choice((0, 0, 1, 8))
        yield Case(num_tokens, hidden, *blocks, *layouts, spread, center, gap, offset)


CASES = [pytest.param(case, id=f"{at:03}-{case.id}") for at, case in enumerate(random_cases(256, seed=13))]


def check(case: Case, device: str) -> None:
    pair = case.make(device)
    data, sf = per_block_cast_lossless(pair, **case.options())
    expected = per_block_cast_lossless_ref(pair, **case.options())
    assert_equal(data, expected[0])
    assert_same_sf(sf, expected[1], case.layout, ceildiv(case.hidden, case.block[1]))
    if case.center > -120:  # below, scales of the output underflow
        assert_equal(cast_back_ref((data, sf), "fp32", case.block), cast_back_ref(pair, "fp32", case.x_block))


@pytest.mark.parametrize("case", CASES[::5])
def test_on_cpu(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [ROUNDED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize(("x_block", "block"), [*TYPICAL, ((1, 32), (256, 256))], ids=str)
def test_scales_are_the_largest_less_six_binades(
    x_block: tuple[int, int], block: tuple[int, int], layout: SfLayout, device: str
) -> None:
    case = Case(300, 192, x_block, block, COL_PACKED, layout, highest=11)
    pair = case.make(device)
    data, sf = per_block_cast_lossless(pair, **case.options())
    assert_equal(cast_back(pair, "fp32", x_block), cast_back((data, sf), "fp32", block))
    x_sf = load_sf(pair[1], 300 // x_block[0], 6).cpu().numpy()
    out_sf = load_sf(sf, ceildiv(300, block[0]), ceildiv(192, block[1])).cpu().numpy()
    for row, column in np.ndindex(out_sf.shape):
        part = x_sf[row * block[0] : (row + 1) * block[0], column * block[1] // 32 : (column + 1) * block[1] // 32]
        assert out_sf[row, column] == part.max() / 64


def test_range_that_does_not_fit_is_refused_on_cpu() -> None:
    data = torch.zeros((2, 32), dtype=torch.int8)
    sf = torch.tensor([[1.0, 2.0**12], [1.0, 1.0]])
    with pytest.raises(ArgumentError, match="x must have scales within a factor of 2\\^11 in each block"):
        per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 64))
    per_block_cast_lossless((data, sf), "e4m3", (1, 32), (1, 32))
    per_block_cast_lossless((data, sf / torch.tensor([[1.0, 2.0]])), "e4m3", (1, 32), (1, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(1, 128), (256, 256)], ids=str)
def test_range_that_does_not_fit_is_rounded_on_gpu(block: tuple[int, int]) -> None:
    case = Case(130, 256, (1, 32), block, ROUNDED, ROUNDED, highest=30)
    pair = case.make("cuda")
    actual, expected = (each(pair, **case.options()) for each in (per_block_cast_lossless, per_block_cast_lossless_ref))
    for x, y in zip(actual, expected, strict=True):
        assert_equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [ROUNDED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("x_layout", [ROUNDED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize(("x_block", "block"), TYPICAL, ids=str)
@pytest.mark.parametrize("hidden", [576, 2048, 2560, 3072, 4096, 6144, 7168])
def test_published_sizes(
    hidden: int, x_block: tuple[int, int], block: tuple[int, int], x_layout: SfLayout, layout: SfLayout
) -> None:
    for num_tokens in [*([0, 1] if FULL else []), 4001, 8001]:
        check(Case(num_tokens, hidden, x_block, block, x_layout, layout), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (256, 256)], ids=str)
def test_more_than_two_to_the_31_elements(block: tuple[int, int]) -> None:
    hidden = 7168
    num_tokens = 2**31 // hidden + 1001
    if 6 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    data = torch.randint(-128, 128, (num_tokens, hidden // 2), device="cuda", dtype=torch.int8)
    sf = torch.exp2(torch.randint(-3, 3, (num_tokens, hidden // 32), device="cuda").float())
    out, out_sf = per_block_cast_lossless((data, sf), "e4m3", (1, 32), block)
    for start in (0, num_tokens // 2 // 256 * 256, (num_tokens - 4000) // 256 * 256):
        rows, blocks = slice(start, start + 3840), slice(start // block[0], (start + 3840) // block[0])
        expected = per_block_cast_lossless_ref((data[rows], sf[rows]), "e4m3", (1, 32), block)
        assert_equal(out[rows], expected[0])
        assert_equal(out_sf[blocks], expected[1])
