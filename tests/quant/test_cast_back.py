"""cast_back and per_token_cast_back: bit-exact against the reference and float64, for every format and layout."""

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
    HIDDEN,
    LAYOUTS,
    PACKED,
    ROUNDED,
    ROW,
    SIZES,
    flags_of,
    make_values,
    with_gap,
)
from tilekernels.layout import SfLayout
from tilekernels.quant import cast_back, per_token_cast_back
from tilekernels.quant._formats import FORMATS, decode, storage_width
from tilekernels.quant._reference import cast_ref
from tilekernels.quant._sf import store_sf
from tilekernels.quant.cast_back import cast_back_ref, per_token_cast_back_ref
from tilekernels.testing import assert_equal, calc_diff

FULL = os.environ.get("TK_FULL_TEST", "0").lower() in ("1", "true")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One call: what was cast with which blocks and scales, how the data lies in memory, and what it becomes."""

    kind: str
    num_tokens: int
    hidden: int
    block: tuple[int, int]
    layout: SfLayout
    fmt: str
    values: str = "normal"
    row_gap: int = 0
    offset: int = 0

    @property
    def id(self) -> str:
        place = f"-gap{self.row_gap}-at{self.offset}" if self.row_gap or self.offset else ""
        block = f"{self.block[0]}x{self.block[1]}"
        size = f"{self.num_tokens}x{self.hidden}"
        return f"{size}-{self.kind}-{block}-{self.layout.label}-{self.values}{place}-to-{self.fmt}"

    @property
    def special(self) -> str | None:
        return "e5m6" if self.kind == "e5m6" else None

    def make(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = make_values(self.values, (self.num_tokens, self.hidden), torch.float32, device)
        data, sf = cast_ref(x, self.kind, self.block, **flags_of(self.layout))
        return (with_gap(data, self.row_gap, self.offset) if self.row_gap or self.offset else data), sf


def random_cases(count: int, seed: int) -> Iterator[Case]:
    choose = random.Random(seed)
    for at in range(count):
        kind = ("e4m3", "e2m1", "e4m3", "e2m1", "e5m6")[at % 5]
        hidden = choose.choice((8, 16, 40, 64, 136, 576, 2048) if kind == "e5m6" else HIDDEN)
        num_tokens = choose.choice(SIZES if hidden <= 2112 else SIZES[:12])
        columns = choose.choice((1, 2, 3, 4, 8, 16, 20, 32, 64, 128, hidden, hidden + 5))
        rows = choose.choice((1, 1, 5, 32, 96, 128, 2000))
        layout = choose.choice([each for each in LAYOUTS if not (kind == "e5m6" and each.e4m3)])
        gap, offset = choose.choice((0, 0, 0, 1, 8, 48)), choose.choice((0, 0, 0, 1, 4, 12))
        values = choose.choice(("normal", "wide", "zeros", "tiny", "largest", "mixed"))
        fmt = choose.choice(("bf16", "fp32"))
        yield Case(kind, num_tokens, hidden, (rows, columns), layout, fmt, values, gap, offset)


CASES = [pytest.param(case, id=f"{at:03}-{case.id}") for at, case in enumerate(random_cases(300, seed=12))]


def check(case: Case, device: str) -> None:
    pair = case.make(device)
    actual = cast_back(pair, case.fmt, case.block, case.special)
    assert_equal(actual, cast_back_ref(pair, case.fmt, case.block, case.special))
    if case.block[0] == 1:
        assert_equal(per_token_cast_back(pair, case.fmt, case.block[1], x_special_fmt=case.special), actual)


@pytest.mark.parametrize("case", CASES[::6])
def test_on_cpu(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_gpu(case: Case) -> None:
    check(case, "cuda")


# ---- independent formulations ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("power", [-126, -40, 0, 60, 118])
@pytest.mark.parametrize("kind", ["e4m3", "e2m1", "e5m6"])
def test_every_code_times_scales_around_a_power_of_two(kind: str, power: int, fmt: str, device: str) -> None:
    """Each code in each column; scales one ulp below, at and above 2^power. float64 holds the product exactly."""
    format = FORMATS[kind]
    if kind == "e5m6":  # all 4096 codes but those of infinities and NaN, packed as the reference packs them
        halves = (torch.arange(4096, dtype=torch.int32) << 4).to(torch.int16).view(torch.half).float()
        data = cast_ref(torch.where(halves.isfinite(), halves, 65024).reshape(1, 4096), kind, (1, 4096), round_sf=True)[
            0
        ]
    else:
        data = torch.arange(256, dtype=torch.uint8).repeat(4).view(format.dtype).reshape(1, -1)
        data = torch.where(data.float().isnan(), 0, data.float()).to(format.dtype) if kind == "e4m3" else data
    data = data.view(torch.uint8).expand(3, -1).contiguous().view(format.dtype)
    hidden = data.shape[1] * 8 // format.bits
    one = torch.tensor(2.0**power).view(torch.int32)
    sf = (one + torch.tensor([-1, 0, 1], dtype=torch.int32)).view(torch.float32)[:, None].contiguous()
    out = cast_back((data.to(device), sf.to(device)), fmt, (1, hidden), "e5m6" if kind == "e5m6" else None)
    with np.errstate(over="ignore", under="ignore"):
        product = (decode(data).double().numpy() * sf.double().numpy()).astype(np.float32)
    assert_equal(out.cpu(), torch.from_numpy(product).to(DTYPES[fmt]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
def test_nan_stays_nan_and_zero_keeps_its_sign(fmt: str, device: str) -> None:
    data = torch.zeros((2, 64), dtype=torch.uint8)
    data[0, 0], data[0, 1], data[1, 0] = 0x7F, 0xFF, 0x80
    pair = (data.view(torch.float8_e4m3fn).to(device), torch.ones((2, 1), device=device))
    out = cast_back(pair, fmt, (1, 64)).cpu()
    assert out[0, :2].isnan().all()
    assert out[0, 2:].eq(0).all()
    assert out[1, 0].signbit()
    assert not out[1, 1].signbit()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", [ROUNDED, PACKED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("rows", [32, 96, 128, 40])
def test_scales_of_single_channels(rows: int, layout: SfLayout, fmt: str, device: str) -> None:
    """Blocks that are one channel wide: every channel has an exponent of its own, packed words hold four rows."""
    num_tokens, hidden = 300, 192
    data = torch.randn((num_tokens, hidden)).clamp(-6, 6).to(torch.float8_e4m3fn)
    exponents = torch.randint(-30, 30, (-(-num_tokens // rows), hidden))
    sf = torch.exp2(exponents.float())
    stored = store_sf(sf, layout, block_cols=1)
    out = cast_back((data.to(device), stored.to(device)), fmt, (rows, 1))
    expected = torch.stack([data[i].double() * sf[i // rows].double() for i in range(num_tokens)])
    assert_equal(out.cpu(), expected.float().to(DTYPES[fmt]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "bound"), [("e4m3", 1e-3), ("e2m1", 2e-2), ("e5m6", 1e-4)], ids=["e4m3", "e2m1", "e5m6"]
)
def test_is_close_to_what_was_cast(kind: str, bound: float, device: str) -> None:
    x = torch.randn((300, 576), device=device)
    pair = cast_ref(x, kind, (1, 576 if kind == "e5m6" else 32))
    special = "e5m6" if kind == "e5m6" else None
    assert calc_diff(per_token_cast_back(pair, "fp32", 576 if special else 32, special), x) < bound


@pytest.mark.parametrize("device", DEVICES)
def test_scales_may_be_views_of_wider_tensors(device: str) -> None:
    data, sf = cast_ref(torch.randn((70, 192), device=device), "e4m3", (32, 64))
    expected = cast_back_ref((data, sf), "bf16", (32, 64))
    wide = torch.zeros((3, 7), device=device)
    wide[:, 2:5] = sf
    assert_equal(cast_back((data, wide[:, 2:5]), "bf16", (32, 64)), expected)
    tall = torch.zeros((3, 9), device=device)
    tall[:, 4:7] = sf.t()
    assert_equal(cast_back((data, tall.t()[4:7]), "bf16", (32, 64)), expected)


# ---- published and large sizes ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", [ROUNDED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("kind", ["e4m3", "e2m1", "e5m6"])
@pytest.mark.parametrize("hidden", [576, 2048, 2560, 3072, 4096, 6144, 7168])
def test_published_sizes(hidden: int, kind: str, layout: SfLayout, fmt: str) -> None:
    for num_tokens in [*([0, 1] if FULL else []), 4001, 8001]:
        for columns in (hidden,) if kind == "e5m6" else (16, 32, 128, hidden):
            case = Case(kind, num_tokens, hidden, (1, columns), layout, fmt)
            pair = case.make("cuda")
            actual = per_token_cast_back(pair, fmt, columns, case.special)
            assert_equal(actual, per_token_cast_back_ref(pair, fmt, columns, case.special))


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", [ROW, ROUNDED, COL, PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("block", [(128, 1), (32, 1), (128, 128), (32, 32), (32, 128)], ids=str)
@pytest.mark.parametrize("hidden", [576, 2048, 2560, 3072, 4096, 6144, 7168])
def test_published_blocks(hidden: int, block: tuple[int, int], layout: SfLayout, fmt: str) -> None:
    for num_tokens in [*([0, 1] if FULL else []), 4001, 8001]:
        check(Case("e4m3", num_tokens, hidden, block, layout, fmt), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "block"),
    [("e4m3", (128, 128)), ("e4m3", (128, 1)), ("e2m1", (1, 32)), ("e5m6", (1, 7168))],
    ids=str,
)
def test_more_than_two_to_the_31_elements(kind: str, block: tuple[int, int]) -> None:
    hidden = 7168
    num_tokens = 2**31 // hidden + 1001
    if 10 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    width = storage_width(hidden, FORMATS[kind])
    data = torch.randint(0, 120, (num_tokens, width), device="cuda", dtype=torch.uint8).view(FORMATS[kind].dtype)
    sf = torch.rand((-(-num_tokens // block[0]), -(-hidden // block[1])), device="cuda")
    special: Any = "e5m6" if kind == "e5m6" else None
    out = cast_back((data, sf), "bf16", block, special)
    for start in (0, num_tokens // 2 // 128 * 128, (num_tokens - 4000) // 128 * 128):
        rows, blocks = slice(start, start + 3840), slice(start // block[0], (start + 3840) // block[0])
        assert_equal(out[rows], cast_back_ref((data[rows], sf[blocks]), "bf16", block, special))
