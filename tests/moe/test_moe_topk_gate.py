"""moe_topk_gate: forward against the definition in float64, random routing bit by bit, backward against autograd."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.moe.gates import FINITE_KINDS, KINDS, assert_repeats, make_logits, rank, tensor_refusals
from tests.refusals import Refusal
from tilekernels.errors import ArgumentError
from tilekernels.moe import moe_topk_gate, moe_topk_gate_backward, moe_topk_gate_forward
from tilekernels.moe._random import draw_two, philox, uniform
from tilekernels.moe.moe_topk_gate import moe_topk_gate_backward_ref, moe_topk_gate_forward_ref, sqrt_softplus_slope
from tilekernels.testing import assert_equal, calc_diff

NAME = "moe.moe_topk_gate_forward"
BACKWARD_NAME = "moe.moe_topk_gate_backward"
# The definitions in these tests are computed in float64
WEIGHT_TOLERANCE = {"rtol": 1e-5, "atol": 1e-8}
GRADIENT_DIFF = 1e-10  # calc_diff: squared distance over the sum of squares
# (num_experts, num_topk) of published models
MODELS = [(72, 6), (256, 8), (288, 8), (384, 8), (512, 10)]


@dataclass(frozen=True)
class Case:
    """One forward call; make() draws its tensors."""

    num_tokens: int
    num_experts: int
    num_topk: int
    kind: str = "normal"
    num_shared: int = 0
    num_replicas: int = 0  # columns of the map; 0: no map
    ep_rank: int = 0
    options: str = ""  # letters: m mask, b bias, i image, f fixed, u unmapped, r random, s scores, o out

    @property
    def id(self) -> str:
        sizes = f"{self.num_tokens}x{self.num_experts}-top{self.num_topk}+{self.num_shared}-map{self.num_replicas}"
        return f"{sizes}-{self.kind}-ep{self.ep_rank}-{self.options}"

    def make(self, device: str) -> dict[str, Any]:
        num_slots = self.num_topk + self.num_shared
        kwargs: dict[str, Any] = {
            "logits": make_logits(self.kind, (self.num_tokens, self.num_experts), device),
            "num_topk": self.num_topk,
            "use_shared_as_routed": self.num_shared > 0,
            "num_shared_experts": self.num_shared,
            "routed_scaling_factor": 1.5,
            "ep_rank": self.ep_rank,
        }

        def draw_mask(share: float) -> torch.Tensor:
            return torch.rand(self.num_tokens, device=device) < share

        if "m" in self.options:
            kwargs["mask"] = draw_mask(0.7)
        if "b" in self.options:
            kwargs["bias"] = torch.randn(self.num_experts, device=device) / 4
        if "i" in self.options:
            kwargs["image_bias"] = torch.randn(self.num_experts, device=device) / 4
            kwargs["image_token_mask"] = draw_mask(0.5)
        if "f" in self.options:
            kwargs["fix_routing_mask"] = draw_mask(0.5)
        if "f" in self.options or "u" in self.options:
            rows = torch.rand((self.num_tokens, self.num_experts), device=device).argsort(dim=1)
            wide = torch.full((self.num_tokens, self.num_topk + 3), 77, device=device)
            kwargs["unmapped_topk_idx"] = wide[:, 1 : self.num_topk + 1].copy_(rows[:, : self.num_topk])
        if "r" in self.options:
            kwargs["force_random"] = draw_mask(0.4)
        if "s" in self.options:
            kwargs["scores"] = torch.full((self.num_tokens, self.num_experts), -5.0, device=device)
        if "o" in self.options:
            shape = (self.num_tokens, num_slots)
            kwargs["out"] = (torch.full(shape, -5, device=device), torch.full(shape, -5.0, device=device))
        if self.num_replicas:
            shape = (self.num_experts + self.num_shared, self.num_replicas)
            kwargs["to_physical_map"] = torch.randint(0, 2 * self.num_experts, shape, dtype=torch.int32, device=device)
            kwargs["logical_count"] = torch.randint(1, shape[1] + 1, shape[:1], dtype=torch.int32, device=device)
        return kwargs


def random_cases(count: int) -> Iterator[Case]:
    choose = random.Random(6)
    for at in range(count):
        num_experts = choose.choice((4, 8, 16, 32, 36, 64, 72, 96, 108, 128, 144, 252, 256))
        if at % 8 == 0:
            num_experts = choose.choice((260, 288, 384, 512, 1000, 1024))
        yield Case(
            num_tokens=choose.choice((0, 1, 2, 5, 33, 300)),
            num_experts=num_experts,
            num_topk=choose.randint(1, min(30, num_experts)),
            kind=choose.choice(FINITE_KINDS),
            num_shared=choose.choice((0, 0, 1, 2)),
            num_replicas=choose.choice((0, 1, 4)),
            ep_rank=choose.choice((0, 3, 1000)),
            options="".join(letter for letter in "mbifurso" if choose.random() < 0.4),
        )


CASES = list(random_cases(240))


def check(case: Case, device: str) -> None:
    """All results of the call, and what it writes in place, against the reference."""
    kwargs = case.make(device)
    written = {name: kwargs[name] for name in ("unmapped_topk_idx", "scores") if name in kwargs}
    before = {name: tensor.clone() for name, tensor in written.items()}
    expected = tuple(each.clone() for each in moe_topk_gate_forward_ref(**kwargs))
    expected_written = {name: tensor.clone() for name, tensor in written.items()}
    for name, tensor in before.items():
        kwargs[name].copy_(tensor)
    results = moe_topk_gate_forward(**kwargs)
    for result, other in zip(results, expected, strict=True):
        assert_equal(result, other)
    for name, tensor in written.items():
        assert_equal(tensor, expected_written[name], check_stride=False)
    if "unmapped_topk_idx" in kwargs:
        assert (kwargs["unmapped_topk_idx"]._base[:, [0, -1]] == 77).all(), "columns beside the view were written"
    if "out" in kwargs:
        assert [x.data_ptr() for x in results] == [x.data_ptr() for x in kwargs["out"]]


# ---- reference, forward ----------------------------------------------------------------------------------------------


def route_in_python(case: Case, kwargs: dict[str, Any], token: int) -> tuple[list[int], list[float], list[int]]:
    """One token that is neither masked nor random, by the definition in float64: experts, weights, logical experts."""

    def flag(name: str) -> bool:
        return name in kwargs and bool(kwargs[name][token])

    row = kwargs["logits"][token].tolist()
    scores = [math.sqrt(x if x > 20 else math.log1p(math.exp(x))) for x in row]
    bias = kwargs.get("image_bias" if flag("image_token_mask") else "bias")
    offsets = [0.0] * case.num_experts if bias is None else bias.tolist()
    chosen = rank([u + b for u, b in zip(scores, offsets, strict=True)], case.num_topk)
    if flag("fix_routing_mask"):
        chosen = kwargs["unmapped_topk_idx"][token].tolist()
    total = 1e-20 + sum(scores[expert] for expert in chosen)
    weights = [scores[expert] / total * 1.5 for expert in chosen] + [1.0] * case.num_shared
    experts = chosen + [case.num_experts + j for j in range(case.num_shared)]
    if "to_physical_map" in kwargs:
        counts = kwargs["logical_count"].tolist()
        experts = [int(kwargs["to_physical_map"][e, (case.ep_rank + token * 23333) % counts[e]]) for e in experts]
    return experts, weights, chosen


@pytest.mark.parametrize(
    "case", [each for each in CASES if each.kind == "normal" and each.num_tokens <= 33], ids=lambda case: case.id
)
def test_reference_equals_the_definition(case: Case) -> None:
    kwargs = case.make("cpu")
    mask = kwargs.get("mask", torch.ones(case.num_tokens, dtype=torch.bool))
    is_random = kwargs.get("force_random", torch.zeros(case.num_tokens, dtype=torch.bool)) & mask
    routed = [route_in_python(case, kwargs, token) for token in range(case.num_tokens)]
    topk_idx, topk_weights = moe_topk_gate_forward_ref(**kwargs)
    for token, (experts, weights, chosen) in enumerate(routed):
        if not mask[token]:
            experts, weights, chosen = [-1] * len(experts), [0.0] * len(weights), [-1] * len(chosen)
        elif is_random[token]:
            experts, weights, chosen = topk_idx[token].tolist(), topk_weights[token].tolist(), [-1] * len(chosen)
        assert topk_idx[token].tolist() == experts
        torch.testing.assert_close(topk_weights[token].double(), torch.tensor(weights).double(), **WEIGHT_TOLERANCE)
        if "unmapped_topk_idx" in kwargs:
            assert kwargs["unmapped_topk_idx"][token].tolist() == chosen
    if "scores" in kwargs:
        exact = torch.nn.functional.softplus(kwargs["logits"].double()).sqrt()
        expected = torch.where((mask & ~is_random)[:, None], exact, 0.0)
        torch.testing.assert_close(kwargs["scores"].double(), expected, rtol=1e-6, atol=0)


# ---- reference, random routing ---------------------------------------------------------------------------------------


def as_tensors(words: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.tensor([word]) for word in words]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    assert [int(word) for word in philox(as_tensors(counter), key)] == list(expected)


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    """The algorithm on Python's integers."""
    word = 2**32
    for _ in range(10):
        even, odd = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [odd // word ^ counter[1] ^ key[0], odd % word, even // word ^ counter[3] ^ key[1], even % word]
        key = [(key[0] + 0x9E3779B9) % word, (key[1] + 0xBB67AE85) % word]
    return counter


def draw_in_python(token: int, num_slots: int, total: int, seed: int) -> tuple[list[int], list[float]]:
    """Random experts and weights of one token, by the definition."""
    words = [
        philox_in_python([0, 0, (token * 32 + lane) % 2**32, (token * 32 + lane) >> 32], [seed, 0])
        for lane in range(num_slots)
    ]
    weights = [float(torch.tensor(word[0], dtype=torch.float64).float()) * 2.0**-32 + 2.0**-33 for word in words]
    drawn = {lane: word[1] % (total - lane) for lane, word in enumerate(words)}
    experts = [-1] * num_slots
    while drawn:
        fixed = min(drawn, key=lambda lane: (drawn[lane], lane))
        experts[fixed] = drawn.pop(fixed)
        drawn = {lane: value + (lane > fixed) for lane, value in drawn.items()}
    return experts, weights


@pytest.mark.parametrize(("num_topk", "num_shared", "num_replicas"), [(8, 0, 0), (6, 2, 3), (30, 2, 1), (1, 0, 2)])
def test_random_reference_equals_the_definition(num_topk: int, num_shared: int, num_replicas: int) -> None:
    kwargs = Case(40, 32, num_topk, num_shared=num_shared, num_replicas=num_replicas, ep_rank=5).make("cpu")
    kwargs["force_random"] = torch.ones(40, dtype=torch.bool)
    total = int(kwargs["logical_count"].sum()) if num_replicas else 32 + num_shared
    topk_idx, topk_weights = moe_topk_gate_forward_ref(**kwargs)
    for token in range(40):
        experts, weights = draw_in_python(token, num_topk + num_shared, total, seed=5)
        assert topk_idx[token].tolist() == experts
        assert_equal(topk_weights[token], torch.tensor(weights, dtype=torch.float64).float())
        assert len(set(experts)) == len(experts)
        assert set(experts) <= set(range(total))


def test_random_experts_are_spread_evenly() -> None:
    num_tokens, num_experts, num_topk = 20000, 64, 8
    kwargs = Case(num_tokens, num_experts, num_topk).make("cpu")
    kwargs["force_random"] = torch.ones(num_tokens, dtype=torch.bool)
    topk_idx, topk_weights = moe_topk_gate_forward_ref(**kwargs)
    expected = num_tokens * num_topk / num_experts
    counts = torch.bincount(topk_idx.flatten(), minlength=num_experts)
    assert (counts - expected).abs().max() < 6 * expected**0.5  # standard deviations
    assert abs(float(topk_weights.mean()) - 0.5) < 0.01


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, -1])
def test_streams_reach_beyond_32_bits(seed: int) -> None:
    subsequences = [0, 1, 31, 2**32 - 1, 2**32, 2**38 + 5]
    first, second = draw_two(seed, torch.tensor(subsequences))
    for at, subsequence in enumerate(subsequences):
        key = [seed % 2**32, (seed >> 32) % 2**32]
        expected = philox_in_python([0, 0, subsequence % 2**32, subsequence >> 32], key)
        assert [int(first[at]), int(second[at])] == expected[:2]


