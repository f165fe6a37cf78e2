"""topk_gate: the first columns of a stable descending sort, whatever the scores hold."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.refusals import Refusal
from tilekernels.moe import topk_gate
from tilekernels.moe.topk_gate import topk_gate_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_num_tokens

NAME = "moe.topk_gate"
PUBLISHED = [(72, 6), (32, 6), (64, 6), (96, 6), (16, 6), (36, 6), (108, 6), (128, 6), (144, 6), (256, 8)]

KINDS = ("normal", "ties", "constant", "infinite", "nan", "zeros", "tiny", "huge", "bf16")


def make_scores(kind: str, num_tokens: int, num_experts: int, device: str) -> torch.Tensor:
    """Scores of one kind: where ranking is easy, where ties decide, and where numbers end."""
    shape = (num_tokens, num_experts)
    normal = torch.randn(shape, device=device)
    if kind == "ties":
        return torch.randint(-2, 3, shape, device=device).float()
    if kind == "constant":
        return torch.full(shape, -1.5, device=device)
    if kind == "infinite":
        chosen = torch.randint(0, 4, shape, device=device)
        return normal.masked_fill(chosen < 2, -torch.inf).masked_fill(chosen == 2, torch.inf)
    if kind == "nan":
        chosen = torch.randint(0, 4, shape, device=device)
        return normal.masked_fill(chosen < 2, torch.nan).masked_fill(chosen == 2, -torch.inf)
    if kind == "zeros":  # +0 and -0 are equal: the index decides
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "tiny":
        return normal * 2.0**-140
    if kind == "huge":
        return (normal * 2.0**126).clamp(-3.4e38, 3.4e38)
    return normal.bfloat16().float() if kind == "bf16" else normal


# ---- reference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_experts", "num_topk"), [(1, 1), (7, 7), (72, 6), (256, 32)])
def test_reference_equals_sorting_in_python(kind: str, num_experts: int, num_topk: int) -> None:
    scores = make_scores(kind, 20, num_experts, "cpu")

    def rank(row: list[float]) -> list[int]:
        # NaN behind everything; Python's sort is stable.
        return sorted(range(len(row)), key=lambda at: (math.isnan(row[at]), 0.0 if math.isnan(row[at]) else -row[at]))

    expected = torch.tensor([rank(row)[:num_topk] for row in scores.tolist()])
    assert_equal(topk_gate_ref(scores, num_topk), expected)


# ---- valid calls -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_experts: int
    num_topk: int
    kind: str
    offset: int = 0  # elements before the scores in their storage

    @property
    def id(self) -> str:
        return f"{self.num_tokens}x{self.num_experts}-top{self.num_topk}-{self.kind}-at{self.offset}"

    def make(self, device: str) -> torch.Tensor:
        scores = make_scores(self.kind, self.num_tokens, self.num_experts, device)
        storage = torch.zeros(self.offset + scores.numel(), device=device)
        view = storage[self.offset :].view(scores.shape)
        return view.copy_(scores)


def random_cases(count: int) -> Iterator[Case]:
    """Counts around warp and vector sizes, and beyond what fits a warp's registers, with every kind of scores."""
    choose = random.Random(0)
    for at in range(count):
        num_experts = choose.choice((1, 2, 3, 4, 5, 8, 16, 31, 32, 33, 36, 64, 72, 100, 128, 144, 255, 256, 257, 384))
        if at % 10 == 0:
            num_experts = choose.choice((512, 513, 1000, 1023, 1024, 1025, 2500))
        yield Case(
            num_tokens=choose.choice((0, 1, 2, 3, 7, 8, 31, 32, 33, 127, 500, 4001)),
            num_experts=num_experts,
            num_topk=choose.randint(1, min(32, num_experts)),
            kind=KINDS[at % len(KINDS)],
            offset=choose.choice((0, 0, 1, 2, 3)),
        )


