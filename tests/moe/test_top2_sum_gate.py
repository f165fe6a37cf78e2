"""top2_sum_gate: scores, groups, choice, weights, and the way from logical to local experts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.moe.gates import FINITE_KINDS, KINDS, assert_repeats, make_logits, rank, tensor_refusals
from tests.refusals import Refusal
from tilekernels.errors import ArgumentError
from tilekernels.moe import ScoringFunc, top2_sum_gate
from tilekernels.moe.top2_sum_gate import top2_sum_gate_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_num_tokens

NAME = "moe.top2_sum_gate"
SCORINGS = ("sigmoid", "sqrtsoftplus", "softmax")
# num_groups, num_topk_groups, num_experts, num_shared, num_topk of the published test
PUBLISHED = [
    (0, 0, 72, 1, 6),
    *((0, 0, num_experts, 2, 6) for num_experts in (32, 64, 96, 16, 36, 108, 128, 144)),
    (8, 8, 256, 2, 8),
    (8, 4, 256, 2, 8),
]
# The reference of the CPU tests computes in float64
WEIGHT_TOLERANCE = {"rtol": 1e-5, "atol": 1e-8}


@dataclass(frozen=True)
class Case:
    """One call; make() draws its tensors."""

    num_tokens: int
    num_experts: int
    num_topk: int
    scoring_func: str = "sigmoid"
    kind: str = "normal"
    num_groups: int = 0
    num_topk_groups: int = 0
    num_shared: int = 0
    num_extra: int = -1  # columns of the map beyond the first; -1: no map
    tp_rank: int = 0
    masked: bool = False
    fixed: bool = False
    unmapped: bool = False

    @property
    def id(self) -> str:
        groups = f"{self.num_topk_groups}of{self.num_groups}groups"
        sizes = (
            f"{self.num_tokens}x{self.num_experts}-top{self.num_topk}+{self.num_shared}-{groups}-map{self.num_extra}"
        )
        flags = f"{'m' * self.masked}{'f' * self.fixed}{'u' * self.unmapped}"
        return f"{self.scoring_func}-{sizes}-tp{self.tp_rank}-{self.kind}-{flags}"

    def make(self, device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "logits": make_logits(self.kind, (self.num_tokens, self.num_experts), device),
            "bias": make_logits("normal", (self.num_experts,), device) / 8 * (self.kind in ("normal", "infinite")),
            "num_topk": self.num_topk,
            "num_topk_groups": self.num_topk_groups,
            "num_groups": self.num_groups,
            "use_shared_as_routed": self.num_shared > 0,
            "num_shared_experts": self.num_shared,
            "routed_scaling_factor": 1.5,
            "ep_rank": 3,
            "num_ep_ranks": 4,
            "tp_rank": self.tp_rank,
            "num_tp_ranks": 2,
            "scoring_func": self.scoring_func,
        }
        if self.masked:
            kwargs["mask"] = torch.rand(self.num_tokens, device=device) < 0.7
        if self.unmapped or self.fixed:
            rows = torch.rand((self.num_tokens, self.num_experts), device=device).argsort(dim=1)
            wide = torch.full((self.num_tokens, self.num_topk + 3), 77, device=device)
            kwargs["unmapped_topk_idx"] = wide[:, 1 : self.num_topk + 1].copy_(rows[:, : self.num_topk])
        if self.fixed:
            kwargs["fix_routing_mask"] = torch.rand(self.num_tokens, device=device) < 0.5
        if self.num_extra >= 0:
            shape = (self.num_experts + self.num_shared, self.num_extra + 1)
            kwargs["to_physical_map"] = torch.randint(
                0, self.num_experts + self.num_extra, shape, dtype=torch.int32, device=device
            )
            kwargs["logical_count"] = torch.randint(1, shape[1] + 1, shape[:1], dtype=torch.int32, device=device)
        return kwargs


def random_cases(count: int) -> Iterator[Case]:
    choose = random.Random(5)
    for at in range(count):
        num_experts = choose.choice((4, 8, 16, 32, 36, 64, 72, 96, 108, 128, 144, 252, 256))
        if at % 8 == 0:
            num_experts = choose.choice((260, 288, 384, 512, 1000, 1024))
        groupings = [each for each in range(1, 33) if num_experts % each == 0 and 2 <= num_experts // each <= 32]
        num_groups = choose.choice([0, *groupings])
        num_shared = choose.choice((0, 0, 1, 2))
        num_topk = choose.randint(1, min(30, num_experts))
        if num_shared:
            fitting = [each for each in range(num_shared, 31, num_shared) if num_experts % (each // num_shared) == 0]
            num_topk = choose.choice([each for each in fitting if each <= num_experts])
        yield Case(
            num_tokens=choose.choice((0, 1, 2, 5, 33, 300)),
            num_experts=num_experts,
            num_topk=num_topk,
            scoring_func=SCORINGS[at % 3],
            kind=choose.choice(FINITE_KINDS),
            num_groups=num_groups,
            num_topk_groups=choose.randint(1, num_groups) if num_groups else 0,
            num_shared=num_shared,
            num_extra=choose.choice((num_shared, num_shared + 3)) if num_shared else choose.choice((-1, -1, 0, 2)),
            tp_rank=choose.choice((0, 1)),
            masked=choose.random() < 0.4,
            fixed=choose.random() < 0.3,
            unmapped=choose.random() < 0.5,
        )


CASES = list(random_cases(240))


def check(case: Case, device: str) -> None:
    """All results of the call, and what it writes in place, against the reference."""
    kwargs = case.make(device)
    unmapped = kwargs.get("unmapped_topk_idx")
    before = None if unmapped is None else unmapped.clone()
    expected = top2_sum_gate_ref(**kwargs)
    if unmapped is not None and before is not None:
        written = unmapped.clone()
        unmapped.copy_(before)
    results = top2_sum_gate(**kwargs)
    for result, other in zip(results, expected, strict=True):
        assert_equal(result, other)
    if unmapped is not None:
        assert_equal(unmapped, written, check_stride=False)
        assert (unmapped._base[:, [0, -1]] == 77).all(), "columns beside the view were written"


# ---- reference -------------------------------------------------------------------------------------------------------


def score(scoring_func: str, row: list[float]) -> list[float]:
    if scoring_func == "sigmoid":
        return [1 / (1 + math.exp(-x)) for x in row]
    if scoring_func == "sqrtsoftplus":
        return [math.sqrt(x if x > 20 else math.log1p(math.exp(x))) for x in row]
    parts = [math.exp(x - max(row)) for x in row]
    return [part / sum(parts) for part in parts]


def route_in_python(case: Case, kwargs: dict[str, Any], token: int) -> tuple[list[int], list[float], list[int]]:
    """One token by the definition, in float64: experts, weights, logical experts."""
    mask, fix = kwargs.get("mask"), kwargs.get("fix_routing_mask")
    num_slots = case.num_topk + case.num_shared
    if mask is not None and not mask[token]:
        return [-1] * num_slots, [0.0] * num_slots, [-1] * case.num_topk
    row = kwargs["logits"][token].tolist()
    scores = score(case.scoring_func, row)
    ranks = [
        (x if case.scoring_func == "softmax" else s) + b
        for x, s, b in zip(row, scores, kwargs["bias"].tolist(), strict=True)
    ]
    if case.num_groups != case.num_topk_groups:
        size = case.num_experts // case.num_groups
        sums = [sum(sorted(ranks[start : start + size])[-2:]) for start in range(0, case.num_experts, size)]
        kept = rank(sums, case.num_topk_groups)
        ranks = [each if at // size in kept else -math.inf for at, each in enumerate(ranks)]
    chosen = rank(ranks, case.num_topk)
    if fix is not None and fix[token]:
        chosen = kwargs["unmapped_topk_idx"][token].tolist()
    total = 1e-20 + sum(scores[expert] for expert in chosen)
    weights = [scores[expert] / total * 1.5 for expert in chosen] + [1.0] * case.num_shared
    experts = chosen + [case.num_experts + j for j in range(case.num_shared)]
    if "to_physical_map" in kwargs:
        counts = kwargs["logical_count"].tolist()
        experts = [int(kwargs["to_physical_map"][e, (3 + token * 23333) % counts[e]]) for e in experts]
    per_rank = (case.num_experts + max(case.num_extra, 0)) // 4
    local = []
    for expert in experts:
        rank_of, within = divmod(expert, per_rank)
        is_here = rank_of % 2 == case.tp_rank
        local.append(rank_of // 2 * per_rank + within if is_here else -1)
    return local, weights, chosen


def separated(case: Case) -> bool:
    """Kinds whose ranks in float64 are those in fp32."""
    return case.kind == "normal" or (case.kind == "constant" and case.scoring_func != "softmax")


@pytest.mark.parametrize(
    "case", [each for each in CASES if separated(each) and each.num_tokens <= 33], ids=lambda case: case.id
)
def test_reference_equals_the_definition(case: Case) -> None:
    kwargs = case.make("cpu")
    routed = [route_in_python(case, kwargs, token) for token in range(case.num_tokens)]
    topk_idx, topk_weights = top2_sum_gate_ref(**kwargs)
    shape = (case.num_tokens, case.num_topk + case.num_shared)
    assert_equal(topk_idx, torch.tensor([each[0] for each in routed], dtype=torch.int64).view(shape))
    expected = torch.tensor([each[1] for each in routed], dtype=torch.float64).view(shape)
    torch.testing.assert_close(topk_weights.double(), expected, **WEIGHT_TOLERANCE)
    if "unmapped_topk_idx" in kwargs:
        logical = torch.tensor([each[2] for each in routed], dtype=torch.int64).view(case.num_tokens, case.num_topk)
        assert_equal(kwargs["unmapped_topk_idx"], logical, check_stride=False)


def test_scoring_names() -> None:
    assert [str(each) for each in ScoringFunc] == ["sigmoid", "sqrtsoftplus", "softmax", "identity"]
    assert [int(each) for each in ScoringFunc] == [0, 1, 2, 3]
    assert ScoringFunc.from_str("SoftMax") is ScoringFunc.SOFTMAX
    with pytest.raises(ValueError, match="label must be one of sigmoid, sqrtsoftplus, softmax, identity, got 'relu'"):
        ScoringFunc.from_str("relu")


# ---- valid calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("scoring_func", SCORINGS)
@pytest.mark.parametrize("setting", PUBLISHED, ids=str)
@pytest.mark.parametrize("num_tokens", generate_num_tokens())
def test_published_sizes(num_tokens: int, setting: tuple[int, ...], scoring_func: str) -> None:
    num_groups, num_topk_groups, num_experts, num_shared, num_topk = setting
    plain = Case(
        num_tokens,
        num_experts,
        num_topk,
        scoring_func,
        num_groups=num_groups,
        num_topk_groups=num_topk_groups,
        unmapped=True,
    )
    for tp_rank in (0, 1):
        check(replace(plain, tp_rank=tp_rank), "cuda")
        check(replace(plain, tp_rank=tp_rank, masked=True, fixed=True), "cuda")
        if num_topk % num_shared == 0 and num_experts % (num_topk // num_shared) == 0:
            check(replace(plain, tp_rank=tp_rank, num_shared=num_shared, num_extra=32, fixed=True), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_topk", range(1, 33))
def test_every_topk(num_topk: int) -> None:
    check(Case(129, 288, num_topk, kind="ties", num_groups=32, num_topk_groups=5), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("scoring_func", SCORINGS)
def test_many_tokens(scoring_func: str) -> None:
    check(Case(2**20, 64, 6, scoring_func, num_groups=8, num_topk_groups=4, num_extra=2, masked=True), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ties", "normal"])
@pytest.mark.parametrize("scoring_func", SCORINGS)
def test_same_bytes_every_time(scoring_func: str, kind: str) -> None:
    kwargs = Case(3000, 256, 8, scoring_func, kind, num_groups=8, num_topk_groups=4, unmapped=True).make("cuda")
    assert_repeats(lambda: top2_sum_gate(**kwargs))


def check_order(kind: str, scoring_func: str, device: str) -> None:
    """Infinite and missing logits: the choice is the reference's, whatever became of the weights."""
    kwargs = Case(200, 72, 9, scoring_func, kind, num_groups=8, num_topk_groups=3, unmapped=True).make(device)
    expected = top2_sum_gate_ref(**kwargs)
    logical = kwargs["unmapped_topk_idx"].clone()
    topk_idx, topk_weights = top2_sum_gate(**kwargs)
    assert_equal(topk_idx, expected[0])
    assert_equal(kwargs["unmapped_topk_idx"].contiguous(), logical)
    torch.testing.assert_close(topk_weights, expected[1], equal_nan=True, **WEIGHT_TOLERANCE)
    ordered = logical.sort(dim=-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all(), "an expert was chosen twice"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [each for each in KINDS if each not in FINITE_KINDS])
