"""What SwiGLU forward and backward share: which rows are processed and how they are weighted, checks, and the formula
in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import ArgumentError, argument_error, argument_type_error
from ..layout import ceildiv
from ._checks import shape_of

# Warps of a call: with fewer tokens each of their rows is shared by several. Eight for each of the four schedulers of
# 132 SMs.
_WARPS = 4224
_TILE = 512  # channels that a warp takes at a time


class Routing(NamedTuple):
    """Which rows are processed, by either interface, and what each is weighted by."""

    psum: torch.Tensor | None = None  # segments of experts: where each one's rows end
    topk_weights: torch.Tensor | None = None  # of each row, or of each (token, slot) with pos_to_token_topk
    scaling: float = 1.0
    pos_to_expert: torch.Tensor | None = None  # negative for rows that are passed over
    pos_to_token_topk: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of the kernels' parameters."""
        return self.psum, self.pos_to_expert, self.pos_to_token_topk, self.topk_weights


def routing_by_segments(
    operator: str,
    num_tokens: int,
    psum: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    routed_scaling_factor: float | None,
) -> Routing:
    """The routing of generation 2's arguments."""
    if routed_scaling_factor is not None and topk_weights is None:
        raise argument_error(
            operator, "routed_scaling_factor", "be None where topk_weights is None", routed_scaling_factor
        )
    if topk_weights is not None and getattr(topk_weights, "shape", None) != (num_tokens,):
        actual = tuple(topk_weights.shape) if isinstance(topk_weights, torch.Tensor) else type(topk_weights).__name__
        raise argument_error(operator, "topk_weights", f"have shape {(num_tokens,)}", actual)
    scaling = (
        1.0 if routed_scaling_factor is None else check_number(operator, "routed_scaling_factor", routed_scaling_factor)
    )
    return Routing(psum, topk_weights, scaling)


def check_number(operator: str, argument: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise argument_type_error(operator, argument, "be a number", type(value).__name__)
    return float(value)


def check_limit(operator: str, argument: str, limit: float | None, clamped_count: object, num_counts: int) -> None:
    """The clamp value, and the tensor that counts what it changes."""
    if limit is not None and not check_number(operator, argument, limit) >= 0:
        raise argument_error(operator, argument, "be at least 0", limit)
    if clamped_count is None:
        return
    if limit is None:
        raise argument_error(operator, "clamped_count", f"be None where {argument} is None", "a tensor")
    if isinstance(clamped_count, torch.Tensor) and clamped_count.shape != (num_counts,):
        raise argument_error(operator, "clamped_count", f"have shape {(num_counts,)}", tuple(clamped_count.shape))


def halves_of(operator: str, x: torch.Tensor, multiple: int) -> tuple[int, int]:
    """(tokens, channels of the result) of rows that hold gates, then values."""
    num_tokens, width = shape_of(operator, "x", x)
    if width % (2 * multiple):
        raise argument_error(operator, "x", f"have a multiple of {2 * multiple} columns", width)
    return num_tokens, width // 2


def num_parts(num_tokens: int, hidden: int) -> int:
    """Warps that share a row."""
    return min(ceildiv(_WARPS, max(num_tokens, 1)), max(ceildiv(hidden, _TILE), 1))


# ---- in plain torch --------------------------------------------------------------------------------------------------


def row_weights(routing: Routing, num_tokens: int) -> torch.Tensor | None:
    """What each row is multiplied by: fp32 (num_tokens, 1)."""
    weights, position = routing.topk_weights, routing.pos_to_token_topk
    if weights is None:
        return None
    weights = weights.reshape(-1)
    if position is not None:
        is_known = (position >= 0) & (position < weights.numel())
        padded = torch.nn.functional.pad(weights, (0, 1))
        weights = padded[torch.where(is_known, position, weights.numel()).long()]
    return (weights[:num_tokens] * routing.scaling).unsqueeze(1)


def rows_of_experts(routing: Routing, num_tokens: int, alignment: int) -> torch.Tensor | None:
    """Which rows are processed: bool (num_tokens,), None for all."""
    valid = None
    if routing.psum is not None:
        ends = routing.psum.long()
        starts = torch.nn.functional.pad((ends + alignment - 1) // alignment * alignment, (1, 0))[:-1]
        row = torch.arange(num_tokens, device=ends.device).unsqueeze(1)
        valid = ((row >= starts) & (row < ends)).any(dim=1)
    if routing.pos_to_expert is not None:
        has_expert = routing.pos_to_expert >= 0
        valid = has_expert if valid is None else valid & has_expert
    return valid


def rows_of_padding(routing: Routing, num_tokens: int, alignment: int) -> torch.Tensor | None:
    """Which rows lie between the end of an expert and the start of the next: bool (num_tokens,), None for no row."""
    if routing.psum is None:
        return None
    ends = routing.psum.long()
    row = torch.arange(num_tokens, device=ends.device).unsqueeze(1)
    return ((row >= ends) & (row < (ends + alignment - 1) // alignment * alignment)).any(dim=1)


def clamp_halves(x: torch.Tensor, limit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates and values in fp32, clamped."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def swiglu(x: torch.Tensor, limit: float | None, weights: torch.Tensor | None) -> torch.Tensor:
    """fp32 (num_tokens, hidden): gate / (1 + exp(-gate)) * up * weight, each operation rounded."""
    gate, up = clamp_halves(x, limit)
    values = gate / (1 + torch.exp(-gate)) * up
    return values if weights is None else values * weights


def count_clamped(x: torch.Tensor, limit: float, valid: torch.Tensor | None) -> torch.Tensor:
    """int64 (4,): gates above the limit, values above it and below its negative, and all of them, of valid rows."""
    gate, up = (x if valid is None else x[valid]).float().chunk(2, dim=-1)
    counted = [(gate > limit).sum(), (up > limit).sum(), (up < -limit).sum()]
    return torch.stack([*counted, torch.tensor(gate.numel(), device=x.device)])


def refuse_fmt(operator: str, fmt: object, names: str) -> ArgumentError:
    return argument_error(operator, "fmt", f"be {names}", repr(fmt))