def test_uniform_numbers_leave_out_zero_and_take_in_one() -> None:
    assert_equal(uniform(torch.tensor([0, 2**32 - 1])), torch.tensor([2.0**-33, 1.0]))


# ---- reference, backward ---------------------------------------------------------------------------------------------


def make_backward(
    num_tokens: int, num_experts: int, num_topk: int, device: str, num_seqs: int = 0, missing: bool = False
) -> dict[str, Any]:
    """The arguments of a backward call as a forward call leaves them. num_seqs 0: no gradient of summed scores."""
    logits = torch.randn((num_tokens, num_experts), device=device) * 3
    mask = torch.rand(num_tokens, device=device) < 0.8
    scores = torch.empty_like(logits)
    topk_idx = torch.empty((num_tokens, num_topk), dtype=torch.int64, device=device)
    forward = {"mask": mask} if num_seqs else {}
    _, topk_weights = moe_topk_gate_forward_ref(
        logits, num_topk, False, 0, 1.5, 0, unmapped_topk_idx=topk_idx, scores=scores, **forward
    )
    if missing:
        topk_idx.masked_fill_(torch.rand(topk_idx.shape, device=device) < 0.3, -1)
    kwargs: dict[str, Any] = {
        "scores": scores,
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
        "grad_topk_weights": torch.randn(topk_weights.shape, device=device),
        "routed_scaling_factor": 1.5,
    }
    if num_seqs:
        kwargs |= {"mask": mask, "grad_scores_sum": torch.randn((num_seqs, num_experts), device=device)}
    return kwargs


