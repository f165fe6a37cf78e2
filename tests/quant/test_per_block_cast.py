"""per_block_cast and its two relatives: bit-exact against the references, on every kind of input and layout."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
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
    ROW,
    SIZES,
    VALUES,
    Input,
    assert_same_sf,
    flags_of,
)
from tilekernels import config
from tilekernels.layout import SfLayout, ceildiv
from tilekernels.quant import (
    cast_back,
    per_block_cast,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
)
from tilekernels.quant._formats import FORMATS, decode, storage_width
from tilekernels.quant._reference import cast_back_ref
from tilekernels.quant._sf import SF_DTYPES, load_sf
from tilekernels.quant.per_block_cast import (
    per_block_cast_ref,
    per_block_cast_with_precomputed_sf_ref,
    per_block_cast_with_sf_only_ref,
)
from tilekernels.testing import assert_equal, check_bias

FULL = os.environ.get("TK_FULL_TEST", "0").lower() in ("1", "true")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BLOCKS = ((32, 32), (128, 128), (32, 128), (128, 32))
LAYOUTS = (ROW, ROUNDED, PACKED, COL, COL_ROUNDED, COL_PACKED)  # scales in e4m3 are not offered


def flags(layout: SfLayout) -> dict[str, bool]:
    return {name: value for name, value in flags_of(layout).items() if name != "use_e4m3_sf"}


@dataclass(frozen=True)
class Case:
    """One call; `out` says which outputs the caller gives: "", "data", "sf" or "both"."""

    input: Input
    fmt: str
    block: tuple[int, int]
    layout: SfLayout = ROW
    out: str = ""

    @property
    def id(self) -> str:
        out = f"-out_{self.out}" if self.out else ""
        return f"{self.input.id}-to-{self.fmt}-{self.block[0]}x{self.block[1]}-{self.layout.label}{out}"

    @property
    def num_blocks(self) -> tuple[int, int]:
        return ceildiv(self.input.num_tokens, self.block[0]), ceildiv(self.input.hidden, self.block[1])

    def options(self) -> dict[str, Any]:
        return {"fmt": self.fmt, "block_size": self.block, **flags(self.layout)}


def random_cases(count: int, seed: int) -> Iterator[Case]:
    choose = random.Random(seed)
    for _ in range(count):
        hidden = choose.choice(HIDDEN)
        num_tokens = choose.choice(SIZES if hidden <= 2112 else SIZES[:12])
        gap, offset = choose.choice((0, 0, 0, 1, 8, 64)), choose.choice((0, 0, 0, 1, 8))
        source = Input(choose.choice(("bf16", "fp32")), num_tokens, hidden, choose.choice(VALUES), gap, offset)
        layout = choose.choice(LAYOUTS)
        out = choose.choice(("", "", "data") if layout.col_major else ("", "", "data", "sf", "both"))
        yield Case(source, choose.choice(("e4m3", "e2m1")), choose.choice(BLOCKS), layout, out)


CASES = [pytest.param(case, id=f"{at:03}-{case.id}") for at, case in enumerate(random_cases(240, seed=11))]


def given_data(case: Case, device: str) -> torch.Tensor:
    format = FORMATS[case.fmt]
    shape = (case.input.num_tokens, storage_width(case.input.hidden, format))
    return torch.full(shape, 0x55, dtype=torch.uint8, device=device).view(format.dtype)


def given_sf(case: Case, device: str, gap: int = 0) -> torch.Tensor:
    """Row-major scales to write into, with `gap` unused elements after each row."""
    rows, columns = case.num_blocks[0], case.layout.columns(case.num_blocks[1])
    dtype = SF_DTYPES[case.layout.dtype]
    raw = torch.full((rows, (columns + gap) * dtype.itemsize), 0x55, dtype=torch.uint8, device=device)
    return raw.view(dtype)[:, :columns]


def check_cast(case: Case, device: str) -> None:
    x, options = case.input.make(device), case.options()
    data = given_data(case, device) if case.out in ("data", "both") else None
    sf = given_sf(case, device, gap=2) if case.out in ("sf", "both") else None
    actual = per_block_cast(x, **options, **({"out": (data, sf)} if case.out else {}))
    expected = per_block_cast_ref(x, **options)
    assert_equal(actual[0], expected[0])
    if sf is None:
        assert_same_sf(actual[1], expected[1], case.layout, case.num_blocks[1])
    else:
        scales = [load_sf(each, *case.num_blocks) for each in (sf, expected[1])]
        assert_equal(*scales, check_stride=False)
    assert data is None or actual[0] is data
    assert sf is None or actual[1] is sf


def check_other_modes(case: Case, device: str) -> None:
    x, options = case.input.make(device), case.options()
    sf = given_sf(case, device) if case.out in ("sf", "both") else None
    only = per_block_cast_with_sf_only(x, **options, out_sf=sf)
    assert_same_sf(only, per_block_cast_with_sf_only_ref(x, **options), case.layout, case.num_blocks[1])
    assert sf is None or only is sf

    scales = per_block_cast_with_sf_only_ref(x, case.fmt, case.block, round_sf=case.layout.rounded)
    strided = given_sf(Case(case.input, case.fmt, case.block), device, gap=3 if case.out else 0).copy_(scales)
    data = given_data(case, device) if case.out in ("data", "both") else None
    actual = per_block_cast_with_precomputed_sf(x, case.fmt, case.block, strided, out=data)
    assert_equal(actual, per_block_cast_with_precomputed_sf_ref(x, case.fmt, case.block, scales))
    assert data is None or actual is data


# ---- random calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[::6])
def test_cast_on_cpu(case: Case) -> None:
    check_cast(case, "cpu")


@pytest.mark.parametrize("case", CASES[::12])
def test_other_modes_on_cpu(case: Case) -> None:
    check_other_modes(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_cast_on_gpu(case: Case) -> None:
    check_cast(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_other_modes_on_gpu(case: Case) -> None:
    check_other_modes(case, "cuda")


# ---- independent formulations ----------------------------------------------------------------------------------------

NUMPY = {"e4m3": ml_dtypes.float8_e4m3fn, "e2m1": ml_dtypes.float4_e2m1fn}


def finite_bf16() -> torch.Tensor:
    """Every bf16 bit pattern in 512 x 128; those of infinities and NaN replaced by zero."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(512, 128)
    return torch.where(x.isfinite(), x, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("power", [-20, -1, 0, 3, 40])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_every_bf16_value_with_given_scales(fmt: str, power: int, device: str) -> None:
    """Scales at a power of two and one ulp on either side of it."""
    x, limit = finite_bf16(), np.float32(FORMATS[fmt].max_value)
    bits = torch.tensor(2.0**power).view(torch.int32) + torch.tensor([-1, 0, 1, 0], dtype=torch.int32)
    sf = bits.view(torch.float32)[:, None].contiguous()
    data = per_block_cast_with_precomputed_sf(x.to(device), fmt, (128, 128), sf.to(device))
    with np.errstate(over="ignore", under="ignore"):
        scaled = x.float().numpy() * np.repeat(np.float32(1) / sf.numpy(), 128, axis=0)
    expected = np.clip(scaled, -limit, limit).astype(NUMPY[fmt]).astype(np.float32)
    assert_equal(decode(data).cpu(), torch.from_numpy(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_ties_and_their_neighbours(fmt: str, dtype: torch.dtype, device: str) -> None:
    """Halfway between each two values of the format, and one step of fp32 to either side; scales are one."""
    format = FORMATS[fmt]
    codes = torch.arange(127 if fmt == "e4m3" else 8, dtype=torch.uint8)
    grid = codes.view(torch.float8_e4m3fn).float() if fmt == "e4m3" else decode((codes * 17).view(torch.int8))[::2]
    ties = ((grid[1:] + grid[:-1]) / 2).to(dtype)
    steps = torch.tensor([-1, 0, 1], dtype=torch.int32 if dtype == torch.float32 else torch.int16)
    near = (ties.view(steps.dtype)[:, None] + steps).view(dtype).flatten()
    values = torch.cat((near, -near, torch.tensor([0.0, -0.0, format.max_value, -format.max_value], dtype=dtype)))
    x = torch.zeros(128 * 128, dtype=dtype)
    x[: len(values)] = values
    data, sf = per_block_cast(x.reshape(128, 128).to(device), fmt, (128, 128), round_sf=True)
    assert sf.item() == 1.0
    expected = x.float().numpy().astype(NUMPY[fmt]).astype(np.float32)
    assert_equal(decode(data).cpu().flatten(), torch.from_numpy(expected))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [ROW, COL_ROUNDED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(("fmt", "half_step"), [("e4m3", 1 / 16), ("e2m1", 1 / 4)])
def test_there_and_back_is_within_half_a_step_and_unbiased(
    fmt: str, half_step: float, block: tuple[int, int], layout: SfLayout, device: str
) -> None:
    x = torch.randn((500, 576), device=device) * 10
    pair = per_block_cast(x, fmt, block, **flags(layout))
    back = cast_back(pair, "fp32", block)
    assert_equal(back, cast_back_ref(pair, "fp32", block))
    check_bias(back, x)
    sf = load_sf(pair[1], ceildiv(500, block[0]), ceildiv(576, block[1]))
    spread = sf.repeat_interleave(block[0], 0)[:500].repeat_interleave(block[1], 1)[:, :576]
    smallest_normal = 2.0**-6 if fmt == "e4m3" else 1.0
    assert ((back - x).abs() <= torch.maximum(x.abs(), smallest_normal * spread) * half_step * (1 + 1e-6)).all()


@pytest.mark.parametrize("device", DEVICES)
def test_amax_clamp_is_read_at_call_time(device: str) -> None:
    x = torch.full((3, 64), 0.25, device=device)
    try:
        config.set_amax_clamp_for_quant("e4m3", False, 896.0)
        sf = per_block_cast(x, "e4m3", (32, 32))[1]
        only = per_block_cast_with_sf_only(x, "e4m3", (32, 32))
    finally:
        config.reset_runtime_config()
    assert sf.unique().tolist() == only.unique().tolist() == [2.0]


@pytest.mark.parametrize("device", DEVICES)
def test_given_outputs_beside_other_memory(device: str) -> None:
    """Nothing is written outside the given views."""
    x = torch.randn((70, 192), device=device)
    memory = torch.full((3, 8), 0x55, dtype=torch.int32, device=device)
    data = torch.full((72, 192), 0x55, dtype=torch.uint8, device=device)
    out = (data[1:71].view(torch.float8_e4m3fn), memory[:, 2:4])
    per_block_cast(x, "e4m3", (32, 32), round_sf=True, use_packed_ue8m0=True, out=out)
    expected = per_block_cast_ref(x, "e4m3", (32, 32), False, True, True)
    assert_equal(out[0], expected[0])
    assert_equal(load_sf(out[1], 3, 6).contiguous(), load_sf(expected[1], 3, 6).contiguous())
    for beside in (memory[:, :2], memory[:, 4:], data[0], data[71]):
        assert (beside == 0x55).all()


# ---- published and large sizes ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [ROUNDED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("hidden", [576, 2048, 2560, 3072, 4096, 6144, 7168])
def test_published_sizes(hidden: int, block: tuple[int, int], kind: str, fmt: str, layout: SfLayout) -> None:
    for num_tokens in [*([0, 1] if FULL else []), 4001, 8001]:
        case = Case(Input(kind, num_tokens, hidden), fmt, block, layout)
        check_cast(case, "cuda")
        check_other_modes(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 128), (32, 32)], ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_more_than_two_to_the_31_elements(fmt: str, block: tuple[int, int]) -> None:
    hidden = 7168
    num_tokens = 2**31 // hidden + 1001
    if 8 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = torch.randn((num_tokens, hidden), device="cuda", dtype=torch.bfloat16)
    data, sf = per_block_cast(x, fmt, block)
    only = per_block_cast_with_sf_only(x, fmt, block)
    again = per_block_cast_with_precomputed_sf(x, fmt, block, sf)
    for start in (0, num_tokens // 2 // 128 * 128, (num_tokens - 4000) // 128 * 128):
        rows, blocks = slice(start, start + 3840), slice(start // block[0], (start + 3840) // block[0])
        expected = per_block_cast_ref(x[rows], fmt, block)
        assert_equal(data[rows], expected[0])
        assert_equal(sf[blocks], expected[1])
        assert_equal(only[blocks], expected[1])
        assert_equal(again[rows], per_block_cast_with_precomputed_sf_ref(x[rows], fmt, block, expected[1]))