def check_case(case: Case, device: str) -> None:
    scores = case.make(device)
    topk_idx = topk_gate(scores, case.num_topk)
    assert_equal(topk_idx, topk_gate_ref(scores, case.num_topk))
    ordered = topk_idx.sort(dim=-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all(), "an expert was chosen twice"


RANDOM_CASES = list(random_cases(240))


@pytest.mark.parametrize("case", RANDOM_CASES[::6], ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check_case(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", RANDOM_CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check_case(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("num_experts", "num_topk"), PUBLISHED)
@pytest.mark.parametrize("num_tokens", generate_num_tokens())
def test_published_sizes(num_tokens: int, num_experts: int, num_topk: int) -> None:
    check_case(Case(num_tokens, num_experts, num_topk, "normal"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_topk", range(1, 33))
def test_every_topk(num_topk: int) -> None:
    check_case(Case(129, 288, num_topk, "ties"), "cuda")


@pytest.mark.gpu
def test_more_than_two_to_the_31_scores() -> None:
    num_experts = 256
    num_tokens = 2**31 // num_experts + 77
    if 16 * num_tokens * num_experts > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    scores = torch.randn((num_tokens, num_experts), device="cuda")
    topk_idx = topk_gate(scores, 8)
    for start in (0, num_tokens // 2, num_tokens - 5000):
        assert_equal(topk_idx[start : start + 5000], topk_gate_ref(scores[start : start + 5000], 8))


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals() -> Iterator[Refusal]:
    def scores_refusal(label: str, make: Any, text: str) -> Refusal:
        return Refusal(label, lambda device: {"scores": make(device), "num_topk": 2}, text)

    wrong_dtypes = (torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
    for dtype in (*wrong_dtypes, torch.float8_e4m3fn, torch.complex64, torch.int8):
        name = str(dtype).removeprefix("torch.")

        def wrong_dtype(device: str, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros((4, 8), device=device).to(dtype)

        yield scores_refusal(f"dtype {name}", wrong_dtype, rf"scores must be float32, got {name}")
    for rank in (0, 1, 3, 4, 5):

        def wrong_rank(device: str, rank: int = rank) -> torch.Tensor:
            return torch.zeros((4,) * rank, device=device)

        yield scores_refusal(f"{rank} dimensions", wrong_rank, rf"scores must have 2 dimensions, got {rank}.*")
    views: dict[str, Any] = {
        "transposed": lambda device: torch.zeros((8, 4), device=device).t(),
        "every second column": lambda device: torch.zeros((4, 16), device=device)[:, ::2],
        "left half": lambda device: torch.zeros((4, 16), device=device)[:, :8],
        "every second row": lambda device: torch.zeros((8, 8), device=device)[::2],
        "one row expanded": lambda device: torch.zeros((1, 8), device=device).expand(4, 8),
        "one column expanded": lambda device: torch.zeros((4, 1), device=device).expand(4, 8),
        "flipped strides": lambda device: torch.zeros(64, device=device).as_strided((4, 8), (1, 4)),
    }
    for label, make in views.items():
        yield scores_refusal(f"strides: {label}", make, r"scores must have strides .*, got .*")
    values: tuple[Any, ...] = (None, [[1.0]], 1, "scores", (1,), {}, 0.5, torch.float32)
    for value in values:
        label = type(value).__name__
        yield scores_refusal(f"scores {label}", lambda device, value=value: value, r"scores must be a .*tensor, got .*")

    def topk_refusal(label: str, num_topk: Any, num_experts: int, text: str) -> Refusal:
        return Refusal(
            label,
            lambda device: {"scores": torch.zeros((3, num_experts), device=device), "num_topk": num_topk},
            text,
        )

    for num_topk in (0, -1, -32, 33, 64, 2**31, 2**40, -(2**40)):
        yield topk_refusal(f"num_topk {num_topk}", num_topk, 64, rf"num_topk must be between 1 and 32, got {num_topk}")
    for num_topk, num_experts in ((2, 1), (9, 8), (32, 31), (17, 16), (5, 3), (32, 1), (6, 5)):
        text = rf"num_topk must be at most the number of experts {num_experts}, got {num_topk}"
        yield topk_refusal(f"top {num_topk} of {num_experts}", num_topk, num_experts, text)
    for value in (2.0, "2", None, [2], (2,), torch.float32, 1j):
        label = type(value).__name__
        yield topk_refusal(f"num_topk {label}", value, 8, rf"num_topk must be an int, got {label}")


REFUSALS = list(refusals())


def test_enough_invalid_calls_are_tried() -> None:
    assert len(REFUSALS) >= 50


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, topk_gate, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, topk_gate, "cuda")