@pytest.mark.parametrize("scoring_func", SCORINGS)
def test_logits_that_are_no_finite_numbers(scoring_func: str, kind: str) -> None:
    check_order(kind, scoring_func, "cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_experts", [16, 72, 256])
def test_equal_scores_choose_the_first_experts(num_experts: int, device: str) -> None:
    kwargs = Case(5, num_experts, 6, "sigmoid", unmapped=True).make(device)
    kwargs["logits"].zero_()
    kwargs["bias"].zero_()
    top2_sum_gate(**kwargs)
    assert_equal(kwargs["unmapped_topk_idx"].contiguous(), torch.arange(6, device=device).expand(5, 6).contiguous())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_equal_counts_of_groups_are_no_groups(device: str) -> None:
    kwargs = Case(50, 256, 8).make(device)
    expected = top2_sum_gate(**kwargs)
    for result, other in zip(top2_sum_gate(**kwargs | {"num_groups": 8, "num_topk_groups": 8}), expected, strict=True):
        assert_equal(result, other)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mask_of_any_shape(device: str) -> None:
    kwargs = Case(12, 64, 4, masked=True).make(device)
    expected = top2_sum_gate(**kwargs)
    for result, other in zip(top2_sum_gate(**kwargs | {"mask": kwargs["mask"].view(3, 4)}), expected, strict=True):
        assert_equal(result, other)