def test_gradient_is_that_of_autograd() -> None:
    num_tokens, num_experts, num_topk, num_seqs = 12, 40, 6, 3
    logits = torch.randn((num_tokens, num_experts), dtype=torch.float64, requires_grad=True)
    mask = torch.rand(num_tokens) < 0.7
    u = torch.nn.functional.softplus(logits).sqrt()
    topk_idx = torch.where(mask[:, None], u.topk(num_topk).indices, -1)
    taken = u.gather(1, topk_idx.clamp(min=0)) * mask[:, None]
    topk_weights = taken / (taken.sum(dim=1, keepdim=True) + 1e-20) * 2.5
    shares = (u / u.sum(dim=1, keepdim=True) * mask[:, None]).view(num_seqs, -1, num_experts).sum(dim=1)
    grad_topk_weights, grad_scores_sum = torch.randn(num_tokens, num_topk), torch.randn(num_seqs, num_experts)
    ((topk_weights * grad_topk_weights).sum() + (shares * grad_scores_sum).sum()).backward()
    result = moe_topk_gate_backward_ref(
        (u * mask[:, None]).float().detach(), topk_idx, topk_weights.float().detach(), grad_topk_weights, 2.5,
        mask=mask, grad_scores_sum=grad_scores_sum,
    )  # fmt: skip
    assert logits.grad is not None
    assert calc_diff(result, logits.grad) < GRADIENT_DIFF
    assert (result[~mask] == 0).all()


