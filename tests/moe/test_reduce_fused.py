"""reduce_fused: a chain of fused multiply-adds in slot order, exact to the last bit."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch

from tests.moe.routings import Routing, make_mapping, place_at, random_routings
from tests.refusals import Refusal
from tilekernels.moe import reduce_fused
from tilekernels.moe._fma import fma
from tilekernels.moe.get_fused_mapping import get_fused_mapping_ref
from tilekernels.moe.reduce_fused import reduce_fused_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import (
    _is_full_test,
    generate_hidden_sizes,
    generate_moe_params,
    generate_rand_float,
    generate_topk_idx,
)

NAME = "moe.reduce_fused"


# ---- reference -------------------------------------------------------------------------------------------------------


def fma_in_fractions(x: float, y: float, z: float) -> float:
    """x * y + z rounded once to fp32, to nearest even: the best of the neighbours of a rough answer."""
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    near = torch.tensor([float(exact)]).float()
    infinity = torch.tensor([math.inf])
    candidates = [near, torch.nextafter(near, infinity), torch.nextafter(near, -infinity)]

    def badness(candidate: torch.Tensor) -> tuple[Fraction, int]:
        return abs(Fraction(candidate.item()) - exact), int(candidate.view(torch.int32)) & 1

    return float(min((each for each in candidates if math.isfinite(each.item())), key=badness).item())


def hard_triples(count: int) -> list[tuple[float, float, float]]:
    """Sums next to a tie of fp32, where rounding twice goes wrong; sums of all magnitudes; and subnormal ones."""
    choose = random.Random(5)
    triples = []
    for at in range(count):
        x, y = (1 + choose.getrandbits(23) * 2.0**-23 for _ in range(2))
        if at % 3 == 0:  # z half a unit beside the tie, the product far below it
            sign = choose.choice((1, -1))
            triples.append((sign * x * 2.0**-40, y * 2.0**-20, 1 + choose.getrandbits(23) * 2.0**-23))
            x, y = 1 + 2.0**-12 * choose.randint(1, 4095), 1 + 2.0**-12 * choose.randint(1, 4095)
            triples.append((sign * x * 2.0**-24, 1.0, 1 + 2.0**-23 * choose.getrandbits(23)))
            tie = 2.0**-24 * (1 + 2.0**-23)
            triples.append((sign * tie, 1 - 2.0**-23, 1 + 2.0**-23 * choose.getrandbits(23)))
        elif at % 3 == 1:
            triples.append((x * 2.0 ** choose.randint(-30, 30), -y, y * 2.0 ** choose.randint(-60, 60)))
        else:
            triples.append((x * 2.0**-80, y * 2.0**-60, x * 2.0 ** choose.randint(-149, -126)))
    return triples


def test_fma_equals_fractions() -> None:
    triples = hard_triples(3000)
    columns = torch.tensor(triples, dtype=torch.float64).float()
    expected = torch.tensor([fma_in_fractions(*row) for row in columns.tolist()])
    assert_equal(fma(*columns.unbind(1)), expected)


def test_fma_rounds_once() -> None:
    """The double nearest to 1 + 2^-24 + 2^-90 lies on fp32's tie: rounding it again would lose the 2^-90."""
    x, y, z = (torch.tensor([value]) for value in (2.0**-45, 2.0**-45, 1 + 2.0**-23))
    tie = torch.tensor([2.0**-24], dtype=torch.float64)
    assert (z.double() + tie).float().item() == 1 + 2.0**-22  # a tie goes to even
    assert fma(x + 2.0**-24 * 0, y, z).item() == z.item()
    above = fma(torch.tensor([2.0**-24 * (1 + 2.0**-23)]), torch.tensor([1 - 2.0**-23]), z)
    assert above.item() == z.item()  # just below the tie: 2^-24 * (1 - 2^-46)


