"""normalize_weight: sums in the exact order of both generations of the gate, and IEEE quotients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.moe.gates import assert_repeats, tensor_refusals
from tests.refusals import Refusal
from tilekernels.moe import normalize_weight
from tilekernels.moe.normalize_weight import (
    normalize_weight_ref,
    normalize_weight_sequential,
    normalize_weight_sequential_ref,
)
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_moe_params, generate_topk_idx

NAME = "moe.normalize_weight"
ORDERS = {
    "butterfly": (normalize_weight, normalize_weight_ref),
    "sequential": (normalize_weight_sequential, normalize_weight_sequential_ref),
}
every_order = pytest.mark.parametrize("order", ORDERS)


def make_weights(num_tokens: int, num_topk: int, device: str) -> torch.Tensor:
    """Weights over several powers of two, so that the order of the sum shows."""
    shape = (num_tokens, num_topk)
    return torch.ldexp(torch.rand(shape, device=device), torch.randint(-6, 7, shape, device=device))


# ---- references ------------------------------------------------------------------------------------------------------


def tree_sum(row: np.ndarray) -> np.float32:
    """The definition, on a list that has no lanes beyond the weights."""
    sums = list(row)
    for distance in (16, 8, 4, 2, 1):
        for j in range(len(sums)):
            if (j & distance) == 0 and (j ^ distance) < len(sums):
                sums[j] = np.float32(sums[j] + sums[j ^ distance])
    return np.float32(sums[0] + np.float32(1e-20))


def left_to_right(row: np.ndarray) -> np.float32:
    total = np.float32(1e-20)
    for weight in row:
        total = np.float32(total + weight)
    return total


@pytest.mark.parametrize("num_topk", range(1, 33))
@pytest.mark.parametrize(("order", "define"), [("butterfly", tree_sum), ("sequential", left_to_right)])
def test_reference_adds_in_the_order_of_the_definition(
    order: str, define: Callable[[np.ndarray], np.float32], num_topk: int
) -> None:
    weights = make_weights(50, num_topk, "cpu")
    denominator, normalized = ORDERS[order][1](weights)
    expected = np.array([define(row) for row in weights.numpy()], dtype=np.float32)
    assert_equal(denominator, torch.from_numpy(expected))
    assert_equal(normalized, torch.from_numpy(weights.numpy() / expected[:, None]))


@every_order
def test_reference_is_close_to_float64(order: str) -> None:
    weights = make_weights(1000, 9, "cpu")
    denominator, normalized = ORDERS[order][1](weights)
    exact = weights.double().sum(dim=1)
    torch.testing.assert_close(denominator.double(), exact, rtol=1e-6, atol=0)
    torch.testing.assert_close(normalized.double(), weights.double() / exact[:, None], rtol=1e-6, atol=0)


@every_order
def test_no_weight_at_all_gives_zeros(order: str) -> None:
    denominator, normalized = ORDERS[order][0](torch.zeros(3, 6))
    assert_equal(denominator, torch.full((3,), 1e-20))
    assert_equal(normalized, torch.zeros(3, 6))


# ---- valid calls -----------------------------------------------------------------------------------------------------


def check(order: str, weights: torch.Tensor) -> None:
    call, reference = ORDERS[order]
    for result, expected in zip(call(weights), reference(weights), strict=True):
        assert_equal(result, expected)


@every_order
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_cpu(order: str, num_tokens: int) -> None:
    check(order, make_weights(num_tokens, 6, "cpu"))


@pytest.mark.gpu
@every_order
@pytest.mark.parametrize("num_topk", range(1, 33))
@pytest.mark.parametrize("num_tokens", [0, 1, 2, 31, 33, 4001])
def test_gpu(order: str, num_tokens: int, num_topk: int) -> None:
    check(order, make_weights(num_tokens, num_topk, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_topk", [33, 64, 65, 200])
def test_sequential_takes_any_number_of_weights(num_topk: int) -> None:
    check("sequential", make_weights(129, num_topk, "cuda"))


@pytest.mark.gpu
@every_order
@pytest.mark.parametrize("params", list(generate_moe_params()), ids=str)
def test_published_sizes(order: str, params: dict[str, int]) -> None:
    num_tokens, num_topk = generate_topk_idx(params, device="cuda").shape
    check(order, torch.rand((num_tokens, num_topk), device="cuda"))


@pytest.mark.gpu
@every_order
def test_many_tokens(order: str) -> None:
    check(order, make_weights(2**20, 8, "cuda"))


@pytest.mark.gpu
@every_order
def test_address_of_one_element_beyond_alignment(order: str) -> None:
    storage = make_weights(1, 1 + 500 * 8, "cuda")[0]
    check(order, storage[1:].view(500, 8))


@pytest.mark.gpu
@every_order
def test_infinite_and_missing_weights_stay_in_their_row(order: str) -> None:
    weights = make_weights(64, 7, "cuda")
    expected = ORDERS[order][1](weights)
    weights[::2, 3] = torch.inf
    weights[::4, 5] = torch.nan
    denominator, normalized = ORDERS[order][0](weights)
    assert denominator[2::4].isinf().all()
    assert denominator[::4].isnan().all()
    assert_equal(denominator[1::2].contiguous(), expected[0][1::2].contiguous())
    assert_equal(normalized[1::2].contiguous(), expected[1][1::2].contiguous())


@pytest.mark.gpu
@every_order
def test_same_bytes_every_time(order: str) -> None:
    weights = make_weights(5000, 8, "cuda")
    assert_repeats(lambda: ORDERS[order][0](weights))


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def make_call(device: str) -> dict[str, torch.Tensor]:
    return {"topk_weights": torch.ones((4, 3), device=device)}


REFUSALS = [
    *tensor_refusals("topk_weights", torch.float32, (4, 3), make_call),
    Refusal(
        "transposed", lambda device: {"topk_weights": torch.ones((3, 4), device=device).t()}, r"topk_weights must .*"
    ),
    Refusal("absent", lambda device: {"topk_weights": None}, r"topk_weights must be a .*tensor, got .*"),
    Refusal(
        "no columns", lambda device: {"topk_weights": torch.ones((4, 0), device=device)}, r".*num_topk.*|.*column.*"
    ),
    Refusal("33 columns", lambda device: {"topk_weights": torch.ones((4, 33), device=device)}, r".*32.*"),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, normalize_weight, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, normalize_weight, "cuda")
