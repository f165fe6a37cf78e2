"""Inputs and settings of per-token casts as data: what the tests of the three operators draw their calls from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilekernels.layout import SfLayout
from tilekernels.quant._reference import cast_ref
from tilekernels.quant._sf import load_sf
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_rand_float

ROW, ROUNDED, PACKED, E4M3_SF = (
    SfLayout(),
    SfLayout(rounded=True),
    SfLayout(rounded=True, packed=True),
    SfLayout(e4m3=True),
)
COL, COL_ROUNDED, COL_PACKED, COL_E4M3_SF = (
    SfLayout(col_major=True),
    SfLayout(col_major=True, rounded=True),
    SfLayout(col_major=True, rounded=True, packed=True),
    SfLayout(col_major=True, e4m3=True),
)
LAYOUTS = (ROW, ROUNDED, PACKED, E4M3_SF, COL, COL_ROUNDED, COL_PACKED, COL_E4M3_SF)
# Above generate_num_tokens: sizes around vectors, tiles and paddings of the scales.
SIZES = (0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 100, 127, 129, 257, 1000)
HIDDEN = (64, 128, 192, 256, 320, 384, 576, 768, 1024, 2048, 2112, 4096, 7168)
VALUES = ("normal", "wide", "zeros", "tiny", "largest", "mixed")
# Of pairs: data * sf is finite, and so is (sf * inv) in groups of zeros, where inv is the inverse of the clamp.
PAIR_VALUES = ("normal", "zeros", "tiny", "faint")


def flags_of(layout: SfLayout) -> dict[str, bool]:
    return {
        "use_tma_aligned_col_major_sf": layout.col_major,
        "round_sf": layout.rounded,
        "use_packed_ue8m0": layout.packed,
        "use_e4m3_sf": layout.e4m3,
    }


def make_values(kind: str, shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Finite values of one kind: ordinary, over all magnitudes, and where formats and clamps end."""
    largest = torch.finfo(dtype).max
    values = torch.randn(shape, device=device)
    if kind == "wide":
        values = generate_rand_float(shape, device)
    elif kind == "zeros":
        values = torch.where(values > 0, 0.0, -0.0)
    elif kind == "tiny":
        values = values * 2.0**-130
    elif kind == "largest":
        values = values.sign() * largest
    elif kind in ("mixed", "faint"):  # neighbours of sixteen that differ by many binades, down to the clamps
        most = 5 if kind == "mixed" else -2
        scale = torch.exp2(torch.randint(-30, most, (shape[0], -(-shape[1] // 16)), device=device).float())
        values = values * scale.repeat_interleave(16, dim=1)[:, : shape[1]]
    return values.clamp(-largest, largest).to(dtype)


def with_gap(matrix: torch.Tensor, row_gap: int, offset: int) -> torch.Tensor:
    """A copy with `row_gap` elements after each row and `offset` elements before the first."""
    rows, columns = matrix.shape
    raw = matrix.view(torch.uint8) if matrix.element_size() == 1 else matrix
    storage = torch.zeros(offset + rows * (columns + row_gap) + 1, dtype=raw.dtype, device=raw.device)
    view = storage.as_strided((rows, columns), (columns + row_gap, 1), offset)
    return view.copy_(raw).view(matrix.dtype)


@dataclass(frozen=True)
class Input:
    """One input: plain bf16 or fp32, or a pair of e4m3 or e2m1 data with scales for blocks of x_block."""

    kind: str
    num_tokens: int
    hidden: int
    values: str = "normal"
    row_gap: int = 0
    offset: int = 0
    x_block: tuple[int, int] | None = None
    sf_layout: SfLayout = ROUNDED

    @property
    def id(self) -> str:
        place = f"-gap{self.row_gap}-at{self.offset}" if self.row_gap or self.offset else ""
        pair = f"-{self.x_block[0]}x{self.x_block[1]}-{self.sf_layout.label}" if self.x_block else ""
        return f"{self.num_tokens}x{self.hidden}-{self.kind}{pair}-{self.values}{place}"

    def make(self, device: str) -> Any:
        shape = (self.num_tokens, self.hidden)
        if self.x_block is None:
            dtype = torch.bfloat16 if self.kind == "bf16" else torch.float32
            x = make_values(self.values, shape, dtype, device)
            return with_gap(x, self.row_gap, self.offset) if self.row_gap or self.offset else x
        x = make_values(self.values, shape, torch.float32, device)
        data, sf = cast_ref(x, self.kind, self.x_block, **flags_of(self.sf_layout))
        return (with_gap(data, self.row_gap, self.offset) if self.row_gap or self.offset else data), sf

    def make_with_block(self, device: str) -> dict[str, Any]:
        """The keyword arguments of the input."""
        return {"x": self.make(device), **({"x_block_size": self.x_block} if self.x_block else {})}


@dataclass(frozen=True)
class Case:
    """One call of per_token_cast; `out` says which outputs the caller gives: "", "data", "sf" or "both"."""

    input: Input
    fmt: str
    group: int
    layout: SfLayout = ROW
    stochastic: bool = False
    out: str = ""

    @property
    def id(self) -> str:
        extras = f"{'-stochastic' if self.stochastic else ''}{f'-out_{self.out}' if self.out else ''}"
        return f"{self.input.id}-to-{self.fmt}-npc{self.group}-{self.layout.label}{extras}"

    @property
    def num_groups(self) -> int:
        return -(-self.input.hidden // self.group)

    def options(self) -> dict[str, Any]:
        """The keyword arguments beside the input, except the outputs."""
        options: dict[str, Any] = {"fmt": self.fmt, "num_per_channels": self.group, **flags_of(self.layout)}
        return {**options, "stochastic_cast": True} if self.stochastic else options


def random_inputs(choose: random.Random, pairs: bool, hidden_sizes: tuple[int, ...] = HIDDEN) -> Iterator[Input]:
    """Endless valid inputs; the short rows with many tokens, the long rows with few."""
    while True:
        hidden = choose.choice(hidden_sizes)
        num_tokens = choose.choice(SIZES if hidden <= 2112 else SIZES[:12])
        values, pair_values = choose.choice(VALUES), choose.choice(PAIR_VALUES)
        row_gap, offset = choose.choice((0, 0, 1, 4, 8, 64, hidden)), choose.choice((0, 0, 0, 1, 2, 8))
        if not pairs or choose.random() < 0.5:
            yield Input(choose.choice(("bf16", "fp32")), num_tokens, hidden, values, row_gap, offset)
            continue
        columns = choose.choice((16, 32, 48, 64, 128, 256, hidden, hidden + 5))
        x_block = (choose.choice((1, 2, 5, 32, 128, 2000)), columns)
        kind = choose.choice(("e4m3", "e2m1"))
        yield Input(kind, num_tokens, hidden, pair_values, row_gap, offset, x_block, choose.choice(LAYOUTS))


def random_casts(count: int, seed: int) -> Iterator[Case]:
    """Valid calls of per_token_cast over all inputs, formats, groups, layouts and ways to give outputs."""
    choose = random.Random(seed)
    inputs = random_inputs(choose, pairs=True)
    e5m6_inputs = random_inputs(choose, pairs=False, hidden_sizes=(8, 16, 24, 40, 64, 136, 576, 1000, 2048, 7168))
    for at in range(count):
        fmt = choose.choice(("e4m3", "e2m1"))
        layout = choose.choice(LAYOUTS)
        if at % 8 == 7:
            source = next(e5m6_inputs)
            layout = choose.choice([each for each in LAYOUTS if not each.e4m3])
            yield Case(source, "e5m6", source.hidden, layout, out=_choose_out(choose, layout))
            continue
        source = next(inputs)
        group = choose.choice((16, 32, 64, 128, source.hidden if source.x_block is None else 128))
        yield Case(source, fmt, group, layout, choose.random() < 0.2, _choose_out(choose, layout))


def random_plain(count: int, seed: int, layouts: tuple[SfLayout, ...] = LAYOUTS) -> Iterator[Case]:
    """Valid calls of the operators that take plain inputs and fixed groups only."""
    choose = random.Random(seed)
    inputs = random_inputs(choose, pairs=False)
    for _ in range(count):
        layout = choose.choice(layouts)
        out = "sf" if not layout.col_major and choose.random() < 0.3 else ""
        yield Case(next(inputs), choose.choice(("e4m3", "e2m1")), choose.choice((16, 32, 64, 128)), layout, out=out)


def assert_same_sf(actual: torch.Tensor, expected: torch.Tensor, layout: SfLayout, num_groups: int) -> None:
    """Same dtype, shape and strides, and the same bits in every byte that holds a scale."""
    rows = expected.shape[0]
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape == layout.shape(rows, num_groups)
    if actual.numel():
        assert actual.stride() == layout.strides(rows, num_groups)
    if rows == 0:
        assert actual.stride()[1 if not layout.col_major else 0] == 1

    def bits(sf: torch.Tensor) -> torch.Tensor:
        return torch.empty((rows, num_groups), device=sf.device).copy_(load_sf(sf, rows, num_groups)).view(torch.int32)

    assert_equal(bits(actual), bits(expected))


def _choose_out(choose: random.Random, layout: SfLayout) -> str:
    return choose.choice(("", "", "data") if layout.col_major else ("", "", "data", "sf", "both"))
