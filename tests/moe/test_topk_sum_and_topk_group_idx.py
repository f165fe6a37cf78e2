"""topk_sum_and_topk_group_idx: groups by the sum of their one or two best scores."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from tests.moe.gates import KINDS, assert_repeats, make_logits, rank, tensor_refusals
from tests.refusals import Refusal
from tilekernels.moe import topk_sum_and_topk_group_idx
from tilekernels.moe.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_num_tokens

NAME = "moe.topk_sum_and_topk_group_idx"
# (experts, groups) of the published test
PUBLISHED = [(72, 4), (72, 8), (72, 12), (256, 4), (256, 8), (256, 16)]


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_groups: int
    group_size: int
    num_topk_sum: int
    num_topk_groups: int
    kind: str
    offset: int = 0  # elements before the scores in their storage

    @property
    def id(self) -> str:
        sizes = f"{self.num_tokens}x{self.num_groups}x{self.group_size}"
        return f"{sizes}-sum{self.num_topk_sum}-top{self.num_topk_groups}-{self.kind}-at{self.offset}"

    def make(self, device: str) -> torch.Tensor:
        scores = make_logits(self.kind, (self.num_tokens, self.num_groups, self.group_size), device)
        storage = torch.zeros(self.offset + scores.numel(), device=device)
        return storage[self.offset :].view(scores.shape).copy_(scores)


def random_cases(count: int) -> Iterator[Case]:
    """Groups around the sizes of vectors, lanes and warps, with every kind of scores."""
    choose = random.Random(3)
    for at in range(count):
        num_groups = choose.choice((1, 2, 3, 4, 7, 8, 12, 16, 31, 32))
        group_size = choose.choice((1, 2, 3, 4, 6, 8, 9, 16, 18, 31, 32, 33, 64, 127, 128, 132, 300))
        yield Case(
            num_tokens=choose.choice((0, 1, 2, 3, 5, 33, 500)),
            num_groups=num_groups,
            group_size=group_size,
            num_topk_sum=choose.randint(1, min(2, group_size)),
            num_topk_groups=choose.randint(1, num_groups),
            kind=KINDS[at % len(KINDS)],
            offset=choose.choice((0, 0, 1, 2)),
        )


CASES = list(random_cases(200))


def check(case: Case, device: str) -> None:
    scores = case.make(device)
    counts = (case.num_topk_sum, case.num_topk_groups)
    result = topk_sum_and_topk_group_idx(scores, *counts)
    assert_equal(result, topk_sum_and_topk_group_idx_ref(scores, *counts))
    ordered = result.sort(dim=-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all(), "a group was chosen twice"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_topk_sum", [1, 2])
@pytest.mark.parametrize(("num_groups", "group_size"), [(1, 2), (4, 18), (8, 9), (16, 16), (32, 2)])
def test_reference_equals_sorting_in_python(kind: str, num_topk_sum: int, num_groups: int, group_size: int) -> None:
    scores = make_logits(kind, (10, num_groups, group_size), "cpu")

    def best_groups(token: np.ndarray) -> list[int]:
        sums = []
        for group in token:
            best = [group[at] for at in rank(group.tolist(), num_topk_sum)]
            sums.append(float(np.sum(np.array(best, dtype=np.float32))))
        return rank(sums, num_groups)

    with np.errstate(invalid="ignore"):
        expected = torch.tensor([best_groups(token) for token in scores.numpy()])
    assert_equal(topk_sum_and_topk_group_idx_ref(scores, num_topk_sum, num_groups), expected)


@pytest.mark.parametrize("case", CASES[::8], ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_topk_groups", [2, 4])
@pytest.mark.parametrize("num_topk_sum", [1, 2])
@pytest.mark.parametrize(("num_experts", "num_groups"), PUBLISHED)
@pytest.mark.parametrize("num_tokens", generate_num_tokens())
def test_published_sizes(
    num_tokens: int, num_experts: int, num_groups: int, num_topk_sum: int, num_topk_groups: int
) -> None:
    sizes = (num_tokens, num_groups, num_experts // num_groups)
    check(Case(*sizes, num_topk_sum, num_topk_groups, "normal"), "cuda")


@pytest.mark.gpu
def test_many_tokens() -> None:
    check(Case(2**20, 8, 8, 2, 4, "ties"), "cuda")


@pytest.mark.gpu
def test_same_bytes_every_time() -> None:
    scores = make_logits("ties", (4000, 8, 32), "cuda")
    assert_repeats(lambda: topk_sum_and_topk_group_idx(scores, 2, 4))


def make_call(device: str) -> dict[str, Any]:
    return {"scores": torch.zeros((3, 8, 4), device=device), "num_topk_sum": 2, "num_topk_groups": 4}


def value_refusals() -> Iterator[Refusal]:
    def refusal(label: str, changes: dict[str, Any], text: str) -> Refusal:
        return Refusal(label, lambda device: make_call(device) | changes, text)

    for value in (0, 3, -1, 2**31):
        yield refusal(f"sum of {value}", {"num_topk_sum": value}, rf"num_topk_sum must be between 1 and 2, got {value}")
    for value in (0, 9, -4, 33):
        text = rf"num_topk_groups must be between 1 and 8, got {value}"
        yield refusal(f"top {value}", {"num_topk_groups": value}, text)
    for argument in ("num_topk_sum", "num_topk_groups"):
        for value in (1.0, "1", None):
            text = rf"{argument} must be an int, got {type(value).__name__}"
            yield refusal(f"{argument} {value!r}", {argument: value}, text)
    yield Refusal(
        "sum of two from groups of one",
        lambda device: make_call(device) | {"scores": torch.zeros((3, 8, 1), device=device)},
        r"num_topk_sum must be at most the size of a group 1, got 2",
    )
    yield Refusal(
        "33 groups",
        lambda device: make_call(device) | {"scores": torch.zeros((3, 33, 2), device=device)},
        r"(.*num_groups <= 32 .*|scores must have at most 32 groups, got 33)",
    )


REFUSALS = [*tensor_refusals("scores", torch.float32, (3, 8, 4), make_call), *value_refusals()]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, topk_sum_and_topk_group_idx, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, topk_sum_and_topk_group_idx, "cuda")
