"""group_count: exact counts, whatever the number of SMs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.moe.index_refusals import index_refusals, int_refusals
from tests.moe.routings import Routing, random_routings
from tests.refusals import Refusal
from tilekernels import config
from tilekernels.moe import group_count
from tilekernels.moe.group_count import group_count_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_moe_params, generate_topk_idx

NAME = "moe.group_count"
SM_LIMITS = (1, 112, 132)

CASES = list(random_routings(200))


@pytest.fixture(autouse=True)
def _no_limit() -> Iterator[None]:
    yield
    config.reset_runtime_config()


@pytest.mark.parametrize("routing", CASES[::8], ids=lambda routing: routing.id)
def test_reference_equals_counting_in_python(routing: Routing) -> None:
    indices = routing.make("cpu")
    counted = Counter(indices.reshape(-1).tolist())
    expected = [counted[group] for group in range(routing.num_experts)]
    assert_equal(group_count_ref(indices, routing.num_experts), torch.tensor(expected, dtype=torch.int32))


def check_routing(routing: Routing, device: str) -> None:
    indices = routing.make(device)
    assert_equal(group_count(indices, routing.num_experts), group_count_ref(indices, routing.num_experts))


@pytest.mark.parametrize("routing", CASES[::4], ids=lambda routing: routing.id)
def test_cpu(routing: Routing) -> None:
    check_routing(routing, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("routing", CASES, ids=lambda routing: routing.id)
def test_gpu(routing: Routing) -> None:
    check_routing(routing, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", SM_LIMITS)
@pytest.mark.parametrize("params", list(generate_moe_params()), ids=lambda params: "-".join(map(str, params.values())))
def test_published_sizes(params: dict[str, int], num_sms: int) -> None:
    config.set_num_sms(min(num_sms, config.get_device_num_sms()))
    topk_idx = generate_topk_idx(params, "cuda")
    assert_equal(group_count(topk_idx, params["num_experts"]), group_count_ref(topk_idx, params["num_experts"]))


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", SM_LIMITS)
@pytest.mark.parametrize("num_groups", [1, 256, 1024])
def test_million_tokens_same_bytes_every_time(num_groups: int, num_sms: int) -> None:
    config.set_num_sms(min(num_sms, config.get_device_num_sms()))
    indices = Routing(2**20, 8, num_groups, "masked").make("cuda")
    expected = group_count_ref(indices, num_groups)
    for _ in range(100):
        assert_equal(group_count(indices, num_groups), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [9, 1024, 2**31, 2**32 + 1, 2**62, -2, -(2**63)])
def test_gpu_passes_over_what_is_no_group(wrong: int) -> None:
    indices = Routing(300, 6, 9, "masked").make("cuda")
    expected = group_count_ref(indices, 9)
    indices[indices < 0] = wrong
    assert_equal(group_count(indices, 9), expected)


def test_cpu_refuses_what_is_no_group() -> None:
    with pytest.raises(ValueError, match=rf"^{NAME}: group_idx must hold values below 8, got 11$"):
        group_count(torch.tensor([[1, 11]]), 8)


def refusals() -> Iterator[Refusal]:
    yield from index_refusals("group_idx", {"num_groups": 8})

    def others(device: str) -> dict[str, object]:
        return {"group_idx": torch.zeros((4, 2), dtype=torch.int64, device=device)}

    yield from int_refusals("num_groups", (0, -1, 1025, 2**40), "be between 1 and 1024", others)


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, group_count, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, group_count, "cuda")
