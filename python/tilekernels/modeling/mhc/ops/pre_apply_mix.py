"""The input of a layer: the sum of a token's residual streams, each times its mix."""

from __future__ import annotations

from typing import Any

import torch

from ....errors import argument_error
from ....mhc.pre_apply_mix import mhc_pre_apply_mix_bwd, mhc_pre_apply_mix_fwd
from ._residual_grad import find_grad
from ._tokens import check_last, check_num_dims, merge_leading

_NAME = "modeling.mhc.mhc_pre_apply_mix"


def mhc_pre_apply_mix(x: torch.Tensor, mix: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Each token's sum over its streams of mix * stream; see `tilekernels.mhc.mhc_pre_apply_mix_fwd`.

    x: (..., m, hidden) bf16, m 2, 4 or 8; mix: (..., m, 1) fp32; made dense if they are not. Returns (..., hidden)
    bf16, `out` if it is given. The gradient of x is added to the one that `mhc_post` left, if it left one, and autograd
    then gets None for it.
    """
    result: torch.Tensor = MHCPreApplyMix.apply(x, mix, out)
    return result


class MHCPreApplyMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mix: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        check_num_dims(_NAME, "x", x, 3)
        check_num_dims(_NAME, "mix", mix, 3)
        check_last(_NAME, "mix", mix, 1)
        shape = (*x.shape[:-2], x.shape[-1])
        if out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        elif out.shape != shape or not out.is_contiguous():
            raise argument_error(_NAME, "out", f"be contiguous of shape {shape}", tuple(out.shape))
        else:
            ctx.mark_dirty(out)
        mhc_pre_apply_mix_fwd(merge_leading(x, 2), merge_leading(mix, 2).squeeze(-1), merge_leading(out, 1))
        ctx.save_for_backward(x, mix)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mix = ctx.saved_tensors
        left = find_grad(x)
        x_grad = torch.zeros_like(x, memory_format=torch.contiguous_format) if left is None else left
        streams, mixes = merge_leading(x, 2), merge_leading(mix, 2).squeeze(-1)
        mix_grad = mhc_pre_apply_mix_bwd(merge_leading(grads[0], 1), streams, mixes, x_grad.view(streams.shape))
        return x_grad if left is None else None, mix_grad.view(mix.shape), None
