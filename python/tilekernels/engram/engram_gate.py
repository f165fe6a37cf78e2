"""The gate between residual streams and looked-up values, forward and backward."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from .._dispatch import kernel
from .._outputs import empty_batch, size_of
from ..config import num_sms_for
from ..errors import argument_error, argument_type_error, shape_of
from ..testing.cases import BenchCase
from ._checks import GATE_LEAST_HIDDEN, check_hidden
from ._reference import gate_gradients, gate_of_rows

_FORWARD, _BACKWARD = "engram.engram_gate_fwd", "engram.engram_gate_bwd"

_STREAMS = 4  # of the backward pass

# Up to that many columns the backward pass leaves this many parts of grad_w for four multiprocessors, beyond that one:
# as many as each has blocks if they take one of four streams, four if they take whole tokens.
_PARTS = [(3072, 2), (4096, 4)]

# Sums differ in order, which turns the rounding of a few bf16 numbers in a million
_MAX_DIFF = 1e-8

KV: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
Saved: TypeAlias = "torch.Tensor | None"

# Outputs as the extension is asked for them, by argument 0, which both passes have like hidden_states
_SAVED = (torch.float32, 0, size_of(0, 0), size_of(0, 1))
_OUTPUT = (torch.bfloat16, 0, size_of(0, 0), size_of(0, 1), size_of(0, 2))
_GRAD_V = (torch.bfloat16, 0, size_of(0, 0), size_of(0, 2))


def engram_gate_fwd(
    hidden_states: torch.Tensor,
    kv: KV,
    weight_fused: torch.Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: torch.Tensor | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, Saved, Saved, Saved, Saved]:
    """Adds looked-up values to each residual stream, as much as its gate lets through.

    hidden_states x: (num_tokens, num_streams, hidden) bf16, dense, hidden % 256 == 0 and at least 512. kv: (num_tokens,
    num_streams + 1, hidden) bf16, a key for each stream and then the value of all; or a pair (k, v) of (num_tokens,
    num_streams, hidden) and (num_tokens, hidden); strides are free but for the last. weight_fused w: (num_streams,
    hidden) fp32, from `fused_weight`. image_token_mask: (num_tokens,) bool or None.

    In fp32, for each token and stream: dot = sum of x * w * k; rstd = 1 / sqrt(mean of squares + eps) of x and of k;
    p = dot * rstd_x * rstd_k / sqrt(hidden); gate = sigmoid(sqrt(max(|p|, clamp_value)) with the sign of p);
    output = x + gate * v. Rows of image tokens are x.

    Returns (output, dot, gate_score, rstd_x, rstd_k); the last four are fp32 (num_tokens, num_streams), unwritten for
    image tokens, or None without save_for_backward. The output is the same bytes with and without. inplace: output is
    hidden_states; only without save_for_backward.
    """
    if inplace and save_for_backward:
        raise argument_error(_FORWARD, "inplace", "be False where save_for_backward is True", inplace)
    shape_of(_FORWARD, "hidden_states", hidden_states, 3)
    check_hidden(_FORWARD, "hidden_states", hidden_states, 3, GATE_LEAST_HIDDEN)
    given = hidden_states, *_split(_FORWARD, "kv", kv, hidden_states), weight_fused, image_token_mask
    scalars = eps, clamp_value, num_sms_for(hidden_states.device)
    if save_for_backward:
        return _engram_gate_fwd(*given, _OUTPUT, _SAVED, _SAVED, _SAVED, _SAVED, *scalars)
    made = _engram_gate_fwd(*given, hidden_states if inplace else _OUTPUT, None, None, None, None, *scalars)
    return (hidden_states if inplace else made), None, None, None, None


def engram_gate_fwd_ref(
    hidden_states: torch.Tensor,
    kv: KV,
    weight_fused: torch.Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: torch.Tensor | None = None,
    inplace: bool = False,
) -> tuple[torch.Tensor, Saved, Saved, Saved, Saved]:
    """`engram_gate_fwd` in plain torch; what is saved of image tokens is that of others."""
    k, v = _split(_FORWARD, "kv", kv, hidden_states)
    rows = hidden_states.float(), k.float(), v.float(), weight_fused
    output, dot, gate, rstd_x, rstd_k = gate_of_rows(*rows, eps, clamp_value)
    result = output.bfloat16()
    if image_token_mask is not None:
        result = torch.where(image_token_mask[:, None, None], hidden_states, result)
    if inplace:
        result = hidden_states.copy_(result)
    return (result, dot, gate, rstd_x, rstd_k) if save_for_backward else (result, None, None, None, None)


def engram_gate_bwd(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    kv: KV,
    weight_fused: torch.Tensor,
    dot: torch.Tensor,
    gate_score: torch.Tensor,
    rstd_x: torch.Tensor,
    rstd_k: torch.Tensor,
    clamp_value: float,
    image_token_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, KV, torch.Tensor]:
    """The gradients of `engram_gate_fwd` with four streams.

    grad_out: like hidden_states; the other arguments as there, and as it saved them. Returns (grad_hidden_states,
    grad_kv, grad_w_partial): bf16, dense, grad_kv as kv is, one tensor or a pair; and fp32 (num_parts, 4, hidden),
    whose sum over the first dimension is the gradient of weight_fused (`grad_w_reduce` takes it as it is). num_parts
    depends on hidden and on `config.get_num_sms`; so do the last bits of that sum, and nothing else does.

    In fp32, for each token and stream, g = grad_out: r = 0 where |p| < clamp_value, else (sum of g * v) * gate *
    (1 - gate) / 2 * sqrt(rstd_x * rstd_k / sqrt(hidden) / |dot|); grad x = g + r * (k * w - x * dot * rstd_x^2 /
    hidden); grad k = r * (x * w - k * dot * rstd_k^2 / hidden); grad w = the sum over tokens of r * x * k; grad v = the
    sum over streams of g * gate. Image tokens pass grad_out on; their other gradients are zero.
    """
    check_hidden(_BACKWARD, "grad_out", grad_out, 3, GATE_LEAST_HIDDEN)
    k, v = _split(_BACKWARD, "kv", kv, hidden_states)
    given = grad_out, hidden_states, k, v, weight_fused, dot, gate_score, rstd_x, rstd_k, image_token_mask
    num_tokens, num_streams, hidden = shape_of(_BACKWARD, "hidden_states", hidden_states, 3)
    grad_w = (torch.float32, 0, _num_parts(hidden, hidden_states.device), num_streams, hidden)
    if isinstance(kv, tuple):
        grad_x, grad_k, grad_v, grad_w_partial = _engram_gate_bwd(
            *given, _OUTPUT, _OUTPUT, _GRAD_V, grad_w, clamp_value
        )
        return grad_x, (grad_k, grad_v), grad_w_partial
    grad_kv = empty_batch(num_tokens, num_streams + 1, hidden, torch.bfloat16, kv.device)
    grad_x, grad_w_partial = _engram_gate_bwd(*given, _OUTPUT, grad_kv[:, :-1], grad_kv[:, -1], grad_w, clamp_value)
    return grad_x, grad_kv, grad_w_partial


def engram_gate_bwd_ref(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    kv: KV,
    weight_fused: torch.Tensor,
    dot: torch.Tensor,
    gate_score: torch.Tensor,
    rstd_x: torch.Tensor,
    rstd_k: torch.Tensor,
    clamp_value: float,
    image_token_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, KV, torch.Tensor]:
    """`engram_gate_bwd` in plain torch."""
    k, v = _split(_BACKWARD, "kv", kv, hidden_states)
    rows = grad_out.float(), hidden_states.float(), k.float(), v.float(), weight_fused
    saved = dot, gate_score, rstd_x, rstd_k
    num_parts = _num_parts(hidden_states.shape[2], hidden_states.device)
    grad_x, grad_k, grad_v, grad_w = gate_gradients(*rows, *saved, clamp_value, image_token_mask, num_parts)
    if isinstance(kv, tuple):
        return grad_x.bfloat16(), (grad_k.bfloat16(), grad_v.bfloat16()), grad_w
    return grad_x.bfloat16(), torch.cat([grad_k, grad_v[:, None]], dim=1).bfloat16(), grad_w


def _split(operator: str, name: str, kv: Any, hidden_states: Any) -> tuple[Any, Any]:
    """(k, v), whichever way they came; their shapes are left to the kernel's check where it can name them."""
    if isinstance(kv, tuple):
        if len(kv) != 2:
            raise argument_type_error(operator, name, "be a tensor or a pair (k, v)", f"{len(kv)} of them")
        return kv
    if not isinstance(kv, torch.Tensor):
        raise argument_type_error(operator, name, "be a tensor or a pair (k, v)", type(kv).__name__)
    if kv.dim() != 3:
        raise argument_error(operator, name, "have 3 dimensions", kv.dim())
    if isinstance(hidden_states, torch.Tensor) and hidden_states.dim() == 3:
        num_tokens, num_streams, hidden = hidden_states.shape
        wanted = (num_tokens, num_streams + 1, hidden)
        if tuple(kv.shape) != wanted:
            raise argument_error(operator, name, f"have shape {wanted}", tuple(kv.shape))
    return kv[:, :-1], kv[:, -1]


