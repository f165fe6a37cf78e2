"""Sinkhorn's normalisation of mixes between residual streams."""

from __future__ import annotations

from typing import Any

import torch

from ....errors import check_int
from ....mhc.sinkhorn import MAX_BACKWARD_REPEAT, mhc_sinkhorn_bwd, mhc_sinkhorn_fwd
from ._tokens import check_num_dims, merge_leading

_NAME = "modeling.mhc.sinkhorn_normalize"


def sinkhorn_normalize(x: torch.Tensor, repeat: int = 10, eps: float = 1e-6) -> torch.Tensor:
    """x as matrices whose rows and columns nearly sum to one; see `tilekernels.mhc.mhc_sinkhorn_fwd`.

    x: (..., m, m) fp32, m 2, 4 or 8; made dense if it is not. repeat: at most 128 where x needs a gradient. Returns a
    tensor like x.
    """
    result: torch.Tensor = _Sinkhorn.apply(x, repeat, eps)
    return result


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, repeat: int, eps: float) -> torch.Tensor:
        check_num_dims(_NAME, "x", x, 2)
        if ctx.needs_input_grad[0]:  # now, not in the backward pass
            check_int(_NAME, "repeat", repeat, 1, MAX_BACKWARD_REPEAT)
        matrices = merge_leading(x, 2)
        out = torch.empty_like(matrices)
        mhc_sinkhorn_fwd(matrices, out, repeat, eps)
        ctx.save_for_backward(matrices)
        ctx.repeat, ctx.eps = repeat, eps
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (matrices,) = ctx.saved_tensors
        x_grad = torch.empty_like(matrices)
        mhc_sinkhorn_bwd(merge_leading(grads[0], 2), matrices, x_grad, ctx.repeat, ctx.eps)
        return x_grad.view(grads[0].shape), None, None
