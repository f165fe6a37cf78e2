"""A token's mixes from its residual streams: a product, over the root mean square of the streams."""

from __future__ import annotations

from typing import Any

import torch

from ....errors import argument_error
from ....mhc.fn_normw_merge import mhc_fn_normw_merge_bwd, mhc_fn_normw_merge_fwd
from ....mhc.norm_fn import make_partials, mhc_pre_norm_fn_partials_bwd
from ....mhc.reduce_partials_and_rmsnorm import (
    mhc_reduce_partials_and_rmsnorm_bwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
)
from ._residual_grad import take_grad
from ._tokens import check_num_dims, merge_leading

_NAME = "modeling.mhc.mhc_pre_norm_fn"


def mhc_pre_norm_fn(
    residual: torch.Tensor,
    mhc_fn: torch.Tensor,
    mhc_norm_weight: torch.Tensor | None,
    mhc_norm_eps: float,
    fuse_grad_acc: bool = True,
    n_splits: int = 16,
) -> torch.Tensor:
    """x @ (mhc_fn * mhc_norm_weight)^T / sqrt(mean(x^2) + mhc_norm_eps) of each token's streams x in one row.

    residual: (..., m, hidden) bf16, m 2, 4 or 8; made dense if it is not. mhc_fn: (m * (m + 2), m * hidden) fp32.
    mhc_norm_weight: (m * hidden,) fp32, or None for ones. Returns (..., m * (m + 2)) fp32; products are of tf32. The
    channels are cut into as many parts as are fast, whatever n_splits says.

    Backward adds the gradient of residual to the one that `mhc_post` left, if it left one and with fuse_grad_acc, and
    autograd then gets None for it. The gradients of mhc_fn and mhc_norm_weight are added to their attribute `main_grad`
    (fp32) where they have one, and autograd gets None.
    """
    fn = mhc_fn if mhc_norm_weight is None else merge_norm_weight(mhc_fn, mhc_norm_weight)
    result: torch.Tensor = MHCPreNormFn.apply(residual, fn, mhc_norm_eps, fuse_grad_acc)
    return result


def merge_norm_weight(mhc_fn: torch.Tensor, mhc_norm_weight: torch.Tensor) -> torch.Tensor:
    """mhc_fn * mhc_norm_weight with gradients for both."""
    merged: torch.Tensor = _MergeNormWeight.apply(mhc_fn, mhc_norm_weight)
    return merged


class MHCPreNormFn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, residual: torch.Tensor, mhc_fn: torch.Tensor, mhc_norm_eps: float, fuse_grad_acc: bool
    ) -> torch.Tensor:
        check_num_dims(_NAME, "residual", residual, 3)
        num_mixes, num_channels = mhc_fn.shape
        streams = merge_leading(residual, 2)
        num_tokens = streams.shape[0]
        out_mul_parts, sqrsum_parts = make_partials(streams, mhc_fn)
        out_mul, sqrsum = mhc_fn.new_empty((num_tokens, 1, num_mixes)), mhc_fn.new_empty((num_tokens, 1))
        out = mhc_fn.new_empty((num_tokens, num_mixes))
        num_splits = out_mul_parts.shape[0]
        parts = out_mul_parts.unsqueeze(2), sqrsum_parts.unsqueeze(2)
        mhc_reduce_partials_and_rmsnorm_fwd(*parts, out_mul, sqrsum, out, num_channels, mhc_norm_eps, num_splits)
        ctx.save_for_backward(residual, mhc_fn, out_mul, sqrsum)
        ctx.eps, ctx.fuse_grad_acc = mhc_norm_eps, fuse_grad_acc
        # For its main_grad: what save_for_backward gives back may be another object
        ctx.parameter = mhc_fn if mhc_fn.is_leaf else None
        return out.view(*residual.shape[:-2], num_mixes)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        residual, mhc_fn, out_mul, sqrsum = ctx.saved_tensors
        out_mul_grad, sqrsum_grad = torch.empty_like(out_mul), torch.empty_like(sqrsum)
        out_grad = merge_leading(grads[0], 1)
        mhc_reduce_partials_and_rmsnorm_bwd(
            out_grad, out_mul, sqrsum, out_mul_grad, sqrsum_grad, mhc_fn.shape[1], ctx.eps
        )
        left = take_grad(residual) if ctx.fuse_grad_acc else None
        residual_grad = torch.zeros_like(residual, memory_format=torch.contiguous_format) if left is None else left
        fn_grad = torch.empty_like(mhc_fn)
        streams = merge_leading(residual, 2)
        mhc_pre_norm_fn_partials_bwd(
            out_mul_grad.squeeze(1), sqrsum_grad.squeeze(1), streams, mhc_fn, residual_grad.view(streams.shape), fn_grad
        )
        main_grad = _main_grad(ctx.parameter)
        if main_grad is not None:
            main_grad.add_(fn_grad)
        return residual_grad if left is None else None, None if main_grad is not None else fn_grad, None, None


class _MergeNormWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mhc_fn: torch.Tensor, mhc_norm_weight: torch.Tensor) -> torch.Tensor:
        merged = torch.empty_like(mhc_fn)
        mhc_fn_normw_merge_fwd(mhc_fn, mhc_norm_weight, merged)
        ctx.save_for_backward(mhc_fn, mhc_norm_weight)
        ctx.parameters = tuple(each if each.is_leaf else None for each in (mhc_fn, mhc_norm_weight))
        return merged

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors = ctx.saved_tensors
        main_grads = [_main_grad(parameter) for parameter in ctx.parameters]
        buffers = [
            torch.zeros_like(tensor) if main_grad is None else main_grad
            for tensor, main_grad in zip(tensors, main_grads, strict=True)
        ]
        mhc_fn, mhc_norm_weight = tensors
        mhc_fn_normw_merge_bwd(mhc_fn, mhc_norm_weight, grads[0].contiguous(), buffers[0], buffers[1])
        return tuple(
            buffer if main_grad is None else None for buffer, main_grad in zip(buffers, main_grads, strict=True)
        )


def _main_grad(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Where a parameter's gradient is accumulated, if it says so."""
    main_grad = getattr(parameter, "main_grad", None)
    if parameter is None or main_grad is None:
        return None
    if main_grad.dtype != torch.float32 or main_grad.shape != parameter.shape or not main_grad.is_contiguous():
        requirement = f"be contiguous float32 of shape {tuple(parameter.shape)}"
        raise argument_error(_NAME, "main_grad", requirement, f"{main_grad.dtype} of {tuple(main_grad.shape)}")
    result: torch.Tensor = main_grad
    return result
