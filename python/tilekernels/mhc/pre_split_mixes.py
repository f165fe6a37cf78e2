"""A token's mixes, split into those before a layer, behind it, and between residual streams; and their gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..config import num_sms_for
from ..testing.cases import BenchCase
from ._checks import mult_of_columns
from ._reference import scaled, sigmoid_grad

_NAME = "mhc.mhc_pre_split_mixes_fwd"
_NAME_BACKWARD = "mhc.mhc_pre_split_mixes_bwd"


def mhc_pre_split_mixes_fwd(
    input_mixes: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    pre_layer_mix: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    """Writes the three kinds of mixes: sigmoid(x * scale[0] + base) + mhc_pre_eps to pre_layer_mix,
    sigmoid(x * scale[1] + base) * mhc_post_mult_value to post_layer_mix, x * scale[2] + base to comb_res_mix.

    input_mixes: (num_tokens, m * (m + 2)) fp32, m 2, 4 or 8: m columns before a layer, m behind it, m * m between
    streams. mhc_scale: (3,), mhc_base: (m * (m + 2),) fp32. pre_layer_mix, post_layer_mix: (num_tokens, m) fp32,
    comb_res_mix: (num_tokens, m * m) fp32. All dense. Every operation rounds by itself.
    """
    mult = mult_of_columns(_NAME, "input_mixes", input_mixes)
    outputs = pre_layer_mix, post_layer_mix, comb_res_mix
    _mhc_pre_split_mixes_fwd(input_mixes, mhc_scale, mhc_base, *outputs, mhc_post_mult_value, mhc_pre_eps, mult)


def mhc_pre_split_mixes_bwd(
    pre_layer_mix_grad: torch.Tensor,
    post_layer_mix_grad: torch.Tensor,
    comb_res_mix_grad: torch.Tensor,
    input_mixes: torch.Tensor,
    post_layer_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    input_mixes_grad: torch.Tensor,
    mhc_scale_grad: torch.Tensor,
    mhc_base_grad: torch.Tensor,
    mhc_post_mult_value: float,
) -> None:
    """Writes the gradients of `mhc_pre_split_mixes_fwd`; nothing is added to what they held.

    Shapes as forward; post_layer_mix is what forward wrote. The gradients of mhc_scale and mhc_base are sums over all
    tokens in an order that depends on how many SMs there are (`set_num_sms`), the same each time.
    """
    mult = mult_of_columns(_NAME_BACKWARD, "input_mixes", input_mixes)
    inputs = (pre_layer_mix_grad, post_layer_mix_grad, comb_res_mix_grad, input_mixes, post_layer_mix)
    outputs = (input_mixes_grad, mhc_scale_grad, mhc_base_grad)
    # A row for each block
    workspace = (torch.float32, 0, num_sms_for(input_mixes.device), 2 * mult * (mult + 2))
    _mhc_pre_split_mixes_bwd(*inputs, mhc_scale, mhc_base, workspace, *outputs, mhc_post_mult_value, mult)


def mhc_pre_split_mixes_fwd_ref(
    input_mixes: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    pre_layer_mix: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    """`mhc_pre_split_mixes_fwd` in plain torch."""
    sizes = pre_layer_mix.shape[1], post_layer_mix.shape[1], comb_res_mix.shape[1]
    pre, post, comb = scaled(input_mixes, _spread(mhc_scale, sizes), mhc_base).split(sizes, 1)
    pre_layer_mix.copy_(pre.sigmoid() + mhc_pre_eps)
    post_layer_mix.copy_(post.sigmoid() * mhc_post_mult_value)
    comb_res_mix.copy_(comb)


def mhc_pre_split_mixes_bwd_ref(
    pre_layer_mix_grad: torch.Tensor,
    post_layer_mix_grad: torch.Tensor,
    comb_res_mix_grad: torch.Tensor,
    input_mixes: torch.Tensor,
    post_layer_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    input_mixes_grad: torch.Tensor,
    mhc_scale_grad: torch.Tensor,
    mhc_base_grad: torch.Tensor,
    mhc_post_mult_value: float,
) -> None:
    """`mhc_pre_split_mixes_bwd` in plain torch."""
    mult = post_layer_mix.shape[1]
    sizes = mult, mult, mult * mult
    scale = _spread(mhc_scale, sizes)
    grads = torch.cat(
        [
            sigmoid_grad(input_mixes[:, :mult], scale[:mult], mhc_base[:mult], pre_layer_mix_grad),
            post_layer_mix * (1 - post_layer_mix / mhc_post_mult_value) * post_layer_mix_grad,
            comb_res_mix_grad,
        ],
        1,
    )
    input_mixes_grad.copy_(grads * scale)
    mhc_base_grad.copy_(grads.sum(0))
    products = (grads * input_mixes).sum(0)
    mhc_scale_grad.copy_(torch.stack([part.sum() for part in products.split(sizes)]))


def _spread(mhc_scale: torch.Tensor, sizes: tuple[int, int, int]) -> torch.Tensor:
    """A column's scale."""
    return torch.cat([mhc_scale[i : i + 1].expand(size) for i, size in enumerate(sizes)])


