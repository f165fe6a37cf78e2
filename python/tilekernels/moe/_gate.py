"""What the two generations of the expert gate share: argument checks, and the steps of their references in plain
torch.

Sums follow the order of the kernels, and no product is fused with a sum, so that on a GPU the references give the
kernels' bytes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import argument_error, shape_of
from .topk_gate import topk_gate_ref

WARP = 32
MAX_TOPK = 32  # a warp holds one selected expert per lane
MAX_EXPERTS = 1024  # a warp holds all scores of a token in registers
EPSILON = 1e-20  # added to sums of weights, so that a token without experts divides by something

# Which replica of an expert serves token t: (ep_rank + t * this) modulo their number.
REPLICA_STEP = 23333


# ---- arguments -------------------------------------------------------------------------------------------------------


def check_logits(name: str, argument: str, num_experts: int) -> None:
    """What both gates ask of the number of experts."""
    if num_experts % 4 != 0:
        raise argument_error(name, argument, "have a multiple of 4 experts", num_experts)
    if num_experts > MAX_EXPERTS:
        raise argument_error(name, argument, f"have at most {MAX_EXPERTS} experts", num_experts)


def check_topk(name: str, num_topk: Any, num_experts: int, num_shared: int) -> None:
    """num_topk, already known to be from 1 to 32, fits into the experts, and into a warp together with the shared
    ones."""
    if num_topk > num_experts:
        raise argument_error(name, "num_topk", f"be at most the number of experts {num_experts}", num_topk)
    if num_topk + num_shared > MAX_TOPK:
        requirement = f"be at most {MAX_TOPK} together with {num_shared} shared experts"
        raise argument_error(name, "num_topk", requirement, num_topk)


def check_both_or_neither(name: str, first: tuple[str, Any], second: tuple[str, Any]) -> None:
    """Two optional arguments that need each other."""
    for (argument, value), (other, other_value) in ((first, second), (second, first)):
        if value is None and other_value is not None:
            raise argument_error(name, argument, f"be given together with {other}", None)


def check_routing(
    name: str,
    num_logical: int,
    fix_routing_mask: torch.Tensor | None,
    to_physical_map: torch.Tensor | None,
    logical_count: torch.Tensor | None,
    unmapped_topk_idx: torch.Tensor | None,
) -> None:
    """The optional tensors of both gates: what belongs together, and how large the maps are. The kernel checks the
    rest."""
    check_both_or_neither(name, ("to_physical_map", to_physical_map), ("logical_count", logical_count))
    if to_physical_map is not None:
        num_rows, num_columns = shape_of(name, "to_physical_map", to_physical_map, 2)
        if num_rows != num_logical:
            raise argument_error(name, "to_physical_map", f"have one row for each of {num_logical} experts", num_rows)
        if num_columns < 1:
            raise argument_error(name, "to_physical_map", "have at least 1 column", num_columns)
    if fix_routing_mask is not None and unmapped_topk_idx is None:
        raise argument_error(name, "unmapped_topk_idx", "be given together with fix_routing_mask", None)


def flatten_mask(mask: Any) -> Any:
    """A mask of any shape as one row; whatever else was passed is left for the check to refuse."""
    return mask.reshape(-1) if isinstance(mask, torch.Tensor) and mask.dim() != 1 else mask


# ---- values, on a CPU ------------------------------------------------------------------------------------------------


def check_fixed_values(name: str, unmapped_topk_idx: torch.Tensor | None, rows: torch.Tensor, num_experts: int) -> None:
    """Raises ArgumentError if a token of fixed routing names an expert that does not exist."""
    if unmapped_topk_idx is None:
        return
    given = unmapped_topk_idx[rows]
    wrong = given[(given < 0) | (given >= num_experts)]
    if wrong.numel():
        requirement = f"hold experts from 0 to {num_experts - 1} in rows of fixed routing"
        raise argument_error(name, "unmapped_topk_idx", requirement, int(wrong[0]))


def check_count_values(name: str, to_physical_map: torch.Tensor | None, logical_count: torch.Tensor | None) -> None:
    """Raises ArgumentError if an expert has no replica, or more than the map has columns."""
    if to_physical_map is None or logical_count is None:
        return
    num_replicas = to_physical_map.shape[1]
    wrong = logical_count[(logical_count < 1) | (logical_count > num_replicas)]
    if wrong.numel():
        requirement = f"hold numbers from 1 to {num_replicas}, the columns of to_physical_map"
        raise argument_error(name, "logical_count", requirement, int(wrong[0]))


# ---- steps of the references -----------------------------------------------------------------------------------------


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), operation by operation."""
    return 1.0 / (1.0 + torch.exp(-x))


