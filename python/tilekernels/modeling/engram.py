"""The engram gate with gradients, and a module that looks n-grams up and gates them into the residual streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..engram import engram_gate_bwd, engram_gate_fwd, engram_hash, fused_weight, grad_w_reduce
from ..engram.engram_hash import make_offsets
from ..errors import argument_error

__all__ = ["EngramGate", "EngramGateFn", "engram_gate"]


class EngramGateFn(torch.autograd.Function):
    """`engram_gate` for autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        kv: torch.Tensor,
        weight_hidden: torch.Tensor,
        weight_embed: torch.Tensor,
        clamp_value: float,
        eps: float,
        image_token_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        weights = weight_hidden, weight_embed
        return _run_on_one(ctx, hidden_states, kv, *weights, clamp_value, eps, image_token_mask)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_kv, *grad_weights = run_backward(ctx, grad_output)
        shape = (*ctx.shape[:-2], grad_kv.shape[1] * grad_kv.shape[2])
        return (grad_x, grad_kv.view(shape), *grad_weights, None, None, None)


def engram_gate(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp_value: float,
    eps: float,
    image_token_mask: torch.Tensor | None,
) -> torch.Tensor:
    """hidden_states plus the looked-up values, as much of them as each stream's gate lets through; differentiable.

    hidden_states: (..., num_streams, hidden) bf16. kv: (..., (num_streams + 1) * hidden) bf16, a key for each stream
    and then the value. weight_hidden, weight_embed: (num_streams, hidden) bf16. image_token_mask: (...,) bool or None.
    Gradients need four streams.

    output = x + sigmoid(r(<RMSNorm(x; weight_hidden), RMSNorm(k; weight_embed)> / sqrt(hidden))) * v, where r(p) is
    sqrt(max(|p|, clamp_value)) with the sign of p. A weight that has a fp32 attribute `main_grad` gets its gradient
    added there, and none is returned for it.
    """
    inputs = hidden_states, kv, weight_hidden, weight_embed
    given = *inputs, clamp_value, eps, image_token_mask
    if not torch.is_grad_enabled() or not any(each.requires_grad for each in inputs):
        return _run_on_one(None, *given)  # saves nothing
    result: torch.Tensor = EngramGateFn.apply(*given)
    return result


