"""get_fused_mapping: a stable sort by expert with rounded-up segments, whatever the number of SMs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

from tests.moe.index_refusals import index_refusals, int_refusals
from tests.moe.routings import Routing, random_routings
from tests.refusals import Refusal
from tilekernels import config
from tilekernels.layout import align
from tilekernels.moe import get_fused_mapping
from tilekernels.moe.get_fused_mapping import FusedMapping, get_fused_mapping_ref
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_moe_params, generate_topk_idx

NAME = "moe.get_fused_mapping"
ALIGNMENTS = (1, 16, 32, 64, 128, 3, 1000)
SM_LIMITS = (1, 112, 132)


@pytest.fixture(autouse=True)
def _no_limit() -> Iterator[None]:
    yield
    config.reset_runtime_config()


def sort_in_python(topk_idx: torch.Tensor, num_experts: int, alignment: int) -> dict[str, list[int]]:
    """The definition, entry after entry."""
    num_topk = topk_idx.shape[1]
    result: dict[str, list[int]] = {name: [] for name in ("expert", "token", "slot", "start", "end", "size")}
    positions = [-1] * topk_idx.numel()
    flat = topk_idx.reshape(-1).tolist()
    for expert in range(num_experts):
        entries = [at for at, value in enumerate(flat) if value == expert]
        start = len(result["expert"])
        for place, at in enumerate(entries):
            positions[at] = start + place
        padding = [-1] * (align(len(entries), alignment) - len(entries))
        result["expert"] += [expert] * len(entries) + padding
        result["token"] += [at // num_topk for at in entries] + padding
        result["slot"] += entries + padding
        result["start"].append(start)
        result["end"].append(len(result["expert"]))
        result["size"].append(len(result["expert"]) - start)
    return {**result, "positions": positions}


def assert_same_mapping(actual: FusedMapping, expected: FusedMapping) -> None:
    for x, y in zip(actual[:7], expected[:7], strict=True):
        assert_equal(x, y)  # type: ignore[arg-type]
    assert actual[7] == expected[7]


# ---- reference -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(
    "routing", list(random_routings(18, most_tokens=500, most_experts=72)), ids=lambda each: each.id
)
def test_reference_equals_sorting_in_python(routing: Routing, alignment: int) -> None:
    topk_idx = routing.make("cpu")
    expected = sort_in_python(topk_idx, routing.num_experts, alignment)
    mapping = get_fused_mapping_ref(topk_idx, routing.num_experts, 0, alignment)
    named = ("expert", "token", "slot", "positions", "start", "end", "size")
    for tensor, name in zip(mapping[:7], named, strict=True):
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype == torch.int32
        assert tensor.reshape(-1).tolist() == expected[name], name
    assert mapping[7] == expected["size"]


# ---- valid calls -----------------------------------------------------------------------------------------------------


def check_routing(routing: Routing, alignment: int, device: str) -> None:
    """With the length found by the operator, given exactly, with room to spare, too small, and none at all."""
    topk_idx = routing.make(device)
    found = get_fused_mapping(topk_idx, routing.num_experts, 0, alignment)
    assert_same_mapping(found, get_fused_mapping_ref(topk_idx, routing.num_experts, 0, alignment))
    total = found[0].shape[0]
    for length in {total, total + 777, total // 2} - {0}:
        given = get_fused_mapping(topk_idx, routing.num_experts, length, alignment)
        assert given[7] == []
        assert_same_mapping(given, get_fused_mapping_ref(topk_idx, routing.num_experts, length, alignment))
    without = get_fused_mapping(topk_idx, routing.num_experts, 0, alignment, force_no_sync=True)
    assert without[0].numel() == without[1].numel() == without[2].numel() == 0
    for x, y in zip(without[3:7], found[3:7], strict=True):
        assert_equal(x, y)  # type: ignore[arg-type]


RANDOM_CASES = [(routing, ALIGNMENTS[at % len(ALIGNMENTS)]) for at, routing in enumerate(random_routings(220))]
random_case = pytest.mark.parametrize(
    ("routing", "alignment"), RANDOM_CASES, ids=[f"{routing.id}-by{by}" for routing, by in RANDOM_CASES]
)


@pytest.mark.parametrize(
    ("routing", "alignment"), RANDOM_CASES[::7], ids=[f"{routing.id}-by{by}" for routing, by in RANDOM_CASES[::7]]
)
def test_cpu(routing: Routing, alignment: int) -> None:
    check_routing(routing, alignment, "cpu")


@pytest.mark.gpu
@random_case
def test_gpu(routing: Routing, alignment: int) -> None:
    check_routing(routing, alignment, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", SM_LIMITS)
@pytest.mark.parametrize("alignment", [64, 128])
@pytest.mark.parametrize("params", list(generate_moe_params()), ids=lambda params: "-".join(map(str, params.values())))
def test_published_sizes(params: dict[str, int], alignment: int, num_sms: int) -> None:
    config.set_num_sms(min(num_sms, config.get_device_num_sms()))
    topk_idx = generate_topk_idx(params, "cuda")
    mapping = get_fused_mapping(topk_idx, params["num_experts"], 0, alignment)
    assert_same_mapping(mapping, get_fused_mapping_ref(topk_idx, params["num_experts"], 0, alignment))


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", SM_LIMITS)
@pytest.mark.parametrize("routing", list(random_routings(24)), ids=lambda each: each.id)
def test_sm_limit_changes_nothing(routing: Routing, num_sms: int) -> None:
    config.set_num_sms(min(num_sms, config.get_device_num_sms()))
    check_routing(routing, 16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_experts", [1, 4, 256, 1024])
def test_million_tokens(num_experts: int) -> None:
    topk_idx = Routing(2**20, 8, num_experts, "masked").make("cuda")
    mapping = get_fused_mapping(topk_idx, num_experts, 0, 128)
    assert_same_mapping(mapping, get_fused_mapping_ref(topk_idx, num_experts, 0, 128))


@pytest.mark.gpu
def test_same_bytes_every_time() -> None:
    topk_idx = Routing(8192, 8, 256, "skewed").make("cuda")
    first = get_fused_mapping(topk_idx, 256, 0, 128)
    for _ in range(100):
        assert_same_mapping(get_fused_mapping(topk_idx, 256, 0, 128), first)


@pytest.mark.gpu
@pytest.mark.parametrize("force_no_sync", [False, True])
def test_host_does_not_wait(force_no_sync: bool) -> None:
    topk_idx = Routing(100, 8, 32, "masked").make("cuda")
    get_fused_mapping(topk_idx, 32, 4096, 16)  # loads the kernel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        mapping = get_fused_mapping(topk_idx, 32, 0 if force_no_sync else 4096, 16, force_no_sync)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mapping[7] == []


# ---- indices out of range --------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [9, 1024, 2**31, 2**32 + 1, 2**62, -2, -(2**31), -(2**63)])
def test_gpu_passes_over_what_is_no_expert(wrong: int) -> None:
    topk_idx = Routing(300, 6, 9, "masked").make("cuda")
    expected = get_fused_mapping_ref(topk_idx, 9, 0, 16)
    topk_idx[topk_idx < 0] = wrong
    assert_same_mapping(get_fused_mapping(topk_idx, 9, 0, 16), expected)


def test_cpu_refuses_what_is_no_expert() -> None:
    topk_idx = Routing(10, 2, 9, "masked").make("cpu")
    topk_idx[3, 1] = 9
    with pytest.raises(ValueError, match=r"^moe\.get_fused_mapping: topk_idx must hold values below 9, got 9$"):
        get_fused_mapping(topk_idx, 9, 0, 16)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals() -> Iterator[Refusal]:
    numbers = {"num_experts": 8, "num_expanded_tokens": 0, "alignment": 16}
    yield from index_refusals("topk_idx", numbers)

    def others(device: str) -> dict[str, object]:
        return {"topk_idx": torch.zeros((4, 2), dtype=torch.int64, device=device), **numbers}

    yield from int_refusals("num_experts", (0, -1, 1025, 2**40), "be between 1 and 1024", others)
    yield from int_refusals("alignment", (0, -1, 2**31), "be between 1 and 2147483647", others)
    yield from int_refusals("num_expanded_tokens", (-1, 2**31), "be between 0 and 2147483647", others)
    yield Refusal(
        "positions beyond 32 bits",
        lambda device: {**others(device), "alignment": 2**28 + 1},
        "alignment must keep all positions below 2147483648, got 268435457",
    )


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, get_fused_mapping, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, get_fused_mapping, "cuda")
