"""fused_topk_gating: the projection's sum, then scores, choice and weights as the other gates have them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.moe.gates import assert_repeats, rank
from tests.refusals import Refusal
from tilekernels.moe import fused_topk_gating
from tilekernels.moe.fused_topk_gating import fused_topk_gating_ref
from tilekernels.testing import assert_equal

NAME = "moe.fused_topk_gating"
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus", "identity")

# Of logits of unit variance summed in another order, by tensor cores that cut off digits
LOGIT_TOLERANCE = 1e-4
# Of the weights made of such logits
WEIGHT_TOLERANCE = {"rtol": 5e-3, "atol": 1e-5}


@dataclass(frozen=True)
class Case:
    num_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    scoring: str = "softmax"
    has_bias: bool = False
    renormalize: bool = True
    apart: bool = False  # rows lie apart

    @property
    def id(self) -> str:
        flags = f"{'-bias' * self.has_bias}{'' if self.renormalize else '-raw'}{'-apart' * self.apart}"
        return f"{self.num_tokens}x{self.hidden}-top{self.num_topk}of{self.num_experts}-{self.scoring}{flags}"

    def make(self, device: str, exact: bool) -> dict[str, Any]:
        """exact: sparse small integers and powers of two, whose sums are exact in any order, and tied often."""

        def matrix(rows: int) -> torch.Tensor:
            shape = (rows, self.hidden + 16 * self.apart)
            if exact:
                values = torch.randint(-3, 4, shape, device=device) * (torch.rand(shape, device=device) < 0.1)
                values = values.bfloat16()
            else:
                values = torch.randn(shape, device=device).bfloat16()
            return values[:, 8 : 8 + self.hidden] if self.apart else values

        bias = torch.randint(-8, 9, (self.num_experts,), device=device) / 4 if self.has_bias else None
        return {
            "hidden_states": matrix(self.num_tokens),
            # Logits of unit variance, where no score saturates, unless sums have to be exact
            "gate_weight": matrix(self.num_experts) / (16 if exact else self.hidden**0.5),
            "num_topk": self.num_topk,
            "scoring": self.scoring,
            "bias": bias,
            "renormalize": self.renormalize,
            "routed_scaling_factor": 2.5,
        }


def check_exact(case: Case, device: str) -> None:
    kwargs = case.make(device, exact=True)
    if case.num_tokens > 3:
        kwargs["hidden_states"][1] = 0  # all tied
    for result, expected in zip(fused_topk_gating(**kwargs), fused_topk_gating_ref(**kwargs), strict=True):
        assert_equal(result, expected)


def random_cases(count: int) -> Iterator[Case]:
    choose = random.Random(7)
    for at in range(count):
        num_experts = choose.choice((1, 3, 8, 60, 64, 65, 100, 128, 160, 256, 257, 384, 512))
        yield Case(
            num_tokens=choose.choice((0, 1, 2, 31, 64, 127, 129, 300)),
            hidden=choose.choice((8, 64, 136, 512, 2048, 2880)),
            num_experts=num_experts,
            num_topk=min(choose.choice((1, 2, 6, 8, 10, 32)), num_experts),
            scoring=SCORINGS[at % 4],
            has_bias=choose.random() < 0.5,
            renormalize=choose.random() < 0.7,
            apart=choose.random() < 0.3,
        )


CASES = list(random_cases(120))


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.num_tokens * case.hidden < 2**15], ids=lambda c: c.id)
def test_cpu(case: Case) -> None:
    check_exact(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu(case: Case) -> None:
    check_exact(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [960, 961, 1920, 1921, 4224, 4225, 8448, 8449, 17001])
@pytest.mark.parametrize(("num_experts", "num_topk"), [(64, 6), (128, 8), (256, 8), (512, 10)])
def test_every_tile(num_experts: int, num_topk: int, num_tokens: int) -> None:
    """Tokens at the limits of the forms, hidden sizes with and without a share for every block of a cluster."""
    for hidden, scoring in ((64, "softmax"), (200, "sqrtsoftplus"), (1000, "sigmoid")):
        check_exact(Case(num_tokens, hidden, num_experts, num_topk, scoring, has_bias=True), "cuda")


@pytest.mark.parametrize("scoring", SCORINGS)
def test_reference_in_float64_and_by_sorting(scoring: str) -> None:
    """The steps written again: dot products and scores in float64, ranks by sorting in Python."""
    # Identity's weights may be of either sign, and their sum next to nothing
    kwargs = Case(12, 64, 40, 5, scoring, has_bias=True, renormalize=scoring != "identity").make("cpu", exact=True)
    weights, indices = fused_topk_gating_ref(**kwargs)
    logits = kwargs["hidden_states"].double() @ kwargs["gate_weight"].double().t()
    scores = {
        "softmax": logits.softmax(-1),
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": torch.nn.functional.softplus(logits).sqrt(),
        "identity": logits,
    }[scoring]
    ranks = (logits if scoring == "softmax" else scores).float() + kwargs["bias"]
    assert indices.tolist() == [rank(row, 5) for row in ranks.tolist()]
    chosen = scores.gather(1, indices)
    expected = 2.5 * (chosen if scoring == "identity" else chosen / chosen.sum(-1, keepdim=True))
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(
    ("num_tokens", "hidden", "num_experts", "num_topk"),
    [(4096, 7168, 256, 8), (1000, 2048, 64, 6), (77, 4096, 128, 8), (513, 7168, 512, 10), (1, 7168, 256, 8)],
)
def test_routers_of_open_models(num_tokens: int, hidden: int, num_experts: int, num_topk: int, scoring: str) -> None:
    """Normal numbers: no expert beats a chosen one by more than the sum's rounding, and weights are of the choice."""
    kwargs = Case(num_tokens, hidden, num_experts, num_topk, scoring).make("cuda", exact=False)
    weights, indices = fused_topk_gating(**kwargs)
    logits = (kwargs["hidden_states"].double() @ kwargs["gate_weight"].double().t()).float()
    chosen = logits.gather(1, indices)
    assert (indices.sort(dim=1).values.diff(dim=1) > 0).all()
    assert (chosen.diff(dim=1) <= LOGIT_TOLERANCE).all()
    beaten = logits.scatter(1, indices, -torch.inf).amax(dim=1)
    assert (beaten <= chosen[:, -1] + LOGIT_TOLERANCE).all()
    scores = {
        "softmax": logits.softmax(-1),
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": torch.nn.functional.softplus(logits).sqrt(),
        "identity": logits,
    }[scoring].gather(1, indices)
    expected = scores / scores.sum(-1, keepdim=True) * 2.5
    torch.testing.assert_close(weights, expected, **WEIGHT_TOLERANCE)


