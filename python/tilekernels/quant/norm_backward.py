"""Gradients of RMSNorm."""

from __future__ import annotations

from typing import Any

import torch

from .. import config
from .._dispatch import kernel
from .._outputs import requests_of, size_of
from ..errors import argument_error
from ..layout import ceildiv
from ..testing.cases import BenchCase
from ._norm import BACKWARD_SHARE, check_like, check_rows, mean_of_rows
from ._swiglu import check_number

_NAME = "quant.norm_backward"

# Outputs as the extension is asked for them, by argument 1, which is x
_X_GRAD_OF, _WEIGHT_GRAD_OF = requests_of(size_of(1, 0), size_of(1, 1)), requests_of(size_of(1, 1))

# As many as run at a time, for rows of one step of a block, of two, and longer ones; each ends in a row of sums
_BLOCKS_PER_SM = {torch.bfloat16: (4, 3, 2), torch.float32: (4, 2, 1)}


def norm_backward(
    out_grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    residual_out_grad: torch.Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(x_grad, weight_grad) of `norm_forward`; x_grad is the gradient of x and of the residual that was added to it.

    x: (T, H) bf16 or fp32, what was normalised, unit column stride, any row stride; H % 32 == 0, at most 8192.
    out_grad, residual_out_grad: like x; the second is added to x_grad. weight: (H,) of x's dtype, dense, or None. rstd:
    (T,) fp32, dense. weight_grad: (H,) bf16 or fp32, dense, to which the gradient is added, in fp32 and rounded once;
    None: a new one of weight's dtype. Without weight it must be None, and None is returned.

    In fp32: xh = x * rstd, go = out_grad * out_scale, wg = go * weight, x_grad = (wg - xh * mean(xh * wg)) * rstd +
    residual_out_grad; weight_grad is the sum over the rows of xh * go, whose order depends on the number of SMs.
    """
    check_rows(_NAME, x, 32, (2,))
    check_like(_NAME, "out_grad", out_grad, x)
    if residual_out_grad is not None:
        check_like(_NAME, "residual_out_grad", residual_out_grad, x)
    num_tokens, hidden = x.shape
    if weight is not None:
        check_like(_NAME, "weight", weight, x, shape=(hidden,))
    elif weight_grad is not None:
        raise argument_error(_NAME, "weight_grad", "be None where weight is None", "a tensor")
    scalars = (check_number(_NAME, "out_scale", out_scale), weight_grad is not None)
    inputs = (out_grad, x, weight, rstd, residual_out_grad)
    is_new = weight is not None and weight_grad is None
    if num_tokens == 0:
        _norm_backward.check(*inputs, None, weight_grad, None, *scalars)
        return x.new_empty((0, hidden)), x.new_zeros(hidden) if is_new else weight_grad
    num_steps = ceildiv(hidden, BACKWARD_SHARE[0] * BACKWARD_SHARE[1])
    blocks_per_sm = _BLOCKS_PER_SM.get(x.dtype, (1, 1, 1))[min(num_steps, 3) - 1]
    num_parts = min(num_tokens, blocks_per_sm * config.num_sms_for(x.device))
    outputs = (_X_GRAD_OF[x.dtype], _WEIGHT_GRAD_OF[x.dtype] if is_new else weight_grad)
    made = _norm_backward(*inputs, *outputs, (torch.float32, 0, num_parts, hidden), *scalars)
    return made[0], made[1] if is_new else weight_grad


def norm_backward_ref(
    out_grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    residual_out_grad: torch.Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`norm_backward` in plain torch, its mean in the order of a block of 256 threads with eight channels each."""
    normal = x.float() * rstd[:, None]
    scaled = out_grad.float() * out_scale
    weighted = scaled if weight is None else scaled * weight.float()
    mean = mean_of_rows(normal * weighted, BACKWARD_SHARE)
    x_grad = (weighted - normal * mean) * rstd[:, None]
    if residual_out_grad is not None:
        x_grad = x_grad + residual_out_grad.float()
    if weight is not None:
        grad = (normal * scaled).sum(dim=0)
        if weight_grad is None:
            weight_grad = grad.to(weight.dtype)
        else:
            weight_grad.copy_(weight_grad.float() + grad)
    return x_grad.to(x.dtype), weight_grad


def _norm_backward_cpu(
    out_grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    residual_out_grad: torch.Tensor | None,
    x_grad: torch.Tensor,
    weight_grad: torch.Tensor | None,
    workspace: torch.Tensor,
    out_scale: float,
    accumulate: bool,
) -> None:
    inputs = (out_grad, x, weight, rstd, residual_out_grad, out_scale)
    results = norm_backward_ref(*inputs, weight_grad if accumulate else None)
    x_grad.copy_(results[0])
    if weight_grad is not None and not accumulate:
        weight_grad.copy_(results[1])  # type: ignore[arg-type]  # there is a weight


_norm_backward = kernel(_NAME, cpu=_norm_backward_cpu)

# Of weight_grad, whose sum has no set order
_MAX_DIFF = 1e-9


def bench_cases() -> list[BenchCase]:
    """Few tokens, then hidden sizes of large models."""
    cases = [_case(8, 2048, torch.bfloat16, False), _case(256, 7168, torch.bfloat16, False)]
    for hidden in (2048, 4096, 7168):
        cases += [_case(8192, hidden, torch.bfloat16, residual) for residual in (False, True)]
    return [*cases, _case(8192, 7168, torch.float32, True)]


def _case(num_tokens: int, hidden: int, dtype: torch.dtype, residual: bool) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x, grad, residual_grad = (torch.randn((num_tokens, hidden), device=device).to(dtype) for _ in range(3))
        return {
            "out_grad": grad,
            "x": x,
            "weight": torch.randn(hidden, device=device).to(dtype),
            "rstd": torch.rand(num_tokens, device=device) + 0.5,
            "residual_out_grad": residual_grad if residual else None,
        }

    size = dtype.itemsize
    num_bytes = num_tokens * (hidden * size * (4 if residual else 3) + 4) + 2 * hidden * size
    params = {"num_tokens": num_tokens, "hidden": hidden, "in": str(dtype).removeprefix("torch.")}
    return BenchCase(_NAME, {**params, **({"residual": True} if residual else {})}, make, num_bytes, _MAX_DIFF)
