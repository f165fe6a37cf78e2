"""A token's mixes, split into those before a layer, behind it, and between residual streams."""

from __future__ import annotations

from typing import Any

import torch

from ....mhc.pre_split_mixes import mhc_pre_split_mixes_bwd, mhc_pre_split_mixes_fwd
from ._tokens import check_last, check_num_dims, merge_leading

_NAME = "modeling.mhc.mhc_pre_split_mixes"


def mhc_pre_split_mixes(
    input_mixes: torch.Tensor,
    mhc_scale: torch.Tensor,
    mhc_base: torch.Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(pre, post, comb) of the first m, the next m and the last m * m columns x: sigmoid(x * scale[0] + base) +
    mhc_pre_eps, sigmoid(x * scale[1] + base) * mhc_post_mult_value, x * scale[2] + base.

    input_mixes: (..., m * (m + 2)) fp32, m = mhc_mult 2, 4 or 8. mhc_scale: (3,), mhc_base: (m * (m + 2),) fp32.
    Returns fp32 (..., m, 1), (..., m, 1) and (..., m, m); input_mixes, mhc_scale and mhc_base get gradients.
    """
    constants = mhc_mult, mhc_post_mult_value, mhc_pre_eps
    pre, post, comb = MHCPreSplitMixes.apply(input_mixes, mhc_scale, mhc_base, *constants)
    return pre, post, comb


class MHCPreSplitMixes(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_mixes: torch.Tensor,
        mhc_scale: torch.Tensor,
        mhc_base: torch.Tensor,
        mhc_mult: int,
        mhc_post_mult_value: float,
        mhc_pre_eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        check_num_dims(_NAME, "input_mixes", input_mixes, 2)
        check_last(_NAME, "input_mixes", input_mixes, mhc_mult * (mhc_mult + 2))
        mixes = merge_leading(input_mixes, 1)
        sizes = mhc_mult, mhc_mult, mhc_mult * mhc_mult
        pre, post, comb = (mixes.new_empty((mixes.shape[0], size)) for size in sizes)
        mhc_pre_split_mixes_fwd(mixes, mhc_scale, mhc_base, pre, post, comb, mhc_post_mult_value, mhc_pre_eps)
        ctx.save_for_backward(mixes, mhc_scale, mhc_base, post)
        ctx.post_mult_value = mhc_post_mult_value
        ctx.shape = input_mixes.shape
        leading = input_mixes.shape[:-1]
        # Views of what is saved: post is not written again
        return (
            pre.view(*leading, mhc_mult, 1),
            post.view(*leading, mhc_mult, 1),
            comb.view(*leading, mhc_mult, mhc_mult),
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mixes, mhc_scale, mhc_base, post = ctx.saved_tensors
        num_tokens = mixes.shape[0]
        pre_grad, post_grad, comb_grad = (
            grad.contiguous().view(num_tokens, grad.shape[-2] * grad.shape[-1]) for grad in grads
        )
        mixes_grad, scale_grad, base_grad = (torch.empty_like(each) for each in (mixes, mhc_scale, mhc_base))
        inputs = pre_grad, post_grad, comb_grad, mixes, post, mhc_scale, mhc_base
        mhc_pre_split_mixes_bwd(*inputs, mixes_grad, scale_grad, base_grad, ctx.post_mult_value)
        return mixes_grad.view(ctx.shape), scale_grad, base_grad, None, None, None
