"""inplace_unique_group_indices: every repeated entry of a row becomes -1, the first one stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.moe.index_refusals import index_refusals, int_refusals
from tests.moe.routings import Routing, random_routings
from tests.refusals import Refusal
from tilekernels.moe import inplace_unique_group_indices
from tilekernels.moe.inplace_unique_group_indices import inplace_unique_group_indices_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_moe_params, generate_topk_idx

NAME = "moe.inplace_unique_group_indices"

CASES = list(random_routings(200, most_experts=128))


@pytest.mark.parametrize("routing", list(random_routings(24, 128, 16)), ids=lambda routing: routing.id)
def test_reference_equals_python(routing: Routing) -> None:
    indices = routing.make("cpu")
    indices[::3] = torch.where(indices[::3] < 0, -5, indices[::3])  # other negative values stay

    def unique(row: list[int]) -> list[int]:
        return [-1 if value >= 0 and value in row[:at] else value for at, value in enumerate(row)]

    expected = torch.tensor([unique(row) for row in indices.tolist()], dtype=torch.int64).reshape(indices.shape)
    inplace_unique_group_indices_ref(indices, routing.num_experts)
    assert_equal(indices, expected)


def check_routing(indices: torch.Tensor, num_groups: int) -> None:
    expected = indices.clone()
    inplace_unique_group_indices_ref(expected, num_groups)
    assert inplace_unique_group_indices(indices, num_groups) is None
    assert_equal(indices, expected)
    inplace_unique_group_indices(indices, num_groups)
    assert_equal(indices, expected)  # nothing is left to do


@pytest.mark.parametrize("routing", CASES[::4], ids=lambda routing: routing.id)
def test_cpu(routing: Routing) -> None:
    check_routing(routing.make("cpu"), routing.num_experts)


@pytest.mark.gpu
@pytest.mark.parametrize("routing", CASES, ids=lambda routing: routing.id)
def test_gpu(routing: Routing) -> None:
    check_routing(routing.make("cuda"), routing.num_experts)


@pytest.mark.gpu
@pytest.mark.parametrize("num_groups", [8, 16, 72])
@pytest.mark.parametrize("params", list(generate_moe_params()), ids=lambda params: "-".join(map(str, params.values())))
def test_published_sizes(params: dict[str, int], num_groups: int) -> None:
    topk_idx = generate_topk_idx(params, "cuda")
    check_routing(torch.where(topk_idx < 0, -1, topk_idx % num_groups), num_groups)


@pytest.mark.gpu
@pytest.mark.parametrize("num_topk", [33, 100, 255, 256])
def test_long_rows(num_topk: int) -> None:
    check_routing(torch.randint(-1, 128, (1000, num_topk), device="cuda"), 128)


@pytest.mark.gpu
def test_million_tokens_same_bytes_every_time() -> None:
    indices = Routing(2**20, 8, 8, "masked").make("cuda")
    expected = indices.clone()
    inplace_unique_group_indices_ref(expected, 8)
    for _ in range(100):
        copy = indices.clone()
        inplace_unique_group_indices(copy, 8)
        assert_equal(copy, expected)


@pytest.mark.gpu
def test_gpu_leaves_what_is_no_group() -> None:
    indices = torch.tensor([[8, 8, 2**40, 2**40, 3, 3, -2, -2]], device="cuda")
    inplace_unique_group_indices(indices, 8)
    assert indices.tolist() == [[8, 8, 2**40, 2**40, 3, -1, -2, -2]]


def test_cpu_refuses_what_is_no_group() -> None:
    indices = torch.tensor([[1, 8]])
    with pytest.raises(ValueError, match=rf"^{NAME}: group_indices must hold values below 8, got 8$"):
        inplace_unique_group_indices(indices, 8)


def refusals() -> Iterator[Refusal]:
    yield from index_refusals("group_indices", {"num_groups": 8})

    def others(device: str) -> dict[str, object]:
        return {"group_indices": torch.zeros((4, 2), dtype=torch.int64, device=device)}

    yield from int_refusals("num_groups", (0, -1, 129, 2**40), "be between 1 and 128", others)


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, inplace_unique_group_indices, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, inplace_unique_group_indices, "cuda")


@pytest.mark.gpu
def test_rows_that_are_too_long_are_refused() -> None:
    indices = torch.zeros((3, 257), dtype=torch.int64, device="cuda")
    with pytest.raises(ValueError, match=rf"^{NAME}: .*num_topk.*257"):
        inplace_unique_group_indices(indices, 8)
