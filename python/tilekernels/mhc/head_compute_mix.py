"""The mixes of the last residual streams, a sigmoid each, and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error, check_int
from ..layout import ceildiv
from ..testing.cases import BenchCase
from ._checks import check_tensor, mult_of
from ._reference import scaled, sigmoid_grad

_NAME = "mhc.mhc_head_compute_mix_fwd"
_NAME_BACKWARD = "mhc.mhc_head_compute_mix_bwd"

_TOKEN_BLOCK = 32
_MAX_TOKEN_BLOCK = 1 << 16


def mhc_head_compute_mix_fwd(
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    output_mix: torch.Tensor,
    mhc_pre_eps: float,
    token_block_size: int = 0,
) -> None:
    """Writes sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps to output_mix; every operation rounds by itself.

    input_mix, output_mix: (num_tokens, m) fp32, dense, m 2, 4 or 8. mhc_scale: (1,), mhc_base: (m,) fp32.
    token_block_size has no effect here; backward it is the unit in which tokens are dealt.
    """
    mult = mult_of(_NAME, "input_mix", input_mix, torch.float32, 2, 1)
    check_int(_NAME, "token_block_size", token_block_size, 0, _MAX_TOKEN_BLOCK)
    _mhc_head_compute_mix_fwd(input_mix, mhc_scale, mhc_base, output_mix, mhc_pre_eps, mult)


def mhc_head_compute_mix_bwd(
    output_mix_grad: torch.Tensor,
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    input_mix_grad: torch.Tensor,
    mhc_scale_grad_partial: torch.Tensor,
    mhc_base_grad_partial: torch.Tensor,
    num_sms: int,
    token_block_size: int = 0,
) -> None:
    """Writes the gradients of `mhc_head_compute_mix_fwd`, those of scale and base as partial sums to be added up.

    output_mix_grad, input_mix_grad: like input_mix. mhc_scale_grad_partial: (num_sms, 1), mhc_base_grad_partial:
    (num_sms, m) fp32. Blocks of token_block_size tokens (0: 32) are dealt to the num_sms rows in turn; a row without
    tokens is zero.
    """
    mult = mult_of(_NAME_BACKWARD, "input_mix", input_mix, torch.float32, 2, 1)
    check_int(_NAME_BACKWARD, "num_sms", num_sms, 1)
    check_int(_NAME_BACKWARD, "token_block_size", token_block_size, 0, _MAX_TOKEN_BLOCK)
    check_tensor(_NAME_BACKWARD, "mhc_base_grad_partial", mhc_base_grad_partial, torch.float32, 2)
    if mhc_base_grad_partial.shape[0] != num_sms:
        rows = mhc_base_grad_partial.shape[0]
        raise argument_error(_NAME_BACKWARD, "mhc_base_grad_partial", f"have num_sms = {num_sms} rows", rows)
    inputs = output_mix_grad, input_mix, mhc_scale, mhc_base
    outputs = input_mix_grad, mhc_scale_grad_partial, mhc_base_grad_partial
    _mhc_head_compute_mix_bwd(*inputs, *outputs, token_block_size or _TOKEN_BLOCK, mult)


def mhc_head_compute_mix_fwd_ref(
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    output_mix: torch.Tensor,
    mhc_pre_eps: float,
    token_block_size: int = 0,
) -> None:
    """`mhc_head_compute_mix_fwd` in plain torch."""
    output_mix.copy_(scaled(input_mix, mhc_scale, mhc_base).sigmoid() + mhc_pre_eps)


def mhc_head_compute_mix_bwd_ref(
    output_mix_grad: torch.Tensor,
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    input_mix_grad: torch.Tensor,
    mhc_scale_grad_partial: torch.Tensor,
    mhc_base_grad_partial: torch.Tensor,
    num_sms: int,
    token_block_size: int = 0,
) -> None:
    """`mhc_head_compute_mix_bwd` in plain torch."""
    grad = sigmoid_grad(input_mix, mhc_scale, mhc_base, output_mix_grad)
    input_mix_grad.copy_(grad * mhc_scale)
    mhc_base_grad_partial.copy_(_deal(grad, num_sms, token_block_size or _TOKEN_BLOCK))
    products = (grad * input_mix).sum(1, keepdim=True)
    mhc_scale_grad_partial.copy_(_deal(products, num_sms, token_block_size or _TOKEN_BLOCK))


def _deal(x: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """Sums of blocks of `size` rows of x that are dealt to num_rows rows in turn."""
    num_rounds = ceildiv(x.shape[0], size * num_rows)
    padded = torch.zeros((num_rounds * num_rows * size, x.shape[1]), dtype=x.dtype, device=x.device)
    padded[: x.shape[0]] = x
    return padded.view(num_rounds, num_rows, size, x.shape[1]).sum((0, 2))


def _fwd_cpu(
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    output_mix: torch.Tensor,
    mhc_pre_eps: float,
    mhc_mult: int,
) -> None:
    mhc_head_compute_mix_fwd_ref(input_mix, mhc_scale, mhc_base, output_mix, mhc_pre_eps)


def _bwd_cpu(
    output_mix_grad: torch.Tensor,
    input_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    input_mix_grad: torch.Tensor,
    mhc_scale_grad_partial: torch.Tensor,
    mhc_base_grad_partial: torch.Tensor,
    token_block_size: int,
    mhc_mult: int,
) -> None:
    inputs = output_mix_grad, input_mix, mhc_scale, mhc_base
    outputs = input_mix_grad, mhc_scale_grad_partial, mhc_base_grad_partial
    mhc_head_compute_mix_bwd_ref(*inputs, *outputs, mhc_base_grad_partial.shape[0], token_block_size)


_mhc_head_compute_mix_fwd = kernel(_NAME, cpu=_fwd_cpu)
_mhc_head_compute_mix_bwd = kernel(_NAME_BACKWARD, cpu=_bwd_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens, training batches, and many tokens; of four streams, and of others."""
    sizes = [(7, 4), (4096, 4), (8192, 4), (262144, 4), (8192, 2), (8192, 8)]
    return [make(*size) for make in (_forward_case, _backward_case) for size in sizes]


# Of sums over the tokens in another order
_MAX_DIFF = 1e-10
_NUM_SMS = 132


def _make_inputs(num_tokens: int, mult: int, device: Any) -> dict[str, Any]:
    return {
        "input_mix": torch.randn((num_tokens, mult), device=device),
        "mhc_scale": torch.rand(1, device=device) + 0.5,
        "mhc_base": torch.randn(mult, device=device),
    }


def _forward_case(num_tokens: int, mult: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        output_mix = torch.zeros((num_tokens, mult), device=device)
        return {**_make_inputs(num_tokens, mult, device), "output_mix": output_mix, "mhc_pre_eps": 1e-2}

    return BenchCase(_NAME, {"num_tokens": num_tokens, "mult": mult}, make, 8 * num_tokens * mult)


def _backward_case(num_tokens: int, mult: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        inputs = _make_inputs(num_tokens, mult, device)
        return {
            "output_mix_grad": torch.randn_like(inputs["input_mix"]),
            **inputs,
            "input_mix_grad": torch.zeros_like(inputs["input_mix"]),
            "mhc_scale_grad_partial": torch.zeros((_NUM_SMS, 1), device=device),
            "mhc_base_grad_partial": torch.zeros((_NUM_SMS, mult), device=device),
            "num_sms": _NUM_SMS,
        }

    params = {"num_tokens": num_tokens, "mult": mult}
    return BenchCase(_NAME_BACKWARD, params, make, 12 * num_tokens * mult, _MAX_DIFF)
