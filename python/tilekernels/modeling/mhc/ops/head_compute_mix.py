"""The mixes of the last residual streams."""

from __future__ import annotations

from typing import Any

import torch

from ....config import num_sms_for
from ....mhc.head_compute_mix import mhc_head_compute_mix_bwd, mhc_head_compute_mix_fwd
from ._tokens import check_num_dims, merge_leading

_NAME = "modeling.mhc.mhc_head_compute_mix"


def mhc_head_compute_mix(
    input_mix: torch.Tensor, mhc_scale: torch.Tensor, mhc_base: torch.Tensor, mhc_pre_eps: float
) -> torch.Tensor:
    """sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps.

    input_mix: (..., m) fp32, m 2, 4 or 8; made dense if it is not. mhc_scale: (1,), mhc_base: (m,) fp32. Returns a
    tensor like input_mix; all three inputs get gradients.
    """
    result: torch.Tensor = MHCHeadComputeMix.apply(input_mix, mhc_scale, mhc_base, mhc_pre_eps)
    return result


class MHCHeadComputeMix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input_mix: torch.Tensor, mhc_scale: torch.Tensor, mhc_base: torch.Tensor, mhc_pre_eps: float
    ) -> torch.Tensor:
        check_num_dims(_NAME, "input_mix", input_mix, 2)
        x = merge_leading(input_mix, 1)
        out = torch.empty_like(x)
        mhc_head_compute_mix_fwd(x, mhc_scale, mhc_base, out, mhc_pre_eps)
        ctx.save_for_backward(x, mhc_scale, mhc_base)
        return out.view(input_mix.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mhc_scale, mhc_base = ctx.saved_tensors
        num_sms = num_sms_for(x.device)
        x_grad = torch.empty_like(x)
        scale_grad, base_grad = (x.new_empty((num_sms, size)) for size in (1, x.shape[1]))
        out_grad = merge_leading(grads[0], 1)
        mhc_head_compute_mix_bwd(out_grad, x, mhc_scale, mhc_base, x_grad, scale_grad, base_grad, num_sms)
        return x_grad.view(grads[0].shape), scale_grad.sum(0), base_grad.sum(0), None
