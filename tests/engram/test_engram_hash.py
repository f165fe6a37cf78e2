"""engram_hash: exact against Python's integers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engram.gates import FULL
from tests.refusals import Refusal
from tilekernels.engram import engram_hash
from tilekernels.engram.engram_hash import engram_hash_ref, make_offsets
from tilekernels.testing import assert_equal

NAME = "engram.engram_hash"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
INT32, INT64 = torch.iinfo(torch.int32), torch.iinfo(torch.int64)


def hash_in_integers(
    ids: list[int], multipliers: list[int], vocab_sizes: list[list[int]], offsets: list[int]
) -> list[int]:
    """The columns of one token and layer, in integers without end."""
    columns: list[int] = []
    mixed = (ids[0] * multipliers[0]) & (2**64 - 1)
    for order, sizes in enumerate(vocab_sizes):
        mixed ^= (ids[order + 1] * multipliers[order + 1]) & (2**64 - 1)
        signed = mixed - 2**64 if mixed >= 2**63 else mixed
        columns += [signed % size for size in sizes]
    return [column + offset for column, offset in zip(columns, offsets, strict=True)]


def make_case(
    num_tokens: int, ngram: int, num_layers: int, num_tables: int, device: str, is_wide: bool = True
) -> dict[str, torch.Tensor]:
    """Ids and multipliers from all of their types' range, or as the published benchmark draws them."""
    sizes = torch.randint(1, 2**31 - 1, (num_layers, ngram - 1, num_tables), device=device)
    ids = torch.randint(INT32.min, INT32.max, (num_tokens, ngram), device=device)
    multipliers = torch.randint(INT64.min, INT64.max, (num_layers, ngram), device=device)
    offsets = torch.randint(-(2**31), 0, (num_layers, (ngram - 1) * num_tables), device=device)
    if not is_wide:
        sizes = torch.randint(100_000, 1_000_000, sizes.shape, device=device)
        ids, multipliers = ids.abs() % 100_000, multipliers.abs() % 100_000
        offsets = make_offsets(sizes)
    return {
        "ngram_token_ids": ids.int(),
        "multipliers": multipliers,
        "vocab_sizes": sizes.int(),
        "offsets": offsets.int(),
    }


def expected_of(case: dict[str, torch.Tensor]) -> torch.Tensor:
    layers = []
    for layer in range(case["multipliers"].shape[0]):
        tables = case["multipliers"][layer].tolist(), case["vocab_sizes"][layer].tolist()
        offsets = case["offsets"][layer].tolist()
        layers.append([hash_in_integers(ids, *tables, offsets) for ids in case["ngram_token_ids"].tolist()])
    return torch.tensor(layers, dtype=torch.int32, device=case["offsets"].device)