def _num_parts(hidden: int, device: torch.device) -> int:
    parts = next((parts for limit, parts in _PARTS if hidden <= limit), 1)
    return max(num_sms_for(device) * parts // 4, 1)


def _engram_gate_fwd_cpu(
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_fused: torch.Tensor,
    image_token_mask: torch.Tensor | None,
    out: torch.Tensor,
    dot: Saved,
    gate_score: Saved,
    rstd_x: Saved,
    rstd_k: Saved,
    eps: float,
    clamp_value: float,
    num_sms: int,
) -> None:
    arguments = (k, v), weight_fused, eps, clamp_value, True, image_token_mask
    output, *computed = engram_gate_fwd_ref(hidden_states, *arguments)
    out.copy_(output)
    for target, value in zip((dot, gate_score, rstd_x, rstd_k), computed, strict=True):
        if target is not None and value is not None:
            keep = slice(None) if image_token_mask is None else ~image_token_mask
            target[keep] = value[keep]


def _engram_gate_bwd_cpu(
    grad_out: torch.Tensor,
    hidden_states: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weight_fused: torch.Tensor,
    dot: torch.Tensor,
    gate_score: torch.Tensor,
    rstd_x: torch.Tensor,
    rstd_k: torch.Tensor,
    image_token_mask: torch.Tensor | None,
    grad_hidden_states: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    grad_w_partial: torch.Tensor,
    clamp_value: float,
) -> None:
    rows = grad_out.float(), hidden_states.float(), k.float(), v.float(), weight_fused
    saved = dot, gate_score, rstd_x, rstd_k
    gradients = gate_gradients(*rows, *saved, clamp_value, image_token_mask, grad_w_partial.shape[0])
    for target, gradient in zip((grad_hidden_states, grad_k, grad_v, grad_w_partial), gradients, strict=True):
        target.copy_(gradient)


_engram_gate_fwd = kernel(_FORWARD, cpu=_engram_gate_fwd_cpu)
_engram_gate_bwd = kernel(_BACKWARD, cpu=_engram_gate_bwd_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens, then the published benchmark's sizes; keys and values in one tensor, and apart."""
    cases = [_forward_case(16, 512, False), _forward_case(8, 4096, True), _backward_case(16, 512)]
    for hidden in (2560, 4096, 7168):
        for save in (False, True):
            cases.append(_forward_case(8001, hidden, save))
        cases.append(_backward_case(8001, hidden))
    cases += [_forward_case(8001, 7168, True, is_pair=True), _backward_case(8001, 7168, is_pair=True)]
    return cases


def _make_kv(num_tokens: int, hidden: int, is_pair: bool, device: Any) -> KV:
    kv = torch.randn((num_tokens, _STREAMS + 1, hidden), device=device).bfloat16()
    return (kv[:, :-1].contiguous(), kv[:, -1].contiguous()) if is_pair else kv


def _forward_case(num_tokens: int, hidden: int, save: bool, is_pair: bool = False) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {
            "hidden_states": torch.randn((num_tokens, _STREAMS, hidden), device=device).bfloat16(),
            "kv": _make_kv(num_tokens, hidden, is_pair, device),
            "weight_fused": torch.randn((_STREAMS, hidden), device=device),
            "eps": 1e-20,
            "clamp_value": 1e-6,
            "save_for_backward": save,
        }

    num_bytes = 2 * num_tokens * hidden * (3 * _STREAMS + 1) + 4 * _STREAMS * hidden + 16 * num_tokens * _STREAMS * save
    params = {"num_tokens": num_tokens, "hidden": hidden, "save": save, "kv": "pair" if is_pair else "one"}
    return BenchCase(_FORWARD, params, make, num_bytes, _MAX_DIFF)


def _backward_case(num_tokens: int, hidden: int, is_pair: bool = False) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        inputs = _forward_case(num_tokens, hidden, True, is_pair).make(device)
        _, dot, gate_score, rstd_x, rstd_k = engram_gate_fwd_ref(**inputs)
        return {
            "grad_out": torch.randn((num_tokens, _STREAMS, hidden), device=device).bfloat16(),
            **{name: inputs[name] for name in ("hidden_states", "kv", "weight_fused", "clamp_value")},
            "dot": dot,
            "gate_score": gate_score,
            "rstd_x": rstd_x,
            "rstd_k": rstd_k,
        }

    # The parts of the gradient of weight_fused count once
    num_bytes = 2 * num_tokens * hidden * (5 * _STREAMS + 2) + 16 * num_tokens * _STREAMS + 8 * _STREAMS * hidden
    params = {"num_tokens": num_tokens, "hidden": hidden, "kv": "pair" if is_pair else "one"}
    return BenchCase(_BACKWARD, params, make, num_bytes, _MAX_DIFF)