def _fwd_cpu(
    input_mixes: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    pre_layer_mix: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
    mhc_mult: int,
) -> None:
    outputs = pre_layer_mix, post_layer_mix, comb_res_mix
    mhc_pre_split_mixes_fwd_ref(input_mixes, mhc_scale, mhc_base, *outputs, mhc_post_mult_value, mhc_pre_eps)


def _bwd_cpu(
    pre_layer_mix_grad: torch.Tensor,
    post_layer_mix_grad: torch.Tensor,
    comb_res_mix_grad: torch.Tensor,
    input_mixes: torch.Tensor,
    post_layer_mix: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    workspace: torch.Tensor,
    input_mixes_grad: torch.Tensor,
    mhc_scale_grad: torch.Tensor,
    mhc_base_grad: torch.Tensor,
    mhc_post_mult_value: float,
    mhc_mult: int,
) -> None:
    mhc_pre_split_mixes_bwd_ref(
        pre_layer_mix_grad,
        post_layer_mix_grad,
        comb_res_mix_grad,
        input_mixes,
        post_layer_mix,
        mhc_scale,
        mhc_base,
        input_mixes_grad,
        mhc_scale_grad,
        mhc_base_grad,
        mhc_post_mult_value,
    )


_mhc_pre_split_mixes_fwd = kernel(_NAME, cpu=_fwd_cpu)
_mhc_pre_split_mixes_bwd = kernel(_NAME_BACKWARD, cpu=_bwd_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens, training batches, and many tokens; of four streams, and of others."""
    sizes = [(7, 4), (4096, 4), (8192, 4), (65536, 4), (8192, 2), (8192, 8)]
    return [make(*size) for make in (_forward_case, _backward_case) for size in sizes]


# Of sums over the tokens in another order
_MAX_DIFF = 1e-10


def _make_inputs(num_tokens: int, mult: int, device: Any) -> dict[str, Any]:
    columns = mult * (mult + 2)
    return {
        "input_mixes": torch.randn((num_tokens, columns), device=device),
        "mhc_scale": torch.rand(3, device=device) + 0.5,
        "mhc_base": torch.randn(columns, device=device),
    }


def _make_mixes(num_tokens: int, mult: int, device: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.rand((num_tokens, columns), device=device) for columns in (mult, mult, mult * mult))


def _forward_case(num_tokens: int, mult: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        names = "pre_layer_mix", "post_layer_mix", "comb_res_mix"
        outputs = dict(zip(names, _make_mixes(num_tokens, mult, device), strict=True))
        constants = {"mhc_post_mult_value": 2.0, "mhc_pre_eps": 1e-2}
        return {**_make_inputs(num_tokens, mult, device), **outputs, **constants}

    return BenchCase(_NAME, {"num_tokens": num_tokens, "mult": mult}, make, 8 * num_tokens * mult * (mult + 2))


def _backward_case(num_tokens: int, mult: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        names = "pre_layer_mix_grad", "post_layer_mix_grad", "comb_res_mix_grad"
        grads = dict(zip(names, _make_mixes(num_tokens, mult, device), strict=True))
        inputs = _make_inputs(num_tokens, mult, device)
        outputs = {f"{name}_grad": torch.zeros_like(inputs[name]) for name in ("input_mixes", "mhc_scale", "mhc_base")}
        post = 2 * torch.rand((num_tokens, mult), device=device)
        return {**grads, **inputs, "post_layer_mix": post, **outputs, "mhc_post_mult_value": 2.0}

    num_bytes = 4 * num_tokens * (3 * mult * (mult + 2) + mult)
    params = {"num_tokens": num_tokens, "mult": mult}
    return BenchCase(_NAME_BACKWARD, params, make, num_bytes, _MAX_DIFF)