def test_fma_of_special_values() -> None:
    inf, nan = math.inf, math.nan
    rows = [(inf, 1, 0, inf), (inf, 0, 1, nan), (3e38, 10, 0, inf), (3e38, 10, -inf, -inf), (nan, 1, 1, nan)]
    rows += [(-0.0, 1, 0.0, 0.0), (-0.0, 1, -0.0, -0.0), (2, 3, -6, 0.0)]
    x, y, z, expected = torch.tensor(rows, dtype=torch.float32).unbind(1)
    assert_equal(fma(x, y, z).nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("with_x_sf", [True, False])
def test_reference_equals_fractions(with_weights: bool, with_x_sf: bool) -> None:
    token_topk_to_pos, pos_to_expert = make_mapping(Routing(9, 5, 6, "masked"), 1, "cpu")
    num_positions = pos_to_expert.shape[0]
    x, x_sf, weights = torch.randn(num_positions, 256), torch.rand(num_positions), torch.rand(9, 5)
    actual = reduce_fused_ref((x, x_sf) if with_x_sf else x, weights if with_weights else None, token_topk_to_pos)
    for token in range(9):
        for column in range(0, 256, 37):
            total = 0.0
            for slot, position in enumerate(token_topk_to_pos[token].tolist()):
                if position >= 0:
                    factor = weights[token, slot] if with_weights else torch.tensor(1.0)
                    factor = factor * x_sf[position] if with_x_sf else factor
                    total = fma_in_fractions(x[position, column].item(), factor.item(), total)
            assert actual[token, column].item() == total


# ---- valid calls -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    routing: Routing
    hidden: int
    dtype: torch.dtype
    fp8_format: str
    with_weights: bool
    with_x_sf: bool
    with_sf: bool
    wide: bool = False  # values of all magnitudes
    offset: int = 0

    @property
    def id(self) -> str:
        flags = "".join(name for name in ("weights", "x_sf", "sf") if getattr(self, f"with_{name}"))
        name = str(self.dtype).removeprefix("torch.")
        wide = "-wide" if self.wide else ""
        return f"{self.routing.id}-h{self.hidden}-{name}-{self.fp8_format}-{flags}{wide}-at{self.offset}"

    def make(self, device: str) -> dict[str, Any]:
        token_topk_to_pos, pos_to_expert = make_mapping(self.routing, 1, device)
        shape = (pos_to_expert.shape[0], self.hidden)
        values = generate_rand_float(shape, device) if self.wide else torch.randn(shape, device=device) * 50
        x = place_at(values.to(self.dtype), self.offset)
        weights = torch.rand((self.routing.num_tokens, self.routing.num_topk), device=device)
        return {
            "x": (x, torch.rand(shape[0], device=device)) if self.with_x_sf else x,
            "topk_weights": weights if self.with_weights else None,
            "token_topk_to_pos": token_topk_to_pos,
            "fp8_format": self.fp8_format,
            "sf": torch.rand(1, device=device) * 4 if self.with_sf else None,
        }


def random_cases(count: int) -> Iterator[Case]:
    choose = random.Random(6)
    for routing in random_routings(count, most_tokens=500, most_experts=72):
        fp8_format = choose.choice(("", "e4m3"))
        yield Case(
            routing,
            hidden=choose.choice((256, 512, 768, 1024, 2048, 2304, 4096, 4352, 7168)),
            dtype=choose.choice((torch.bfloat16, torch.float32)),
            fp8_format=fp8_format,
            with_weights=choose.random() < 0.7,
            with_x_sf=choose.random() < 0.5,
            with_sf=fp8_format == "e4m3" and choose.random() < 0.7,
            wide=choose.random() < 0.3,
            offset=choose.choice((0, 0, 0, 1)),
        )


CASES = list(random_cases(220))
# The exact reference takes its time
CPU_CASES = [case for case in CASES if case.routing.num_tokens * case.routing.num_topk * case.hidden <= 2**19][::2]


def check_case(case: Case, device: str) -> None:
    kwargs = case.make(device)
    expected = reduce_fused_ref(**kwargs)
    assert_equal(reduce_fused(**kwargs), expected)
    out = torch.full_like(expected.float(), 3.0).to(expected.dtype)
    assert reduce_fused(**kwargs, out=out) is out
    assert_equal(out, expected)


@pytest.mark.parametrize("case", CPU_CASES, ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check_case(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check_case(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_topk", range(1, 33))
def test_every_topk(num_topk: int) -> None:
    check_case(Case(Routing(65, num_topk, 40, "distinct"), 768, torch.bfloat16, "", True, True, False), "cuda")


@pytest.mark.gpu
# All four combinations only where time does not matter: the presence of one does not touch the other
@pytest.mark.parametrize(
    ("with_weights", "with_x_sf"),
    list(itertools.product((True, False), repeat=2)) if _is_full_test() else [(True, False), (False, True)],
)
@pytest.mark.parametrize("fp8_format", ["", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", generate_hidden_sizes(256))
@pytest.mark.parametrize("params", list(generate_moe_params()), ids=lambda params: "-".join(map(str, params.values())))
def test_published_sizes(
    params: dict[str, int], hidden: int, dtype: torch.dtype, fp8_format: str, with_weights: bool, with_x_sf: bool
) -> None:
    topk_idx = generate_topk_idx(params, "cuda")
    mapping = get_fused_mapping_ref(topk_idx, params["num_experts"], 0, 1)
    num_positions = mapping[0].shape[0]
    x = torch.randn((num_positions, hidden), device="cuda").to(dtype)
    x_sf = torch.rand(num_positions, device="cuda")
    weights = torch.rand(topk_idx.shape, device="cuda") if with_weights else None
    sf = torch.rand(1, device="cuda") if fp8_format else None
    arguments = ((x, x_sf) if with_x_sf else x, weights, mapping[3], fp8_format, sf)
    assert_equal(reduce_fused(*arguments), reduce_fused_ref(*arguments))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_tokens_without_rows_are_zero(num_tokens: int, device: str) -> None:
    x = torch.empty((0, 512), device=device)
    weights = torch.rand((num_tokens, 3), device=device)
    token_topk_to_pos = torch.full((num_tokens, 3), -1, dtype=torch.int32, device=device)
    assert_equal(reduce_fused(x, weights, token_topk_to_pos), torch.zeros((num_tokens, 512), device=device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_e4m3_saturates(device: str) -> None:
    x = torch.tensor([[-1e4, 1e4, 448.0, 470.0]], device=device).repeat(1, 64)
    position = torch.zeros((1, 1), dtype=torch.int32, device=device)
    out = reduce_fused(x, None, position, "e4m3")
    assert out.float()[0, :4].tolist() == [-448.0, 448.0, 448.0, 448.0]


@pytest.mark.gpu
def test_million_tokens() -> None:
    check_case(Case(Routing(2**20, 2, 256, "masked"), 256, torch.bfloat16, "", True, False, False), "cuda")


@pytest.mark.gpu
def test_same_bytes_every_time() -> None:
    case = Case(Routing(4001, 8, 32, "masked"), 2048, torch.bfloat16, "", True, True, False)
    kwargs = case.make("cuda")
    expected = reduce_fused_ref(**kwargs)
    for _ in range(100):
        assert_equal(reduce_fused(**kwargs), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [100, 2**31 - 1, -2, -(2**31)])
def test_gpu_passes_over_positions_out_of_range(wrong: int) -> None:
    kwargs = Case(Routing(30, 3, 4, "masked"), 512, torch.float32, "", True, True, False).make("cuda")
    expected = reduce_fused_ref(**kwargs)
    kwargs["token_topk_to_pos"][kwargs["token_topk_to_pos"] < 0] = wrong
    assert_equal(reduce_fused(**kwargs), expected)


def test_cpu_refuses_positions_out_of_range() -> None:
    kwargs = Case(Routing(4, 2, 4, "constant"), 256, torch.float32, "", True, False, False).make("cpu")
    kwargs["token_topk_to_pos"][1, 1] = 8
    with pytest.raises(ValueError, match=rf"^{NAME}: token_topk_to_pos must hold values below 8, got 8$"):
        reduce_fused(**kwargs)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals() -> Iterator[Refusal]:
    def call(device: str) -> dict[str, Any]:
        return {
            "x": torch.zeros((8, 256), device=device),
            "topk_weights": torch.zeros((4, 2), device=device),
            "token_topk_to_pos": torch.zeros((4, 2), dtype=torch.int32, device=device),
        }

    def refusal(label: str, text: str, **changes: Any) -> Refusal:
        return Refusal(
            label, lambda device: call(device) | {name: make(device) for name, make in changes.items()}, text
        )

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
        return lambda device: torch.zeros(shape, dtype=dtype, device=device)

    for dtype in (torch.float16, torch.int32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        yield refusal(f"x {name}", f"x must be .*, got {name}", x=zeros(8, 256, dtype=dtype))
    yield refusal("x None", "x must be a .*tensor, got .*", x=lambda device: None)
    yield refusal("x 1 dimension", "x must have 2 dimensions, got 1.*", x=zeros(256))
    for hidden in (1, 128, 255, 576):
        yield refusal(f"hidden {hidden}", f"x must have a multiple of 256 columns, got {hidden}", x=zeros(8, hidden))
    yield refusal(
        "x left half", "x must have strides .*", x=lambda device: torch.zeros((8, 512), device=device)[:, :256]
    )
    yield refusal(
        "x three", "x must be a tensor or a tuple of two .*, got 3 of them", x=lambda device: (zeros(1)(device),) * 3
    )
    yield refusal(
        "x_sf of 7 rows", "x_sf must .*7.*", x=lambda device: (torch.zeros((8, 256), device=device), zeros(7)(device))
    )
    yield refusal(
        "x_sf bf16",
        "x_sf must be float32, got bfloat16",
        x=lambda device: (torch.zeros((8, 256), device=device), zeros(8, dtype=torch.bfloat16)(device)),
    )
    yield refusal("weights bf16", "topk_weights must be float32, .*", topk_weights=zeros(4, 2, dtype=torch.bfloat16))
    yield refusal("weights of 3 slots", "(topk_weights|token_topk_to_pos) must .*", topk_weights=zeros(4, 3))
    yield refusal("map int64", "token_topk_to_pos must be int32, .*", token_topk_to_pos=zeros(4, 2, dtype=torch.int64))
    yield refusal("map None", "token_topk_to_pos must be a .*tensor, got .*", token_topk_to_pos=lambda device: None)
    yield refusal(
        "33 slots",
        ".*num_topk <= 32.*33.*",
        topk_weights=lambda device: None,
        token_topk_to_pos=zeros(4, 33, dtype=torch.int32),
    )
    for value in ("e2m1", "E4M3", None, 3):
        yield refusal(f"format {value}", "fp8_format must be '' or 'e4m3', got .*", fp8_format=lambda _, v=value: v)
    yield refusal("sf without format", "sf must be None unless fp8_format is 'e4m3', got a tensor", sf=zeros(1))
    yield refusal("sf of two", "sf must .*2.*", sf=zeros(2), fp8_format=lambda device: "e4m3")
    yield refusal("out bf16", "out must be float32, got bfloat16", out=zeros(4, 256, dtype=torch.bfloat16))
    yield refusal("out of 5 rows", "out must .*5.*", out=zeros(5, 256))


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, reduce_fused, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, reduce_fused, "cuda")