@pytest.mark.gpu
def test_nan_and_infinite_logits_rank_as_in_the_other_gates() -> None:
    hidden_states = torch.zeros((130, 64), device="cuda").bfloat16()
    hidden_states[:, 0] = 1
    gate_weight = torch.zeros((70, 64), device="cuda").bfloat16()
    gate_weight[:, 0] = torch.arange(70, device="cuda") % 7
    gate_weight[3, 0], gate_weight[9, 0], gate_weight[11, 0] = torch.nan, torch.inf, -torch.inf
    kwargs = {"hidden_states": hidden_states, "gate_weight": gate_weight, "num_topk": 32, "scoring": "sigmoid"}
    for result, expected in zip(fused_topk_gating(**kwargs), fused_topk_gating_ref(**kwargs), strict=True):
        assert_equal(result, expected)


@pytest.mark.gpu
def test_same_bytes_in_each_call() -> None:
    kwargs = Case(700, 7168, 256, 8, has_bias=True).make("cuda", exact=False)
    assert_repeats(lambda: fused_topk_gating(**kwargs), times=30)


@pytest.mark.gpu
def test_more_than_two_to_the_31_hidden_states() -> None:
    num_tokens, hidden = 2**31 // 4096 + 99, 4096
    if 4 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    hidden_states = torch.zeros((num_tokens, hidden), device="cuda", dtype=torch.bfloat16)
    hidden_states[:, :64] = torch.randint(-3, 4, (num_tokens, 64), device="cuda").bfloat16()
    gate_weight = torch.randint(-3, 4, (64, hidden), device="cuda").bfloat16()
    results = fused_topk_gating(hidden_states, gate_weight, 6)
    for start in (0, num_tokens // 2, num_tokens - 200):
        part = slice(start, start + 200)
        for result, expected in zip(results, fused_topk_gating_ref(hidden_states[part], gate_weight, 6), strict=True):
            assert_equal(result[part], expected)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals() -> Iterator[Refusal]:
    def zeros(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.zeros(shape, device=device).to(dtype)

    def refusal(label: str, text: str, **changes: Any) -> Refusal:
        def make(device: str) -> dict[str, Any]:
            kwargs = {"hidden_states": zeros(device, 4, 64), "gate_weight": zeros(device, 16, 64), "num_topk": 2}
            return kwargs | {name: value(device) if callable(value) else value for name, value in changes.items()}

        return Refusal(label, make, text)

    for argument, rows in (("hidden_states", 4), ("gate_weight", 16)):
        for dtype in (torch.float16, torch.float32):
            name = str(dtype).removeprefix("torch.")
            text = rf"{argument} must be bfloat16, got {name}"
            yield refusal(f"{argument} {name}", text, **{argument: lambda d, r=rows, t=dtype: zeros(d, r, 64, dtype=t)})
        text = rf"{argument} must have 2 dimensions, got 3.*"
        yield refusal(f"{argument} of rank 3", text, **{argument: lambda d, r=rows: zeros(d, 1, r, 64)})
        text = rf"{argument} must have strides .*, got .*"
        yield refusal(f"{argument} of columns apart", text, **{argument: lambda d, r=rows: zeros(d, r, 128)[:, ::2]})
        text = r"\(.*stride \* 2\) % 16 == 0 is required, got .* = 68"
        yield refusal(f"{argument} off 16 bytes", text, **{argument: lambda d, r=rows: zeros(d, r, 68)[:, :64]})
    yield refusal("other hidden", r"gate_weight must have shape .*, got .*", gate_weight=lambda d: zeros(d, 16, 72))
    yield refusal(
        "hidden of 0",
        r"0 < hidden is required, got hidden = 0",
        hidden_states=lambda d: zeros(d, 4, 0),
        gate_weight=lambda d: zeros(d, 16, 0),
    )
    yield refusal(
        "513 experts", r"gate_weight must have at most 512 rows, got 513", gate_weight=lambda d: zeros(d, 513, 64)
    )
    yield refusal("bias bf16", r"bias must be float32, got bfloat16", bias=lambda d: zeros(d, 16))
    yield refusal("bias of 15", r"bias must have shape .*, got .*", bias=lambda d: zeros(d, 15, dtype=torch.float32))
    for num_topk in (0, 33):
        yield refusal(f"num_topk {num_topk}", rf"num_topk must be between 1 and 32, got {num_topk}", num_topk=num_topk)
    yield refusal("num_topk 17", r"num_topk must be at most the number of experts 16, got 17", num_topk=17)
    yield refusal("num_topk True", r"num_topk must be an int, got bool", num_topk=True)
    yield refusal(
        "scoring relu", r"scoring must be one of sigmoid, sqrtsoftplus, softmax, identity, got relu", scoring="relu"
    )
    yield refusal("scoring 2", r"scoring must be a str, got int", scoring=2)
    yield refusal("renormalize 1", r"renormalize must be a bool, got int", renormalize=1)


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, fused_topk_gating, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_gpu(refusal: Refusal) -> None:
    refusal.check(NAME, fused_topk_gating, "cuda")