@pytest.mark.gpu
def test_given_experts_that_do_not_exist_are_skipped_on_a_gpu() -> None:
    kwargs = Case(40, 64, 4, fixed=True, num_extra=1).make("cuda")
    kwargs["fix_routing_mask"][:] = True
    kwargs["unmapped_topk_idx"][::2, 1] = -1
    kwargs["unmapped_topk_idx"][::3, 2] = 64
    kwargs["unmapped_topk_idx"][0] = 2**40
    given = kwargs["unmapped_topk_idx"].clone()
    expected = top2_sum_gate_ref(**kwargs)
    for result, other in zip(top2_sum_gate(**kwargs), expected, strict=True):
        assert_equal(result, other)
    assert_equal(kwargs["unmapped_topk_idx"].contiguous(), given)
    assert (expected[0][0] == -1).all()
    assert (expected[1][0] == 0).all()


@pytest.mark.gpu
def test_counts_of_replicas_that_do_not_fit_are_skipped_on_a_gpu() -> None:
    kwargs = Case(40, 64, 4, num_extra=2).make("cuda")
    kwargs["logical_count"][::3] = 0
    kwargs["logical_count"][1::3] = 1000
    for result, other in zip(top2_sum_gate(**kwargs), top2_sum_gate_ref(**kwargs), strict=True):
        assert_equal(result, other)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def test_given_experts_that_do_not_exist_are_refused_on_a_cpu() -> None:
    kwargs = Case(4, 64, 4, fixed=True).make("cpu")
    kwargs["fix_routing_mask"][:] = torch.tensor([True, True, False, True])
    kwargs["unmapped_topk_idx"][2, 0] = 99  # a row that is not fixed
    top2_sum_gate(**kwargs)
    kwargs["unmapped_topk_idx"][1, 0] = 64
    text = "moe.top2_sum_gate: unmapped_topk_idx must hold experts from 0 to 63 in rows of fixed routing, got 64"
    with pytest.raises(ArgumentError, match=text):
        top2_sum_gate(**kwargs)


