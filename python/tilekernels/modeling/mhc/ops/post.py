"""The residual streams behind a layer."""

from __future__ import annotations

from typing import Any

import torch

from ....mhc import post as _post
from ....mhc.post import mhc_post_fwd as mhc_post_fwd
from ._residual_grad import put_grad


def mhc_post(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Stream o is post[o] * x + the sum over i of comb[i, o] * residual[i]; see `tilekernels.mhc.mhc_post_fwd`.

    x: (..., hidden) bf16. residual: (..., m, hidden) bf16. post_layer_mix: (..., m, 1) fp32. comb_res_mix: (..., m, m)
    fp32. Returns a tensor like residual, `out` if it is given. Backward leaves the gradient of residual for
    `mhc_pre_apply_mix` and `mhc_pre_norm_fn` of the same residual to add to.
    """
    if not torch.is_grad_enabled():
        return mhc_post_fwd(x, residual, post_layer_mix, comb_res_mix, out)
    result: torch.Tensor = MHCPost.apply(x, residual, post_layer_mix, comb_res_mix, out)
    return result


def mhc_post_bwd(
    x: torch.Tensor,
    residual: torch.Tensor,
    post_layer_mix: torch.Tensor,
    comb_res_mix: torch.Tensor,
    d_o: torch.Tensor,
    fuse_grad_acc: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`tilekernels.mhc.mhc_post_bwd`; with fuse_grad_acc it leaves the gradient of residual as `mhc_post` does."""
    grads = _post.mhc_post_bwd(x, residual, post_layer_mix, comb_res_mix, d_o)
    if fuse_grad_acc:
        put_grad(residual, grads[1])
    return grads


class MHCPost(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor,
        post_layer_mix: torch.Tensor,
        comb_res_mix: torch.Tensor,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if out is not None:
            ctx.mark_dirty(out)
        ctx.save_for_backward(x, residual, post_layer_mix, comb_res_mix)
        return mhc_post_fwd(x, residual, post_layer_mix, comb_res_mix, out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, residual, post_layer_mix, comb_res_mix = ctx.saved_tensors
        fuse_grad_acc = ctx.needs_input_grad[1]
        return *mhc_post_bwd(x, residual, post_layer_mix, comb_res_mix, grads[0], fuse_grad_acc), None
