"""Residual streams from embeddings: as many copies."""

from __future__ import annotations

from typing import Any

import torch

from ....errors import argument_error, check_int
from ....mhc.expand import expand_to_mhc_bwd, expand_to_mhc_fwd
from ._tokens import check_num_dims, merge_leading

_NAME = "modeling.mhc.expand_to_mhc"


def expand_to_mhc(hidden: torch.Tensor, mhc_mult: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Each token's embedding mhc_mult times.

    hidden: (..., hidden) bf16, dense, of two dimensions or more. Returns (..., mhc_mult, hidden) bf16, `out` if it is
    given. The gradient is the sum over the copies, in fp32 in their order, rounded once.
    """
    result: torch.Tensor = ExpandToMHCFn.apply(hidden, mhc_mult, out)
    return result


class ExpandToMHCFn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, mhc_mult: int, out: torch.Tensor | None) -> torch.Tensor:
        check_num_dims(_NAME, "hidden", hidden, 2)
        check_int(_NAME, "mhc_mult", mhc_mult, 1)
        if not hidden.is_contiguous():
            raise argument_error(_NAME, "hidden", "be contiguous", f"strides {hidden.stride()}")
        shape = (*hidden.shape[:-1], mhc_mult, hidden.shape[-1])
        if out is None:
            out = torch.empty(shape, dtype=hidden.dtype, device=hidden.device)
        elif out.shape != shape or not out.is_contiguous():
            raise argument_error(_NAME, "out", f"be contiguous of shape {shape}", tuple(out.shape))
        else:
            ctx.mark_dirty(out)
        expand_to_mhc_fwd(merge_leading(hidden, 1), merge_leading(out, 2))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (o_grad,) = grads
        shape = (*o_grad.shape[:-2], o_grad.shape[-1])
        grad = torch.empty(shape, dtype=o_grad.dtype, device=o_grad.device)
        expand_to_mhc_bwd(merge_leading(o_grad, 2), merge_leading(grad, 1))
        return grad, None, None