SHAPES = [(1, 2, 1, 1), (7, 3, 2, 8), (33, 4, 3, 5), (130, 6, 2, 16), (5, 2, 1, 300), (9, 3, 2, 200), (65, 5, 4, 64)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_wide", [True, False], ids=["wide", "published"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_equals_integers(shape: tuple[int, int, int, int], is_wide: bool, device: str) -> None:
    case = make_case(*shape, device, is_wide)
    expected = expected_of(case)
    assert_equal(engram_hash(**case), expected)
    assert_equal(engram_hash_ref(**case), expected)


@pytest.mark.gpu
def test_a_million_tokens_equal_integers() -> None:
    case = make_case(1_000_000, 3, 1, 4, "cuda")
    assert_equal(engram_hash(**case), expected_of(case))


PUBLISHED = [(num_tokens, 3, 2, 8) for num_tokens in (4001, 8001)]
if FULL:
    PUBLISHED += itertools.product((0, 1, 512, 4001, 8001), (2, 3, 4, 5), (1, 2, 3), (1, 8, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("shape", dict.fromkeys(PUBLISHED), ids=lambda shape: "x".join(map(str, shape)))
def test_published_sizes(shape: tuple[int, int, int, int], is_masked: bool) -> None:
    case = make_case(*shape, "cuda", is_wide=False)
    mask = torch.rand(shape[0], device="cuda") < 0.4 if is_masked else None
    assert_equal(engram_hash(**case, image_token_mask=mask), engram_hash_ref(**case, image_token_mask=mask))


@pytest.mark.parametrize("device", DEVICES)
def test_every_remainder_of_extreme_sizes(device: str) -> None:
    """Hashes around multiples of the size, where a quotient off by one would show."""
    size_list = [1, 2, 3, 65536, 99_999, 2**30, 2**31 - 2, 2**31 - 1]
    sizes = torch.tensor(size_list, device=device)
    quotients = torch.tensor([0, 1, 2, 2**31 // 3, 2**32 - 1, (2**63 - 1) // (2**31 - 1)], device=device)
    near = (sizes[:, None] * quotients).flatten()[:, None] + torch.tensor([-1, 0, 1], device=device)
    values = torch.cat([near.flatten(), -near.flatten(), torch.tensor([INT64.min, INT64.max], device=device)])
    # One layer a value: the second id is 0, so that the first one's product is the hash
    case = {
        "ngram_token_ids": torch.tensor([[1, 0]], dtype=torch.int32, device=device),
        "multipliers": torch.stack([values, torch.zeros_like(values)], dim=1),
        "vocab_sizes": sizes.int().expand(len(values), 1, -1).contiguous(),
        "offsets": torch.zeros((len(values), len(size_list)), dtype=torch.int32, device=device),
    }
    assert_equal(engram_hash(**case), expected_of(case))


@pytest.mark.parametrize("device", DEVICES)
def test_image_tokens_get_minus_one(device: str) -> None:
    case = make_case(77, 3, 2, 8, device)
    mask = torch.rand(77, device=device) < 0.4
    expected = engram_hash_ref(**case)
    expected[:, mask] = -1
    assert_equal(engram_hash(**case, image_token_mask=mask), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (5, 1, 2, 3), (5, 3, 2, 0), (5, 3, 0, 2)], ids=str)
def test_nothing_to_hash(shape: tuple[int, int, int, int], device: str) -> None:
    num_tokens, ngram, num_layers, num_tables = shape
    rows = engram_hash(**make_case(*shape, device))
    assert rows.shape == (num_layers, num_tokens, (ngram - 1) * num_tables)
    assert rows.dtype == torch.int32


def test_offsets_follow_one_another() -> None:
    sizes = torch.tensor([[[3, 4], [5, 6]], [[1, 1], [1, 1]]], dtype=torch.int32)
    assert make_offsets(sizes).tolist() == [[0, 3, 7, 12], [0, 1, 2, 3]]


def refusals() -> Iterator[Refusal]:
    def refusal(label: str, text: str, **changes: Any) -> Refusal:
        def make(device: str) -> dict[str, Any]:
            case = make_case(6, 3, 2, 4, device)
            return case | {name: change(case.get(name)) for name, change in changes.items()}

        return Refusal(label, make, text)

    yield refusal("ids int64", "ngram_token_ids must be int32, got int64", ngram_token_ids=lambda x: x.long())
    yield refusal(
        "ids strided", "ngram_token_ids must have strides .*", ngram_token_ids=lambda x: x.repeat(1, 2)[:, ::2]
    )
    yield refusal("ids None", "ngram_token_ids must be a .*tensor, got .*", ngram_token_ids=lambda x: None)
    yield refusal("multipliers int32", "multipliers must be int64, got int32", multipliers=lambda x: x.int())
    yield refusal("a multiplier too many", ".*multipliers.*", multipliers=lambda x: x.repeat(1, 2))
    yield refusal("sizes of 3 layers", ".*vocab_sizes.*", vocab_sizes=lambda x: x.repeat(2, 1, 1)[:3])
    yield refusal("an order too many", ".*", vocab_sizes=lambda x: x.repeat(1, 2, 1)[:, :3])
    yield refusal("a column too many", ".*", offsets=lambda x: x.repeat(1, 2))
    yield refusal(
        "mask of bytes", "image_token_mask must be bool, .*", image_token_mask=lambda _: torch.zeros(6).byte()
    )
    yield refusal("mask of 5", ".*image_token_mask.*5.*", image_token_mask=lambda _: torch.zeros(5).bool())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", list(refusals()), ids=lambda refusal: refusal.id)
def test_refused(refusal: Refusal) -> None:
    refusal.check(NAME, engram_hash, "cpu")
