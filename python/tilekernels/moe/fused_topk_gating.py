"""The router of a mixture of experts in one call: projection, scores, choice and weights."""

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..errors import argument_error, argument_type_error, check_int, shape_of
from ..testing.cases import BenchCase
from ._gate import EPSILON, MAX_TOPK, butterfly_sum, check_topk, sigmoid, softmax, sqrt_softplus
from .scoring import ScoringFunc
from .topk_gate import topk_gate_ref

_NAME = "moe.fused_topk_gating"
_NUM_TOKENS = size_of(0, 0)
_MAX_EXPERTS = 512  # a block holds the logits of a tile of tokens for all of them


def fused_topk_gating(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    num_topk: int,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    *,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_weights, topk_idx): each token's num_topk experts, best first, without writing its logits to memory.

    hidden_states: (num_tokens, hidden) and gate_weight: (num_experts, hidden), both bf16, on 16 bytes, rows a
    multiple of 8 elements apart; hidden at least 1, at most 512 experts and 32 choices. A logit is their dot product,
    summed in fp32 over all of hidden in an order that is fixed for a shape. scoring: sigmoid, sqrtsoftplus, softmax or
    identity. Experts rank by score + bias (fp32 (num_experts,), dense), softmax by logit + bias; ties go to the smaller
    index, NaN ranks below -inf. A weight is the expert's score without the bias, with renormalize over the sum of the
    chosen scores + 1e-20 (pairs at distance 16, 8, 4, 2, 1 first, 1e-20 last), times routed_scaling_factor.

    Returns fp32 and int64 (num_tokens, num_topk). On GPUs of compute capability 9.0.
    """
    number = _find_scoring(scoring)
    check_int(_NAME, "num_topk", num_topk, 1, MAX_TOPK)
    if not isinstance(renormalize, bool):
        raise argument_type_error(_NAME, "renormalize", "be a bool", type(renormalize).__name__)
    num_experts = shape_of(_NAME, "gate_weight", gate_weight, 2)[0]
    if num_experts > _MAX_EXPERTS:
        raise argument_error(_NAME, "gate_weight", f"have at most {_MAX_EXPERTS} rows", num_experts)
    check_topk(_NAME, num_topk, num_experts, 0)
    asked = (torch.float32, 0, _NUM_TOKENS, num_topk), (torch.int64, 0, _NUM_TOKENS, num_topk)
    return _fused_topk_gating(hidden_states, gate_weight, bias, *asked, number, renormalize, routed_scaling_factor)


def fused_topk_gating_ref(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    num_topk: int,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    *,
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_topk_gating` in plain torch, without checks; the product must not be computed in TF32."""
    logits = hidden_states.float() @ gate_weight.float().t()
    function = ScoringFunc.from_str(scoring)
    scores = _SCORES[function](logits)
    ranks = logits if function == ScoringFunc.SOFTMAX else scores
    topk_idx = topk_gate_ref(ranks if bias is None else ranks + bias, num_topk)
    topk_weights = scores.gather(1, topk_idx)
    if renormalize:
        topk_weights = topk_weights / (butterfly_sum(topk_weights) + EPSILON)
    return topk_weights * routed_scaling_factor, topk_idx


_SCORES = {
    ScoringFunc.SIGMOID: sigmoid,
    ScoringFunc.SQRTSOFTPLUS: sqrt_softplus,
    ScoringFunc.SOFTMAX: softmax,
    ScoringFunc.IDENTITY: lambda logits: logits,
}


# torch.compile follows a dict of numbers, no walk over an enum
_NUMBERS = {str(function): int(function) for function in ScoringFunc}


def _find_scoring(scoring: Any) -> int:
    if not isinstance(scoring, str):
        raise argument_type_error(_NAME, "scoring", "be a str", type(scoring).__name__)
    number = _NUMBERS.get(scoring.lower())
    if number is None:
        raise argument_error(_NAME, "scoring", f"be one of {', '.join(_NUMBERS)}", scoring)
    return number


def _fused_topk_gating_cpu(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_idx: torch.Tensor,
    scoring: int,
    renormalize: bool,
    routed_scaling_factor: float,
) -> None:
    weights, indices = fused_topk_gating_ref(
        hidden_states,
        gate_weight,
        topk_idx.shape[1],
        str(ScoringFunc(scoring)),
        bias,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
    )
    topk_weights.copy_(weights)
    topk_idx.copy_(indices)


_fused_topk_gating = kernel("moe.fused_topk_gating", cpu=_fused_topk_gating_cpu)


def bench_cases() -> list[BenchCase]:
    """A small call, then routers of open models: (tokens, hidden, experts, choices)."""
    sizes = [(64, 512, 64, 6), (16, 7168, 256, 8), (4096, 2048, 64, 6), (4096, 4096, 128, 8), (4096, 7168, 256, 8)]
    return [_case(*each) for each in [*sizes, (4096, 7168, 512, 10)]]


def tuning_cases() -> list[BenchCase]:
    """256 experts, from a few tokens to many waves of blocks."""
    return [_case(num_tokens, 7168, 256, 8) for num_tokens in (16, 128, 1024, 2048, 4096, 8192, 16384)]


def _case(num_tokens: int, hidden: int, num_experts: int, num_topk: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        # Small integers: logits are exact, so that the choice does not depend on the order of the sum
        draw = torch.randint(-4, 5, (num_tokens + num_experts, hidden), device=device).bfloat16()
        return {"hidden_states": draw[:num_tokens], "gate_weight": draw[num_tokens:], "num_topk": num_topk}

    params = {"num_tokens": num_tokens, "hidden": hidden, "num_experts": num_experts, "num_topk": num_topk}
    num_bytes = 2 * (num_tokens + num_experts) * hidden + 12 * num_tokens * num_topk
    return BenchCase("moe.fused_topk_gating", params, make, num_bytes)
