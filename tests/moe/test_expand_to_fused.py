"""expand_to_fused and expand_to_fused_with_sf: rows copied as bytes, padding rows zero."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.moe.routings import Routing, make_mapping, place_at, random_routings
from tests.refusals import Refusal
from tilekernels.layout import align, ceildiv
from tilekernels.moe import expand_to_fused, expand_to_fused_with_sf
from tilekernels.moe.expand_to_fused import expand_to_fused_ref, expand_to_fused_with_sf_ref
from tilekernels.moe.get_fused_mapping import get_fused_mapping_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_hidden_sizes, generate_moe_params, generate_topk_idx

NAME = "moe.expand_to_fused"
NAME_WITH_SF = "moe.expand_to_fused_with_sf"

DTYPES = (
    torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float16, torch.int64, torch.uint8,
    torch.float64, torch.int32, torch.float8_e5m2,
)  # fmt: skip


def random_bytes(shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Every bit pattern: NaN of all kinds must arrive as it was."""
    raw = torch.randint(0, 256, (shape[0] * shape[1] * dtype.itemsize,), dtype=torch.uint8, device=device)
    return raw.view(dtype).reshape(shape)


@dataclass(frozen=True)
class Case:
    routing: Routing
    hidden: int
    dtype: torch.dtype
    alignment: int
    offset: int = 0

    @property
    def id(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.routing.id}-h{self.hidden}-{name}-by{self.alignment}-at{self.offset}"

    def make(self, device: str) -> dict[str, torch.Tensor]:
        token_topk_to_pos, pos_to_expert = make_mapping(self.routing, self.alignment, device)
        x = random_bytes((self.routing.num_tokens, self.hidden), self.dtype, device)
        return {
            "x": place_at(x, self.offset),
            "token_topk_to_pos": token_topk_to_pos,
            "pos_to_expert": pos_to_expert,
        }


def random_cases(count: int) -> Iterator[Case]:
    """Hidden sizes below, at and beyond the parts of a row, odd ones, and addresses off 16 bytes."""
    choose = random.Random(3)
    for at, routing in enumerate(random_routings(count, most_tokens=500, most_experts=72)):
        yield Case(
            routing,
            hidden=choose.choice((1, 2, 3, 7, 8, 16, 64, 100, 129, 512, 513, 576, 1024, 2048, 4096, 4104, 7168)),
            dtype=DTYPES[at % len(DTYPES)],
            alignment=choose.choice((1, 16, 32, 128)),
            offset=choose.choice((0, 0, 0, 1, 8)),
        )


CASES = list(random_cases(200))


@pytest.mark.parametrize("case", CASES[::10], ids=lambda case: case.id)
def test_reference_equals_copying_in_python(case: Case) -> None:
    kwargs = case.make("cpu")
    expected = [bytes(case.hidden * case.dtype.itemsize)] * kwargs["pos_to_expert"].shape[0]
    for token, positions in enumerate(kwargs["token_topk_to_pos"].tolist()):
        for position in positions:
            if position >= 0:
                expected[position] = bytes(kwargs["x"][token].view(torch.uint8).tolist())
    actual = expand_to_fused_ref(**kwargs)
    assert [bytes(row.view(torch.uint8).tolist()) for row in actual] == expected