def sqrt_softplus(x: torch.Tensor) -> torch.Tensor:
    """sqrt(log1p(exp(x))); above 20 sqrt(x)."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x))).sqrt()


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(x - max) over its sum in the order of `lane_sum`."""
    largest = torch.where(x.isnan(), -torch.inf, x).amax(dim=-1, keepdim=True)
    parts = torch.exp(x - largest)
    return parts / lane_sum(parts)


def butterfly_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of up to 32 columns as 32 lanes take it: x[j] + x[j + 16] first, then distances 8, 4, 2 and 1. (rows,
    1)."""
    x = torch.nn.functional.pad(x, (0, WARP - x.shape[-1]))
    for distance in (16, 8, 4, 2, 1):
        x = x[..., :distance] + x[..., distance : 2 * distance]
    return x


def lane_sum(x: torch.Tensor) -> torch.Tensor:
    """The sum of a row as a warp takes it: lane l adds columns l, l + 32, ...; then the butterfly. (rows, 1)."""
    total = torch.zeros_like(x[..., :1]).expand(*x.shape[:-1], WARP)
    for start in range(0, x.shape[-1], WARP):
        part = x[..., start : start + WARP]
        total = total + torch.nn.functional.pad(part, (0, WARP - part.shape[-1]))
    return butterfly_sum(total)


def sequential_sum(x: torch.Tensor) -> torch.Tensor:
    """1e-20 + x[0] + x[1] + ..., from left to right. (rows, 1)."""
    total = torch.full_like(x[..., :1], EPSILON)
    for column in range(x.shape[-1]):
        total = total + x[..., column : column + 1]
    return total


def keep_best_groups(ranks: torch.Tensor, num_groups: int, num_topk_groups: int) -> torch.Tensor:
    """-inf for experts outside of the num_topk_groups groups whose two best have the largest sum."""
    num_tokens, num_experts = ranks.shape
    grouped = ranks.reshape(num_tokens * num_groups, num_experts // num_groups)
    best_two = grouped.gather(-1, topk_gate_ref(grouped, 2))
    sums = (best_two[:, 0] + best_two[:, 1]).view(num_tokens, num_groups)
    kept = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, topk_gate_ref(sums, num_topk_groups), True)
    return torch.where(kept.repeat_interleave(num_experts // num_groups, dim=1), ranks, -torch.inf)


def take_scores(scores: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(experts with -1 for those that do not exist, their scores with 0 for those)."""
    exists = (experts >= 0) & (experts < scores.shape[1])
    taken = scores.gather(1, torch.where(exists, experts, 0))
    return torch.where(exists, experts, -1), torch.where(exists, taken, 0.0)


def append_shared(
    experts: torch.Tensor, weights: torch.Tensor, num_experts: int, num_shared: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The shared experts num_experts, num_experts + 1, ... with weight 1 behind the routed ones."""
    shared = torch.arange(num_experts, num_experts + num_shared, device=experts.device).expand(experts.shape[0], -1)
    return torch.cat([experts, shared], dim=1), torch.nn.functional.pad(weights, (0, num_shared), value=1.0)


def map_to_physical(
    experts: torch.Tensor, ep_rank: int, to_physical_map: torch.Tensor | None, logical_count: torch.Tensor | None
) -> torch.Tensor:
    """Each token's replica of its logical experts; -1 where there is none."""
    if to_physical_map is None or logical_count is None:
        return experts
    token = torch.arange(experts.shape[0], device=experts.device)[:, None]
    logical = experts.clamp(min=0)
    count = logical_count.long()[logical]
    replica = torch.remainder(ep_rank + token * REPLICA_STEP, count.clamp(min=1))
    exists = (experts >= 0) & (count > 0) & (replica < to_physical_map.shape[1])
    return torch.where(exists, to_physical_map.long()[logical, torch.where(exists, replica, 0)], -1)
