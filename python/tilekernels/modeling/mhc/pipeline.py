"""A layer with its hyper-connection as a module: the parameters, `mhc_pre`, the layer, `mhc_post`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ...errors import argument_error, check_int
from .functional import mhc_post, mhc_pre

_NAME = "modeling.MHCPipeline"
_MULTS = (2, 4, 8)

# At the start mixes hardly depend on the residual, and streams hardly mix: see reset_parameters
_INITIAL_SCALE = 0.01
_INITIAL_DIAGONAL = 4.0


class MHCPipeline(torch.nn.Module):
    """Runs `layer` on residual streams: residual -> mhc_post(layer(mixed residual), residual).

        blocks = [MHCPipeline(attention, hidden=2560), MHCPipeline(mlp, hidden=2560)]
        residual = expand_from_embedding(embedding)
        for block in blocks:
            residual = block(residual)

    layer: any callable from (..., hidden) bf16 to the same shape; a Module becomes a submodule. Further arguments of a
    call go to it. With norm_weight the streams are weighted before the mixes are formed. The other arguments are those
    of `mhc_pre`.

    Parameters, all fp32: fn (m * (m + 2), m * hidden), scale (3,), base (m * (m + 2),), norm_weight (m * hidden,) or
    None. Convert a model to bf16 before it gets pipelines, or leave these out: operators take fp32 alone. Where fn or
    norm_weight have an attribute `main_grad`, their gradients are added to that.

    The residual may be read elsewhere too, and the module may run under `torch.utils.checkpoint`, in both its modes.
    """

    def __init__(
        self,
        layer: Callable[..., torch.Tensor],
        hidden: int,
        *,
        mhc_mult: int = 4,
        use_norm_weight: bool = False,
        norm_eps: float = 1e-6,
        post_mult_value: float = 1.0,
        pre_eps: float = 1e-6,
        sinkhorn_eps: float = 1e-6,
        sinkhorn_repeat: int = 10,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_int(_NAME, "hidden", hidden, 1)
        if mhc_mult not in _MULTS:
            raise argument_error(_NAME, "mhc_mult", "be 2, 4 or 8", mhc_mult)
        self.layer = layer
        self.hidden, self.mhc_mult = hidden, mhc_mult
        self.options: dict[str, Any] = {
            "norm_eps": norm_eps,
            "mhc_mult": mhc_mult,
            "post_mult_value": post_mult_value,
            "pre_eps": pre_eps,
            "sinkhorn_eps": sinkhorn_eps,
            "sinkhorn_repeat": sinkhorn_repeat,
        }
        num_mixes, num_channels = mhc_mult * (mhc_mult + 2), mhc_mult * hidden

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))

        self.fn, self.scale, self.base = parameter(num_mixes, num_channels), parameter(3), parameter(num_mixes)
        self.norm_weight = parameter(num_channels) if use_norm_weight else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts near a plain residual connection: the layer reads the mean of the streams and writes to each by half
        of post_mult_value, each stream keeps nearly to itself, and what depends on the residual comes in by 1 %."""
        mult = self.mhc_mult
        torch.nn.init.normal_(self.fn, std=1 / math.sqrt(mult * self.hidden))
        torch.nn.init.constant_(self.scale, _INITIAL_SCALE)
        with torch.no_grad():
            self.base.zero_()
            self.base[:mult] = math.log(1 / (mult - 1))  # whose sigmoid is 1 / mult
            self.base[2 * mult :] = _INITIAL_DIAGONAL * torch.eye(mult, device=self.base.device).flatten()
        if self.norm_weight is not None:
            torch.nn.init.ones_(self.norm_weight)

    def forward(self, residual: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """(..., m, hidden) bf16 to the same; args and kwargs go to the layer behind its input."""
        if residual.shape[-2:] != (self.mhc_mult, self.hidden):
            requirement = f"end in ({self.mhc_mult}, {self.hidden})"
            raise argument_error(_NAME, "residual", requirement, tuple(residual.shape))
        # The parts of its gradient share a tensor, which others that read the residual must not add to
        own = residual.contiguous().view_as(residual)
        parameters = self.fn, self.scale, self.base
        layer_input, (post_mix, comb_mix) = mhc_pre(own, *parameters, norm_weight=self.norm_weight, **self.options)
        output = self.layer(layer_input, *args, **kwargs)
        if output.shape != layer_input.shape:
            raise argument_error(_NAME, "layer", f"keep the shape {tuple(layer_input.shape)}", tuple(output.shape))
        return mhc_post(output.to(own.dtype).contiguous(), own, post_mix, comb_mix)

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, " + ", ".join(f"{name}={value}" for name, value in self.options.items())
