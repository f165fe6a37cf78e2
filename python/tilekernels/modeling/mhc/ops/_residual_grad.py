"""The gradient of a residual that three backward passes add to in turn, without a tensor for each.

`mhc_post` makes the gradient, hands it to autograd, and leaves it as the attribute `grad_from_mhc_post` of the
residual's storage. `mhc_pre_apply_mix` adds to that tensor in place, and so does `mhc_pre_norm_fn`, which takes the
attribute away: what autograd holds is complete by then. Where the attribute is missing, each starts from zeros and
returns a gradient of its own.

That holds as long as nobody else gives the residual a gradient in between: autograd would add it up in a new tensor.
Who reads a residual elsewhere passes `residual.view_as(residual)` to all functions of a layer (MHCPipeline does).
"""

from __future__ import annotations

import torch

_ATTRIBUTE = "grad_from_mhc_post"
# On the gradient: which residual of the storage, and which backward pass, it is of. One that a caller set has none.
_OWNER = "_mhc_owner"


def put_grad(residual: torch.Tensor, grad: torch.Tensor) -> None:
    """Leave the gradient for what comes later in this backward pass."""
    setattr(grad, _OWNER, _owner(residual))
    setattr(residual.untyped_storage(), _ATTRIBUTE, grad)


def find_grad(residual: torch.Tensor) -> torch.Tensor | None:
    """The gradient that was left for this residual; None if there is none, or one of another pass or place."""
    grad = getattr(residual.untyped_storage(), _ATTRIBUTE, None)
    if not isinstance(grad, torch.Tensor) or grad.shape != residual.shape or grad.dtype != residual.dtype:
        return None
    owner = getattr(grad, _OWNER, None)
    return grad if owner is None or owner == _owner(residual) else None


def take_grad(residual: torch.Tensor) -> torch.Tensor | None:
    """`find_grad`, and leave it no longer."""
    grad = find_grad(residual)
    if grad is not None:
        delattr(residual.untyped_storage(), _ATTRIBUTE)
    return grad


def _owner(residual: torch.Tensor) -> tuple[int, tuple[int, ...], int]:
    return int(residual.storage_offset()), tuple(residual.shape), _backward_pass()


def _backward_pass() -> int:
    """A number of its own for each call of backward; the same outside of them."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    return -1 if number is None else int(number())