def test_slope_is_exact_to_fp32() -> None:
    """Over the whole range of scores, and on both sides of 1, where the formula changes."""
    u = torch.cat([torch.linspace(0.0, 1.001, 20001), torch.logspace(-30, 3, 5000)])
    exact = torch.where(u > 0, -torch.expm1(-u.double().square()) / (2 * u.double()), 0.0)
    torch.testing.assert_close(sqrt_softplus_slope(u).double(), exact, rtol=4e-7, atol=1e-38)


def test_an_expert_that_stands_twice_gets_both_gradients() -> None:
    kwargs = make_backward(5, 16, 4, "cpu")
    kwargs["topk_idx"][:, 2] = kwargs["topk_idx"][:, 0]
    u, idx = kwargs["scores"].double(), kwargs["topk_idx"]
    g, w = kwargs["grad_topk_weights"].double(), kwargs["topk_weights"].double()
    terms = (1.5 * g - (g * w).sum(dim=1, keepdim=True)) / u.gather(1, idx).sum(dim=1, keepdim=True)
    expected = torch.zeros_like(u).scatter_add_(1, idx, terms) * -torch.expm1(-u * u) / (2 * u)
    assert calc_diff(moe_topk_gate_backward_ref(**kwargs), expected) < GRADIENT_DIFF