class EngramGate(torch.nn.Module):
    """Looks the n-grams that end at each token up in tables and adds what they hold to the residual streams.

    vocab_sizes: for each order from 2 on, the sizes of its tables, as many for each. Rows of tables are table_dim wide;
    a token's rows side by side, times a projection, are its keys and value. All parameters are bf16 and trainable:
    `table` (rows of all tables, table_dim), `projection` ((num_streams + 1) * hidden, columns * table_dim),
    `weight_hidden` and `weight_embed` (num_streams, hidden). Multipliers of the hash are odd and drawn from `seed`.
    """

    multipliers: torch.Tensor
    vocab_sizes: torch.Tensor
    offsets: torch.Tensor

    def __init__(
        self,
        hidden: int,
        vocab_sizes: Sequence[Sequence[int]],
        table_dim: int,
        num_streams: int = 4,
        clamp_value: float = 1e-6,
        eps: float = 1e-6,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.clamp_value, self.eps = clamp_value, eps
        sizes = torch.tensor([list(each) for each in vocab_sizes], dtype=torch.int32)[None]
        generator = torch.Generator().manual_seed(seed)
        multipliers = torch.randint(2**62, (1, sizes.shape[1] + 1), generator=generator) * 2 + 1
        for name, value in (("multipliers", multipliers), ("vocab_sizes", sizes), ("offsets", make_offsets(sizes))):
            self.register_buffer(name, value.to(device), persistent=True)
        self.table = _parameter((int(sizes.sum()), table_dim), 1.0, device)
        num_inputs = sizes[0].numel() * table_dim
        self.projection = _parameter(((num_streams + 1) * hidden, num_inputs), num_inputs**-0.5, device)
        ones = torch.ones((2, num_streams, hidden), dtype=torch.bfloat16, device=device)
        self.weight_hidden, self.weight_embed = (torch.nn.Parameter(each.clone()) for each in ones)

    def forward(
        self,
        hidden_states: torch.Tensor,
        ngram_token_ids: torch.Tensor,
        image_token_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states: (..., num_streams, hidden) bf16; ngram_token_ids: (..., ngram) int32, the n-gram that ends at
        each token; image_token_mask: (...,) bool or None, tokens that are passed on as they are."""
        ids = merge_tokens(ngram_token_ids, 1)
        rows = engram_hash(ids, self.multipliers, self.vocab_sizes, self.offsets)[0]
        # Rows of image tokens are -1: any other will do, the gate passes these tokens on
        found = torch.nn.functional.embedding(rows.clamp(min=0), self.table)
        kv = torch.nn.functional.linear(found.flatten(1), self.projection)
        kv = kv.view(*hidden_states.shape[:-2], kv.shape[1])
        weights = self.weight_hidden, self.weight_embed
        return engram_gate(hidden_states, kv, *weights, self.clamp_value, self.eps, image_token_mask)

    def extra_repr(self) -> str:
        """Sizes, for printing."""
        num_streams, hidden = self.weight_hidden.shape
        rows, table_dim = self.table.shape
        return f"hidden={hidden}, num_streams={num_streams}, table_rows={rows}, table_dim={table_dim}"


def _run_on_one(
    ctx: Any,
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp_value: float,
    eps: float,
    image_token_mask: torch.Tensor | None,
) -> torch.Tensor:
    """The gate with keys and values in one tensor."""
    x = merge_tokens(hidden_states, 2)
    num_streams, hidden = x.shape[1:]
    wanted = (*hidden_states.shape[:-2], (num_streams + 1) * hidden)
    if kv.shape != wanted:
        raise argument_error("modeling.engram_gate", "kv", f"have shape {wanted}", tuple(kv.shape))
    rows = merge_tokens(kv, 1).view(x.shape[0], num_streams + 1, hidden)
    mask = None if image_token_mask is None else image_token_mask.reshape(-1)
    return run_forward(ctx, hidden_states.shape, x, rows, weight_hidden, weight_embed, clamp_value, eps, mask)


# ---- what the functions of both generations share --------------------------------------------------------------------


def merge_tokens(x: torch.Tensor, num_kept: int) -> torch.Tensor:
    """x with its leading dimensions made one; the last num_kept stay. Dense rows are not copied."""
    kept = x.shape[x.dim() - num_kept :]
    return x.reshape(math.prod(x.shape[: x.dim() - num_kept]), *kept)


def run_forward(
    ctx: Any,
    shape: torch.Size,
    x: torch.Tensor,
    kv: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    weight_hidden: torch.Tensor,
    weight_embed: torch.Tensor,
    clamp_value: float,
    eps: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """The gate of (num_tokens, num_streams, hidden) rows; what the backward pass needs is left in ctx, unless None."""
    weight = fused_weight(weight_hidden, weight_embed)
    needs_backward = ctx is not None and any(ctx.needs_input_grad)
    x = x.contiguous()
    output, *saved = engram_gate_fwd(x, kv, weight, eps, clamp_value, needs_backward, mask)
    if needs_backward:
        pair = kv if isinstance(kv, tuple) else (kv,)
        ctx.save_for_backward(weight_hidden, weight_embed, weight, x, mask, *saved, *pair)
        ctx.shape, ctx.clamp_value = shape, clamp_value
        # Saved tensors come back as other objects, without attributes
        ctx.weights = weight_hidden, weight_embed
    return output.view(shape)


def run_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[Any, ...]:
    """(grad of hidden_states, of kv or of the pair, of weight_hidden, of weight_embed)."""
    weight_hidden, weight_embed, weight, x, mask, dot, gate_score, rstd_x, rstd_k, *pair = ctx.saved_tensors
    kv = pair[0] if len(pair) == 1 else tuple(pair)
    rows = grad_output.reshape(x.shape).contiguous()
    saved = dot, gate_score, rstd_x, rstd_k
    grad_x, grad_kv, grad_w = engram_gate_bwd(rows, x, kv, weight, *saved, ctx.clamp_value, mask)
    buffers = [getattr(each, "main_grad", None) for each in ctx.weights]
    totals = [torch.zeros_like(weight) if buffer is None else buffer for buffer in buffers]
    grad_w_reduce(grad_w, weight_hidden, weight_embed, *totals)
    returned = [total if buffer is None else None for total, buffer in zip(totals, buffers, strict=True)]
    return (grad_x.view(ctx.shape), grad_kv, *returned)


def _parameter(shape: tuple[int, int], scale: float, device: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter((torch.randn(shape, device=device) * scale).bfloat16())