def test_counts_of_replicas_that_do_not_fit_are_refused_on_a_cpu() -> None:
    kwargs = Case(4, 64, 4, num_extra=2).make("cpu")
    kwargs["logical_count"][5] = 4
    with pytest.raises(ArgumentError, match=r"logical_count must hold numbers from 1 to 3, .*, got 4"):
        top2_sum_gate(**kwargs)


def make_call(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return Case(4, 64, 4, num_groups=8, num_topk_groups=4, num_extra=2, masked=True, fixed=True).make(device)


def value_refusals() -> Iterator[Refusal]:
    def refusal(label: str, changes: dict[str, Any], text: str) -> Refusal:
        return Refusal(label, lambda device: make_call(device) | changes, text)

    for value in (0, 33, -1):
        yield refusal(f"top {value}", {"num_topk": value}, rf"num_topk must be between 1 and 32, got {value}")
    for argument in ("num_topk", "num_groups", "num_topk_groups", "num_ep_ranks"):
        yield refusal(f"{argument} no int", {argument: "4"}, rf"{argument} must be an int, got str")
    for groups in ((8, 0), (0, 3), (4, 8), (8, 9)):
        counts = {"num_groups": groups[0], "num_topk_groups": groups[1]}
        yield refusal(
            f"{groups[1]} of {groups[0]} groups", counts, r"num_topk_groups must be between .* and .*, got .*"
        )
    yield refusal("7 groups", {"num_groups": 7}, r"num_groups must divide the number of experts 64, got 7")
    yield refusal("65 groups", {"num_groups": 65}, r"num_groups must divide the number of experts 64, got 65")
    yield refusal("groups of one", {"num_groups": 64}, r"num_groups must .*, got 64.*")
    yield refusal("one group", {"num_groups": 1, "num_topk_groups": 0}, r"num_topk_groups must be between 1 .*, got 0")
    for name in ("identity", "relu", ""):
        text = rf"scoring_func must be one of sigmoid, sqrtsoftplus, softmax, got {name}"
        yield refusal(f"scoring {name!r}", {"scoring_func": name}, text)
    yield refusal("scoring 1", {"scoring_func": 1}, r"scoring_func must be a str, got int")
    shared = {"use_shared_as_routed": True}
    for value in (0, 3):
        text = rf"num_shared_experts must be 1 or 2, got {value}"
        yield refusal(f"{value} shared", shared | {"num_shared_experts": value}, text)
    for argument, value in (("ep_rank", -1), ("tp_rank", -1)):
        yield refusal(f"{argument} {value}", {argument: value}, rf"{argument} must be at least 0, got {value}")
    yield refusal("no expert ranks", {"num_ep_ranks": 0}, r"num_ep_ranks must be between 1 and .*, got 0")
    yield refusal("no tensor ranks", {"num_tp_ranks": 0}, r"num_tp_ranks must be at least 1, got 0")
    for argument, other in (("to_physical_map", "logical_count"), ("logical_count", "to_physical_map")):
        yield refusal(f"{other} alone", {argument: None}, rf"{argument} must be given together with {other}, got None")
    yield refusal("fixed from nowhere", {"unmapped_topk_idx": None}, r"unmapped_topk_idx must be given .*, got None")
    yield refusal(
        "top 3 into 4 columns",
        {"num_topk": 3},
        r"num_unmapped == num_topk is required, got num_unmapped = 4, num_topk = 3",
    )
    yield Refusal(
        "shared experts without a map",
        lambda device: (
            make_call(device) | shared | {"num_shared_experts": 1, "to_physical_map": None, "logical_count": None}
        ),
        r"to_physical_map must have more than 1 columns.*, got None",
    )
    for num_experts in (66, 1028):
        yield Refusal(
            f"{num_experts} experts",
            lambda device, num_experts=num_experts: Case(4, num_experts, 4).make(device),
            r"logits must have (a multiple of 4|at most 1024) experts, got .*",
        )
    yield Refusal(
        "bias of another length",
        lambda device: make_call(device) | {"bias": torch.zeros(60, device=device)},
        r"bias must have shape .*, got .*",
    )
    yield Refusal(
        "mask of another length",
        lambda device: make_call(device) | {"mask": torch.ones(5, dtype=torch.bool, device=device)},
        r"mask must have shape .*, got .*",
    )


REFUSALS = [
    *tensor_refusals("logits", torch.float32, (4, 64), make_call),
    *tensor_refusals("bias", torch.float32, (64,), make_call),
    *tensor_refusals("fix_routing_mask", torch.bool, (4,), make_call),
    *tensor_refusals("to_physical_map", torch.int32, (64, 3), make_call),
    *tensor_refusals("logical_count", torch.int32, (64,), make_call),
    *tensor_refusals("unmapped_topk_idx", torch.int64, (4, 4), make_call),
    *value_refusals(),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, top2_sum_gate, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, top2_sum_gate, "cuda")
