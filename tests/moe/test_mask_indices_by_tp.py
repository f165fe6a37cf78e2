"""mask_indices_by_tp: indices on one tensor-parallel rank, counted from its first expert."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from tests.moe.index_refusals import index_refusals, int_refusals
from tests.refusals import Refusal
from tilekernels.moe import mask_indices_by_tp
from tilekernels.moe.mask_indices_by_tp import mask_indices_by_tp_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_moe_params, generate_topk_idx

NAME = "moe.mask_indices_by_tp"
DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_topk: int
    num_ep_ranks: int
    num_tp_ranks: int
    per_gpu: int
    dtype: torch.dtype

    @property
    def id(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.num_tokens}x{self.num_topk}-{self.per_gpu}x{self.num_ep_ranks}-tp{self.num_tp_ranks}-{name}"

    def make(self, device: str) -> torch.Tensor:
        largest = min(self.per_gpu * self.num_ep_ranks, torch.iinfo(self.dtype).max)
        shape = (self.num_tokens, self.num_topk)
        indices = torch.randint(-1, largest, shape, device=device)
        return torch.where(torch.rand(shape, device=device) < 0.05, -7, indices).to(self.dtype)


def random_cases(count: int) -> Iterator[Case]:
    choose = random.Random(2)
    for at in range(count):
        yield Case(
            num_tokens=choose.choice((0, 1, 2, 7, 31, 127, 128, 500, 4001)),
            num_topk=choose.randint(1, 32),
            num_ep_ranks=choose.choice((1, 2, 4, 8, 64, 72)),
            num_tp_ranks=choose.choice((1, 2, 3, 4, 8, 16)),
            per_gpu=choose.choice((1, 4, 9, 32, 36, 256)),
            dtype=DTYPES[at % len(DTYPES)],
        )


CASES = list(random_cases(200))


@pytest.mark.parametrize("case", CASES[::8], ids=lambda case: case.id)
def test_reference_equals_counting_in_python(case: Case) -> None:
    """Each group of ranks lists the experts of its GPUs; what the rank holds of them are its own, in order."""
    num_experts = case.per_gpu * case.num_ep_ranks
    indices = case.make("cpu")
    for tp_rank in range(case.num_tp_ranks):
        mine = [e for e in range(num_experts) if e // case.per_gpu % case.num_tp_ranks == tp_rank]
        local = {expert: at for at, expert in enumerate(mine)}
        expected = [[local.get(value, -1) for value in row] for row in indices.tolist()]
        actual = mask_indices_by_tp_ref(indices, num_experts, case.num_ep_ranks, tp_rank, case.num_tp_ranks)
        assert_equal(actual, torch.tensor(expected, dtype=case.dtype).reshape(indices.shape))


def check_case(case: Case, device: str) -> None:
    indices = case.make(device)
    # Experts that do not divide among the ranks are left out of the last one's
    n = case.per_gpu * case.num_ep_ranks + case.num_ep_ranks - 1
    for tp_rank in {0, case.num_tp_ranks - 1}:
        arguments = (indices, n, case.num_ep_ranks, tp_rank, case.num_tp_ranks)
        assert_equal(mask_indices_by_tp(*arguments), mask_indices_by_tp_ref(*arguments))


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check_case(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check_case(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tp_ranks", [2, 4, 8])
@pytest.mark.parametrize("params", list(generate_moe_params()), ids=lambda params: "-".join(map(str, params.values())))
def test_published_sizes(params: dict[str, int], num_tp_ranks: int) -> None:
    indices = generate_topk_idx(params, "cuda")
    n = params["num_experts"] * params["num_ep_ranks"]
    arguments = (indices, n, params["num_ep_ranks"], num_tp_ranks // 2, num_tp_ranks)
    assert_equal(mask_indices_by_tp(*arguments), mask_indices_by_tp_ref(*arguments))


@pytest.mark.gpu
def test_large_values_and_many_tokens() -> None:
    """Values beyond 32 bits follow the same rule."""
    indices = torch.randint(-(2**62), 2**62, (2**20, 8), device="cuda")
    indices[::2] %= 256
    arguments = (indices, 256, 8, 1, 4)
    assert_equal(mask_indices_by_tp(*arguments), mask_indices_by_tp_ref(*arguments))


def refusals() -> Iterator[Refusal]:
    numbers = {"n": 64, "num_ep_ranks": 8, "tp_rank": 1, "num_tp_ranks": 2}
    yield from index_refusals("indices", numbers, DTYPES)

    def others(device: str) -> dict[str, object]:
        return {"indices": torch.zeros((4, 2), dtype=torch.int64, device=device), **numbers}

    most = 2**31 - 1
    yield from int_refusals("n", (0, -1, 2**31), f"be between 1 and {most}", others)
    yield from int_refusals("num_ep_ranks", (0, -1), f"be between 1 and {most}", others)
    yield from int_refusals("num_tp_ranks", (0, -1), f"be between 1 and {most}", others)
    yield from int_refusals("tp_rank", (-1, 2, 3), "be between 0 and 1", others)
    yield Refusal(
        "fewer experts than ranks", lambda device: {**others(device), "n": 7}, "n must be at least .* 8, got 7"
    )


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, mask_indices_by_tp, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, mask_indices_by_tp, "cuda")
