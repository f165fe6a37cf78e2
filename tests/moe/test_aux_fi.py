"""aux_fi: counts over tokens, exact up to one fp32 division of rounded integers."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch

from tests.moe.index_refusals import index_refusals, int_refusals
from tests.moe.routings import Routing, random_routings
from tests.refusals import Refusal
from tilekernels import config
from tilekernels.moe import aux_fi
from tilekernels.moe.aux_fi import aux_fi_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_moe_params, generate_topk_idx

NAME = "moe.aux_fi"
SM_LIMITS = (1, 112, 132)

# Two integers and their quotient are rounded to fp32, each by half a unit in the last place at most
RELATIVE_TOLERANCE = 2.0**-22

CASES = list(random_routings(200))


@pytest.fixture(autouse=True)
def _no_limit() -> Iterator[None]:
    yield
    config.reset_runtime_config()


@pytest.mark.parametrize("routing", CASES[::8], ids=lambda routing: routing.id)
def test_reference_equals_fractions(routing: Routing) -> None:
    indices = routing.make("cpu")
    flat = indices.reshape(-1).tolist()
    for expert, actual in enumerate(aux_fi_ref(indices, routing.num_experts, 3).tolist()):
        slots = routing.num_tokens * 3
        expected = Fraction(flat.count(expert) * routing.num_experts, slots) if slots else Fraction(0)
        assert abs(Fraction(actual) - expected) <= RELATIVE_TOLERANCE * expected


def check_routing(routing: Routing, device: str) -> None:
    indices = routing.make(device)
    for num_aux_topk in {1, routing.num_topk, 2**31 - 1}:
        expected = aux_fi_ref(indices, routing.num_experts, num_aux_topk)
        assert_equal(aux_fi(indices, routing.num_experts, num_aux_topk), expected)


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
    for num_aux_topk in (1, params["num_topk"]):
        expected = aux_fi_ref(topk_idx, params["num_experts"], num_aux_topk)
        assert_equal(aux_fi(topk_idx, params["num_experts"], num_aux_topk), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", SM_LIMITS)
@pytest.mark.parametrize("num_experts", [1, 256, 1024])
def test_million_tokens_same_bytes_every_time(num_experts: int, num_sms: int) -> None:
    config.set_num_sms(min(num_sms, config.get_device_num_sms()))
    indices = Routing(2**20, 8, num_experts, "masked").make("cuda")
    expected = aux_fi_ref(indices, num_experts, 8)
    for _ in range(100):
        assert_equal(aux_fi(indices, num_experts, 8), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [9, 2**32 + 1, 2**62, -2, -(2**63)])
def test_gpu_passes_over_what_is_no_expert(wrong: int) -> None:
    indices = Routing(300, 6, 9, "masked").make("cuda")
    expected = aux_fi_ref(indices, 9, 6)
    indices[indices < 0] = wrong
    assert_equal(aux_fi(indices, 9, 6), expected)


def test_cpu_refuses_what_is_no_expert() -> None:
    with pytest.raises(ValueError, match=rf"^{NAME}: topk_idx must hold values below 8, got 11$"):
        aux_fi(torch.tensor([[1, 11]]), 8, 2)


def refusals() -> Iterator[Refusal]:
    yield from index_refusals("topk_idx", {"num_experts": 8, "num_aux_topk": 2})

    def others(device: str) -> dict[str, object]:
        topk_idx = torch.zeros((4, 2), dtype=torch.int64, device=device)
        return {"topk_idx": topk_idx, "num_experts": 8, "num_aux_topk": 2}

    yield from int_refusals("num_experts", (0, -1, 1025, 2**40), "be between 1 and 1024", others)
    yield from int_refusals("num_aux_topk", (0, -1, 2**31), "be between 1 and 2147483647", others)


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, aux_fi, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, aux_fi, "cuda")
