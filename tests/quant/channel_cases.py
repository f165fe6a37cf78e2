"""Inputs and settings of per-channel casts as data: what the tests of these operators draw their calls from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.quant.cast_cases import LAYOUTS, PAIR_VALUES, ROUNDED, VALUES, flags_of, make_values, with_gap
from tilekernels.layout import SfLayout
from tilekernels.quant._reference import cast_ref

# Around vectors, blocks of 32 and tiles of 128; the transposing operators take multiples of 128 only.
TOKENS = (0, 1, 2, 7, 8, 15, 31, 32, 33, 96, 100, 127, 128, 129, 255, 256, 300, 384, 513, 1000)
HIDDEN = (64, 128, 192, 320, 576, 768, 1024, 2112, 4096, 7168)
BLOCKS = (32, 128)


@dataclass(frozen=True)
class Case:
    """One call of per_channel_cast; with num_positions one of per_channel_cast_fused."""

    kind: str
    num_tokens: int
    hidden: int
    num_per_tokens: int = 128
    values: str = "normal"
    round_sf: bool = False
    packed: bool = False
    row_gap: int = 0
    offset: int = 0
    group: int = 128
    sf_layout: SfLayout = ROUNDED
    num_positions: int | None = None

    @property
    def id(self) -> str:
        place = f"-gap{self.row_gap}-at{self.offset}" if self.row_gap or self.offset else ""
        pair = f"-npc{self.group}-{self.sf_layout.label}" if self.kind == "e4m3" else ""
        positions = "" if self.num_positions is None else f"-to{self.num_positions}"
        scales = f"{'-rounded' if self.round_sf else ''}{'-packed' if self.packed else ''}"
        shape = f"{self.num_tokens}x{self.hidden}{positions}"
        return f"{shape}-{self.kind}{pair}-npt{self.num_per_tokens}-{self.values}{scales}{place}"

    def kwargs(self, device: str) -> dict[str, Any]:
        shape = (self.num_tokens, self.hidden)
        dtype = torch.bfloat16 if self.kind == "bf16" else torch.float32
        x: Any = make_values(self.values, shape, dtype, device)
        options: dict[str, Any] = {"fmt": "e4m3", "num_per_tokens": self.num_per_tokens, "round_sf": self.round_sf}
        if self.kind == "e4m3":
            data, sf = cast_ref(x, "e4m3", (1, self.group), **flags_of(self.sf_layout))
            x = self._placed(data), sf
            options["num_per_channels"] = self.group
        else:
            x = self._placed(x)
        if self.packed:
            options["use_packed_ue8m0"] = True
        if self.num_positions is not None:
            options["pos_to_token"] = make_positions(self.num_tokens, self.num_positions, device)
        return {"x": x, **options}

    def _placed(self, matrix: torch.Tensor) -> torch.Tensor:
        return with_gap(matrix, self.row_gap, self.offset) if self.row_gap or self.offset else matrix


def make_positions(num_tokens: int, num_positions: int, device: str) -> torch.Tensor:
    """Rows to pick: each several times or never, some of them padding, some beyond the last row."""
    positions = torch.randint(-2, num_tokens + 2, (num_positions,), device=device, dtype=torch.int32)
    positions[num_positions // 3 : num_positions // 2] = -1
    return positions


def random_casts(count: int, seed: int, fused: bool = False) -> Iterator[Case]:
    """Valid calls over all inputs, sizes and ways to store the scales."""
    choose = random.Random(seed)
    for _ in range(count):
        kind = choose.choice(("bf16", "fp32", "e4m3"))
        hidden = choose.choice(HIDDEN)
        num_tokens = choose.choice(TOKENS if hidden <= 2112 else TOKENS[:14])
        num_positions = choose.choice((None, 0, 1, 16, 100, 128, 144, 400, 640)) if fused else None
        round_sf = choose.random() < 0.5
        yield Case(
            kind,
            num_tokens,
            hidden,
            choose.choice(BLOCKS),
            choose.choice(PAIR_VALUES if kind == "e4m3" else VALUES),
            round_sf,
            round_sf and not fused and choose.random() < 0.5,
            choose.choice((0, 0, 1, 4, 8, 16, hidden)),
            choose.choice((0, 0, 0, 1, 2, 8)),
            choose.choice((32, 128)),
            choose.choice(LAYOUTS),
            num_positions,
        )


def random_transposing_casts(count: int, seed: int) -> Iterator[Case]:
    """Valid calls of the operators that transpose: bf16, whole tiles of tokens."""
    choose = random.Random(seed)
    for _ in range(count):
        hidden = choose.choice(HIDDEN)
        num_tokens = choose.choice((0, 128, 128, 256, 384, 640) if hidden <= 2112 else (128, 256))
        row_gap, offset = choose.choice((0, 0, 1, 4, 8, 64, hidden)), choose.choice((0, 0, 0, 1, 2, 8))
        round_sf = choose.random() < 0.5
        npt = choose.choice(BLOCKS)
        yield Case("bf16", num_tokens, hidden, npt, choose.choice(VALUES), round_sf, False, row_gap, offset)


def every_bf16() -> torch.Tensor:
    """Every finite bf16 value, (512, 128): 128 neighbouring tokens of a channel lie within a few binades."""
    bits = torch.arange(65536, dtype=torch.int32)
    finite = bits[(bits & 0x7F80) != 0x7F80]
    return (
        torch.nn.functional.pad(finite, (0, 65536 - finite.numel())).view(512, 128).to(torch.int16).view(torch.bfloat16)
    )


def at_powers_of_two() -> torch.Tensor:
    """fp32 (128, 576); maxima of channels are 448 times a power of two, the next number below, and the next above."""
    exponents = torch.arange(-22, 170).float()  # below 2^-22 the clamp rules; 448 * 2^119 is near the largest number
    exponents = torch.where(exponents > 118, exponents - 192, exponents)
    powers = (448.0 * torch.exp2(exponents.double())).float()
    beside = torch.stack((powers, powers.view(torch.int32).sub(1).view(torch.float32), _next(powers)), dim=1).flatten()
    x = torch.rand((128, beside.numel())) * beside
    x[torch.arange(beside.numel()) % 128, torch.arange(beside.numel())] = beside
    return x * (torch.randint(0, 2, x.shape) * 2 - 1)


def _next(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32).add(1).view(torch.float32)