def check_case(case: Case, device: str) -> None:
    kwargs = case.make(device)
    assert_equal(expand_to_fused(**kwargs), expand_to_fused_ref(**kwargs))


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check_case(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check_case(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_topk", range(1, 33))
def test_every_topk(num_topk: int) -> None:
    check_case(Case(Routing(77, num_topk, 32, "distinct"), 1024, torch.bfloat16, 16), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", generate_hidden_sizes())
@pytest.mark.parametrize("params", list(generate_moe_params()), ids=lambda params: "-".join(map(str, params.values())))
def test_published_sizes(params: dict[str, int], hidden: int) -> None:
    topk_idx = generate_topk_idx(params, "cuda")
    mapping = get_fused_mapping_ref(topk_idx, params["num_experts"], 0, 16)
    x = torch.randn((topk_idx.shape[0], hidden), device="cuda").bfloat16()
    for pos_to_expert in (mapping[0], mapping[1]):  # only the sign counts
        expected = expand_to_fused_ref(x, mapping[3], pos_to_expert)
        assert_equal(expand_to_fused(x, mapping[3], pos_to_expert), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("hidden", [7, 4096])
def test_without_tokens_all_rows_are_zero(hidden: int, device: str) -> None:
    """Whatever the buffer held before, and whatever pos_to_expert says."""
    x = torch.empty((0, hidden), device=device)
    token_topk_to_pos = torch.empty((0, 4), dtype=torch.int32, device=device)
    torch.full((100, hidden), torch.nan, device=device)  # what the allocator hands out again
    for value in (-1, 3):
        out = expand_to_fused(x, token_topk_to_pos, torch.full((100,), value, dtype=torch.int32, device=device))
        assert_equal(out, torch.zeros((100, hidden), device=device))


@pytest.mark.gpu
def test_million_tokens_of_which_few_are_routed() -> None:
    check_case(Case(Routing(2**20, 2, 1024, "nowhere"), 64, torch.bfloat16, 1), "cuda")
    check_case(Case(Routing(2**20, 4, 256, "masked"), 128, torch.float8_e4m3fn, 16), "cuda")


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    num_tokens, hidden = 2**20 + 3, 4096
    if 6 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = torch.randint(0, 256, (num_tokens, hidden), dtype=torch.uint8, device="cuda")
    position = torch.arange(num_tokens - 1, -1, -1, dtype=torch.int32, device="cuda").unsqueeze(1)
    out = expand_to_fused(x, position, position.squeeze(1))
    for start in (0, num_tokens // 2, num_tokens - 1000):
        assert_equal(out[start : start + 1000], x.flip(0)[start : start + 1000])


@pytest.mark.gpu
def test_same_bytes_every_time() -> None:
    kwargs = Case(Routing(4001, 8, 32, "masked"), 2048, torch.bfloat16, 128).make("cuda")
    expected = expand_to_fused_ref(**kwargs)
    for _ in range(100):
        assert_equal(expand_to_fused(**kwargs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [100, 2**31 - 1, -2, -(2**31)])
def test_gpu_passes_over_positions_out_of_range(wrong: int) -> None:
    kwargs = Case(Routing(30, 3, 4, "masked"), 512, torch.float32, 1).make("cuda")
    expected = expand_to_fused_ref(**kwargs)
    kwargs["token_topk_to_pos"][kwargs["token_topk_to_pos"] < 0] = wrong
    assert_equal(expand_to_fused(**kwargs), expected)


def test_cpu_refuses_positions_out_of_range() -> None:
    kwargs = Case(Routing(4, 2, 4, "constant"), 8, torch.float32, 1).make("cpu")
    kwargs["token_topk_to_pos"][1, 1] = 8
    with pytest.raises(ValueError, match=rf"^{NAME}: token_topk_to_pos must hold values below 8, got 8$"):
        expand_to_fused(**kwargs)


# ---- with scales -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SfCase:
    routing: Routing
    hidden: int
    num_per_channels: int
    packed: bool
    col_major: bool
    alignment: int
    offset: int = 0

    @property
    def id(self) -> str:
        layout = f"{'col' if self.col_major else 'row'}_{'packed' if self.packed else 'fp32'}"
        return f"{self.routing.id}-h{self.hidden}-c{self.num_per_channels}-{layout}-by{self.alignment}-at{self.offset}"

    def make(self, device: str) -> dict[str, Any]:
        token_topk_to_pos, pos_to_expert = make_mapping(self.routing, self.alignment, device)
        data = random_bytes((self.routing.num_tokens, self.hidden), torch.float8_e4m3fn, device)
        num_columns = ceildiv(self.hidden, self.num_per_channels * (4 if self.packed else 1))
        sf_dtype = torch.int32 if self.packed else torch.float32
        return {
            "x": (
                place_at(data, self.offset),
                random_bytes((self.routing.num_tokens, num_columns), sf_dtype, device),
            ),
            "num_per_channels": self.num_per_channels,
            "token_topk_to_pos": token_topk_to_pos,
            "pos_to_expert": pos_to_expert,
            "use_tma_aligned_col_major_sf": self.col_major,
        }


def random_sf_cases(count: int) -> Iterator[SfCase]:
    choose = random.Random(4)
    for routing in random_routings(count, most_tokens=500, most_experts=72):
        packed, col_major = choose.choice(((False, False), (False, True), (True, True)))
        yield SfCase(
            routing,
            hidden=choose.choice((1, 32, 64, 100, 128, 576, 2048, 4096, 7168, 8200, 16384)),
            num_per_channels=choose.choice((32, 128)),
            packed=packed,
            col_major=col_major,
            alignment=choose.choice((1, 3, 16, 128)),
            offset=choose.choice((0, 0, 1)),
        )


SF_CASES = list(random_sf_cases(200))


def check_sf_case(case: SfCase, device: str) -> None:
    kwargs = case.make(device)
    out, out_sf = expand_to_fused_with_sf(**kwargs)
    expected, expected_sf = expand_to_fused_with_sf_ref(**kwargs)
    assert_equal(out, expected)
    assert_equal(out_sf, expected_sf)
    if case.col_major and out_sf.shape[0]:
        pitch = align(out_sf.shape[0], 4)
        assert out_sf.stride() == (1, pitch)
        # Whole columns are readable, the padding rows of the last one too
        assert out_sf.untyped_storage().nbytes() >= 4 * pitch * out_sf.shape[1]


@pytest.mark.parametrize("case", SF_CASES[::10], ids=lambda case: case.id)
def test_reference_moves_scales_like_rows(case: SfCase) -> None:
    kwargs = case.make("cpu")
    out, out_sf = expand_to_fused_with_sf_ref(**kwargs)
    (data, sf), mapping = kwargs["x"], (kwargs["token_topk_to_pos"], kwargs["pos_to_expert"])
    assert_equal(out, expand_to_fused_ref(data, *mapping))
    assert_equal(out_sf, expand_to_fused_ref(sf, *mapping), check_stride=False)


@pytest.mark.parametrize("case", SF_CASES[::4], ids=lambda case: case.id)
def test_cpu_with_sf(case: SfCase) -> None:
    check_sf_case(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", SF_CASES, ids=lambda case: case.id)
def test_gpu_with_sf(case: SfCase) -> None:
    check_sf_case(case, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("case", [case for case in SF_CASES if case.col_major][::2], ids=lambda case: case.id)
def test_scales_turned_by_a_second_launch(case: SfCase, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for many scales: tiles of them, and what is left at the edges."""
    monkeypatch.setattr(sys.modules["tilekernels.moe.expand_to_fused"], "_MANY_SCALES", 1)
    if device == "cuda" or case.routing.num_tokens < 100:
        check_sf_case(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("packed", "col_major"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("num_per_channels", [32, 128])
@pytest.mark.parametrize("hidden", generate_hidden_sizes())
@pytest.mark.parametrize("params", list(generate_moe_params()), ids=lambda params: "-".join(map(str, params.values())))
def test_published_sizes_with_sf(
    params: dict[str, int], hidden: int, num_per_channels: int, packed: bool, col_major: bool
) -> None:
    topk_idx = generate_topk_idx(params, "cuda")
    mapping = get_fused_mapping_ref(topk_idx, params["num_experts"], 0, 16)
    num_columns = ceildiv(hidden, num_per_channels * (4 if packed else 1))
    data = random_bytes((topk_idx.shape[0], hidden), torch.float8_e4m3fn, "cuda")
    sf = random_bytes((topk_idx.shape[0], num_columns), torch.int32 if packed else torch.float32, "cuda")
    arguments = ((data, sf), num_per_channels, mapping[3], mapping[0], col_major)
    for x, y in zip(expand_to_fused_with_sf(*arguments), expand_to_fused_with_sf_ref(*arguments), strict=True):
        assert_equal(x, y)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def plain_call(device: str, **changes: Any) -> dict[str, Any]:
    kwargs: dict[str, Any] = {
        "x": torch.zeros((4, 64), device=device),
        "token_topk_to_pos": torch.zeros((4, 2), dtype=torch.int32, device=device),
        "pos_to_expert": torch.zeros(8, dtype=torch.int32, device=device),
    }
    return kwargs | {name: make(device) for name, make in changes.items()}


def sf_call(device: str, **changes: Any) -> dict[str, Any]:
    kwargs: dict[str, Any] = {
        **plain_call(device),
        "x": (
            torch.zeros((4, 256), device=device).to(torch.float8_e4m3fn),
            torch.ones((4, 2), device=device),
        ),
        "num_per_channels": 128,
    }
    return kwargs | {name: make(device) for name, make in changes.items()}


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Any:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def refusals() -> Iterator[tuple[Refusal, Any]]:
    def plain(label: str, text: str, **changes: Any) -> tuple[Refusal, Any]:
        return Refusal(label, lambda device: plain_call(device, **changes), text), expand_to_fused

    def with_sf(label: str, text: str, **changes: Any) -> tuple[Refusal, Any]:
        return Refusal(f"sf: {label}", lambda device: sf_call(device, **changes), text), expand_to_fused_with_sf

    yield plain("x 1 dimension", "x must have 2 dimensions, got 1.*", x=zeros(4))
    yield plain("x complex128", "x must have .* 1, 2, 4 or 8 bytes.*", x=zeros(4, 64, dtype=torch.complex128))
    yield plain("x None", "x must be a .*tensor, got .*", x=lambda device: None)
    yield plain("x left half", "x must have strides .*", x=lambda device: torch.zeros((4, 64), device=device)[:, :32])
    for make in (zeros(4, 2, dtype=torch.int64), zeros(4, 2, dtype=torch.float32)):
        yield plain(f"map {make('cpu').dtype}", "token_topk_to_pos must be int32, got .*", token_topk_to_pos=make)
    yield plain("map of 3 tokens", "token_topk_to_pos must .*3.*", token_topk_to_pos=zeros(3, 2))
    yield plain("map 1 dimension", "token_topk_to_pos must have 2 dimensions, got 1.*", token_topk_to_pos=zeros(4))
    yield plain("pos 2 dimensions", "pos_to_expert must have 1 dimension.*, got 2.*", pos_to_expert=zeros(4, 2))
    yield plain("pos int64", "pos_to_expert must be int32, got int64", pos_to_expert=zeros(8, dtype=torch.int64))
    yield plain("33 slots", ".*num_topk <= 32.*33.*", token_topk_to_pos=zeros(4, 33))

    def data(device: str) -> torch.Tensor:
        return torch.zeros((4, 256), device=device).to(torch.float8_e4m3fn)

    yield with_sf("no pair", r"x must be a tuple of two tensors \(data, sf\), got a Tensor", x=data)
    yield with_sf("three", "x must be a tuple .*, got 3 of them", x=lambda device: (data(device),) * 3)
    for value in (0, 16, 64, 256, None):
        yield with_sf(
            f"groups of {value}",
            f"num_per_channels must be 32 or 128, got {value}",
            num_per_channels=lambda _, v=value: v,
        )
    yield with_sf(
        "bf16 data", "x must have .* 1 byte.*", x=lambda device: (data(device).bfloat16(), zeros(4, 2)(device).float())
    )
    yield with_sf(
        "bf16 sf", "sf must be .*, got bfloat16", x=lambda device: (data(device), zeros(4, 2)(device).bfloat16())
    )
    yield with_sf(
        "3 columns",
        r"x\[1\] must have 2 columns for 256 channels in groups of 128, got 3",
        x=lambda device: (data(device), zeros(4, 3)(device).float()),
    )
    yield with_sf(
        "packed row major",
        r"use_tma_aligned_col_major_sf must be True for packed \(int32\) scales, got False",
        x=lambda device: (data(device), zeros(4, 1)(device)),
    )
    yield with_sf(
        "column-major sf",
        "sf must have strides .*",
        x=lambda device: (data(device), torch.ones((2, 4), device=device).t()),
    )
    yield with_sf("sf of 3 tokens", "sf must .*3.*", x=lambda device: (data(device), torch.ones((3, 2), device=device)))


REFUSALS = list(refusals())
every_refusal = pytest.mark.parametrize(("refusal", "operator"), REFUSALS, ids=[refusal.id for refusal, _ in REFUSALS])


@pytest.mark.usefixtures("needs_extension")
@every_refusal
def test_refused_on_cpu(refusal: Refusal, operator: Any) -> None:
    refusal.check(f"moe.{operator.__name__}", operator, "cpu")


@pytest.mark.gpu
@every_refusal
def test_refused_on_gpu(refusal: Refusal, operator: Any) -> None:
    refusal.check(f"moe.{operator.__name__}", operator, "cuda")