# ---- valid calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: case.id)
def test_cpu(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["", "bmsu", "bimfurso"])
@pytest.mark.parametrize(("num_experts", "num_topk"), MODELS)
@pytest.mark.parametrize("num_tokens", [1, 32, 512, 8001])
def test_sizes_of_models(num_tokens: int, num_experts: int, num_topk: int, options: str) -> None:
    check(Case(num_tokens, num_experts, num_topk, num_shared=1, num_replicas=2, ep_rank=2, options=options), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_topk", range(1, 33))
def test_every_topk(num_topk: int) -> None:
    check(Case(129, 288, num_topk, kind="ties", options="bmrsu"), "cuda")


@pytest.mark.gpu
def test_many_tokens() -> None:
    check(Case(2**20, 64, 6, num_replicas=3, ep_rank=7, options="bmru"), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("options", ["bs", "bimrsu"])
def test_same_bytes_every_time(options: str) -> None:
    kwargs = Case(3000, 256, 8, kind="ties", options=options).make("cuda")
    assert_repeats(lambda: moe_topk_gate_forward(**kwargs))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [each for each in KINDS if each not in FINITE_KINDS])
def test_logits_that_are_no_finite_numbers(kind: str) -> None:
    """The choice is the reference's, whatever became of the weights."""
    kwargs = Case(200, 72, 9, kind, options="b").make("cuda")
    expected = moe_topk_gate_forward_ref(**kwargs)
    topk_idx, topk_weights = moe_topk_gate_forward(**kwargs)
    assert_equal(topk_idx, expected[0])
    torch.testing.assert_close(topk_weights, expected[1], equal_nan=True, **WEIGHT_TOLERANCE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bias_of_minus_infinity_puts_experts_last(device: str) -> None:
    kwargs = Case(20, 64, 8, options="bu").make(device)
    kwargs["bias"][10:] = -torch.inf
    topk_idx, _ = moe_topk_gate_forward(**kwargs)
    assert (topk_idx < 10).all()
    kwargs["bias"][3:] = -torch.inf
    topk_idx, _ = moe_topk_gate_forward(**kwargs)
    assert_equal(topk_idx[:, 3:].contiguous(), torch.arange(3, 8, device=device).expand(20, 5).contiguous())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_alias_and_mask_of_any_shape(device: str) -> None:
    kwargs = Case(12, 64, 4, options="mb").make(device)
    expected = moe_topk_gate_forward(**kwargs)
    for result, other in zip(moe_topk_gate(**kwargs | {"mask": kwargs["mask"].view(3, 4)}), expected, strict=True):
        assert_equal(result, other)


@pytest.mark.gpu
def test_values_out_of_range_are_skipped_on_a_gpu() -> None:
    kwargs = Case(40, 64, 4, num_replicas=2, options="f").make("cuda")
    kwargs["fix_routing_mask"][:] = True
    kwargs["unmapped_topk_idx"][::2, 1] = -1
    kwargs["unmapped_topk_idx"][::3, 2] = 64
    kwargs["unmapped_topk_idx"][0] = -(2**40)
    kwargs["logical_count"][::3] = 0
    kwargs["logical_count"][1::3] = 1000
    expected = moe_topk_gate_forward_ref(**kwargs)
    for result, other in zip(moe_topk_gate_forward(**kwargs), expected, strict=True):
        assert_equal(result, other)
    assert (expected[0][0] == -1).all()
    assert (expected[1][0] == 0).all()


BACKWARD_SIZES = [
    (1, 1, 1),
    (7, 3, 3),
    (33, 16, 4),
    (96, 72, 6),
    (60, 256, 8),
    (60, 257, 32),
    (12, 1000, 10),
    (12, 1024, 32),
]


@pytest.mark.parametrize("num_seqs", [0, 1, 3])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("size", BACKWARD_SIZES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_backward(size: tuple[int, int, int], missing: bool, num_seqs: int, device: str) -> None:
    num_seqs = num_seqs if num_seqs == 0 or size[0] % num_seqs == 0 else 1
    kwargs = make_backward(*size, device, num_seqs, missing)
    # A token of no score has no shares to differentiate; the definition divides by zero there.
    kwargs["scores"].clamp_(min=1e-3)
    expected = moe_topk_gate_backward_ref(**kwargs)
    assert_equal(moe_topk_gate_backward(**kwargs), expected)
    out = torch.full_like(expected, -5.0)
    assert moe_topk_gate_backward(**kwargs, out=out) is out
    assert_equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_seqs", [0, 3])
@pytest.mark.parametrize(("num_experts", "num_topk"), MODELS)
@pytest.mark.parametrize("num_tokens", [0, 3, 8001])
def test_backward_at_sizes_of_models(num_tokens: int, num_experts: int, num_topk: int, num_seqs: int) -> None:
    kwargs = make_backward(num_tokens, num_experts, num_topk, "cuda", num_seqs)
    assert_equal(moe_topk_gate_backward(**kwargs), moe_topk_gate_backward_ref(**kwargs))


@pytest.mark.gpu
def test_backward_of_duplicates_and_experts_that_do_not_exist() -> None:
    kwargs = make_backward(100, 64, 8, "cuda")
    kwargs["topk_idx"][::2, 3:6] = 5
    kwargs["topk_idx"][::3] = 9
    kwargs["topk_idx"][1::5, 0] = 64
    kwargs["topk_idx"][1::7, 1] = -(2**40)
    expected = moe_topk_gate_backward_ref(**kwargs)
    assert_equal(moe_topk_gate_backward(**kwargs), expected)
    assert_repeats(lambda: moe_topk_gate_backward(**kwargs))


@pytest.mark.gpu
def test_backward_of_many_tokens() -> None:
    kwargs = make_backward(2**20, 64, 6, "cuda", num_seqs=4)
    assert_equal(moe_topk_gate_backward(**kwargs), moe_topk_gate_backward_ref(**kwargs))


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def test_values_out_of_range_are_refused_on_a_cpu() -> None:
    kwargs = Case(4, 64, 4, num_replicas=3, options="fmr").make("cpu")
    kwargs["fix_routing_mask"][:] = True
    kwargs["mask"][:] = torch.tensor([True, False, True, True])
    kwargs["force_random"][:] = torch.tensor([False, False, True, False])
    kwargs["unmapped_topk_idx"][1:3] = 99  # rows that are not read
    moe_topk_gate_forward(**kwargs)
    kwargs["unmapped_topk_idx"][3, 2] = -1
    with pytest.raises(ArgumentError, match=r"unmapped_topk_idx must hold experts from 0 to 63 .*, got -1"):
        moe_topk_gate_forward(**kwargs)
    kwargs["logical_count"][5] = 0
    with pytest.raises(ArgumentError, match=r"logical_count must hold numbers from 1 to 3, .*, got 0"):
        moe_topk_gate_forward(**kwargs)
    backward = make_backward(4, 64, 4, "cpu")
    backward["topk_idx"][1, 1] = 64
    with pytest.raises(ArgumentError, match="topk_idx must hold -1 or experts from 0 to 63, got 64"):
        moe_topk_gate_backward(**backward)


def make_call(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return Case(4, 64, 4, num_replicas=3, options="mbifrs").make(device)


def make_backward_call(device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    return make_backward(4, 64, 4, device, num_seqs=2)


def forward_refusals() -> Iterator[Refusal]:
    def refusal(label: str, changes: dict[str, Any], text: str) -> Refusal:
        return Refusal(label, lambda device: make_call(device) | changes, text)

    for value in (0, 33, -1):
        yield refusal(f"top {value}", {"num_topk": value}, rf"num_topk must be between 1 and 32, got {value}")
    yield refusal("top '4'", {"num_topk": "4"}, r"num_topk must be an int, got str")
    yield refusal("scoring softmax", {"scoring_func": "softmax"}, r"scoring_func must be sqrtsoftplus, got softmax")
    yield refusal("scoring None", {"scoring_func": None}, r"scoring_func must be a str, got NoneType")
    for value in (0, 3):
        changes = {"use_shared_as_routed": True, "num_shared_experts": value}
        yield refusal(f"{value} shared", changes, rf"num_shared_experts must be 1 or 2, got {value}")
    for pair in (("to_physical_map", "logical_count"), ("image_bias", "image_token_mask")):
        for argument, other in (pair, pair[::-1]):
            yield refusal(
                f"{other} alone", {argument: None}, rf"{argument} must be given together with {other}, got None"
            )
    yield refusal("fixed from nowhere", {"unmapped_topk_idx": None}, r"unmapped_topk_idx must be given .*, got None")
    yield refusal(
        "top 3 into 4 columns",
        {"num_topk": 3},
        r"num_unmapped == num_topk is required, got num_unmapped = 4, num_topk = 3",
    )
    yield refusal("out no pair", {"out": 1}, r"out must be a pair of tensors, got int")
    yield Refusal(
        "out of another shape",
        lambda device: (
            make_call(device)
            | {"out": (torch.zeros((4, 5), dtype=torch.int64, device=device), torch.zeros((4, 4), device=device))}
        ),
        r"out\[0\] must have shape \(4, 4\), got \(4, 5\)",
    )
    for num_experts in (66, 1028):
        yield Refusal(
            f"{num_experts} experts",
            lambda device, num_experts=num_experts: Case(4, num_experts, 4).make(device),
            r"logits must have (a multiple of 4|at most 1024) experts, got .*",
        )
    for argument in ("mask", "image_token_mask", "force_random"):
        yield Refusal(
            f"{argument} of another length",
            lambda device, argument=argument: (
                make_call(device) | {argument: torch.ones(5, dtype=torch.bool, device=device)}
            ),
            rf"{argument} must have shape .*, got .*",
        )


def backward_refusals() -> Iterator[Refusal]:
    def refusal(label: str, changes: dict[str, Any], text: str) -> Refusal:
        return Refusal(label, lambda device: make_backward_call(device) | changes, text)

    yield refusal("scoring sigmoid", {"scoring_func": "sigmoid"}, r"scoring_func must be sqrtsoftplus, got sigmoid")
    for argument, other in (("mask", "grad_scores_sum"), ("grad_scores_sum", "mask")):
        yield refusal(f"{other} alone", {argument: None}, rf"{argument} must be given together with {other}, got None")
    yield Refusal(
        "3 sequences of 4 tokens",
        lambda device: make_backward_call(device) | {"grad_scores_sum": torch.zeros((3, 64), device=device)},
        r"(.*num_seqs.*|grad_scores_sum must have rows that divide 4 tokens, got 3)",
    )
    yield Refusal(
        "1025 experts",
        lambda device: make_backward(4, 1025, 4, device),
        r"(.*num_experts <= 1024 .*|scores must have at most 1024 experts, got 1025)",
    )
    yield Refusal(
        "weights of another shape",
        lambda device: make_backward_call(device) | {"topk_weights": torch.zeros((4, 5), device=device)},
        r"topk_weights must have shape .*, got .*",
    )


REFUSALS = [
    *tensor_refusals("logits", torch.float32, (4, 64), make_call),
    *tensor_refusals("bias", torch.float32, (64,), make_call),
    *tensor_refusals("image_token_mask", torch.bool, (4,), make_call),
    *tensor_refusals("to_physical_map", torch.int32, (64, 3), make_call),
    *tensor_refusals("unmapped_topk_idx", torch.int64, (4, 4), make_call),
    *tensor_refusals("scores", torch.float32, (4, 64), make_call),
    *forward_refusals(),
]
BACKWARD_REFUSALS = [
    *tensor_refusals("scores", torch.float32, (4, 64), make_backward_call),
    *tensor_refusals("topk_idx", torch.int64, (4, 4), make_backward_call),
    *tensor_refusals("grad_topk_weights", torch.float32, (4, 4), make_backward_call),
    *tensor_refusals("grad_scores_sum", torch.float32, (2, 64), make_backward_call),
    *backward_refusals(),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_forward_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, moe_topk_gate_forward, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_forward_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, moe_topk_gate_forward, "cuda")


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", BACKWARD_REFUSALS, ids=lambda refusal: refusal.id)
def test_backward_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(BACKWARD_NAME, moe_topk_gate_backward, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", BACKWARD_REFUSALS, ids=lambda refusal: refusal.id)
def test_backward_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(BACKWARD_NAME, moe_topk_gate_backward, "cuda")
