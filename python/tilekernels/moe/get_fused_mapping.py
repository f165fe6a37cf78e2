"""Where each token's copies go in a buffer sorted by expert, and back."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import is_dynamo_compiling, kernel
from ..config import num_sms_for
from ..errors import argument_error, check_int, shape_of
from ..layout import ceildiv
from ..testing.cases import BenchCase
from ._cases import TOP6_OF_RANK, TOP8_OF_RANK, Routing
from ._indices import MAX_EXPERTS, check_below

_NAME = "moe.get_fused_mapping"
_MAX_INT32 = 2**31 - 1

# Entries from which another block pays: each one makes the sum over all blocks longer
_ENTRIES_PER_BLOCK = 1024
# The same for positions, most of which are padding in a small batch: written by one block, those of 256 experts aligned
# to 128 took 49 us for 8 tokens (2026-12-01, H200)
_POSITIONS_PER_BLOCK = 1024

# pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start, expert_end, num_tokens_per_expert,
# and the last one as a list
FusedMapping = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int]
]


def get_fused_mapping(
    topk_idx: torch.Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
) -> FusedMapping:
    """The mapping between tokens and a buffer with one row for each (token, slot), sorted by expert.

    topk_idx: (num_tokens, num_topk) int64, dense: experts below num_experts, negative for slots that go nowhere.
    num_experts: 1 to 1024. alignment: each expert's segment is rounded up to a multiple of it.
    Returns (pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start, expert_end,
    num_tokens_per_expert, num_tokens_per_expert_list), int32. An expert's rows keep the order of (token, slot), then
    comes its padding: -1 in the pos_* tensors, as beyond the last segment; slots that go nowhere are -1 in
    token_topk_to_pos. pos_to_token_topk is token * num_topk + slot. num_tokens_per_expert counts padding too.

    Under torch.compile, and for fake and meta tensors, one of the next two is needed.
    num_expanded_tokens > 0: the length of the pos_* tensors; the list is empty and the host does not wait. Rows that do
    not fit are left out of them, token_topk_to_pos still names their places. 0: the length is the sum of
    num_tokens_per_expert, which the host waits for; with force_no_sync it does not, and the pos_* tensors are empty.
    """
    check_int(_NAME, "num_experts", num_experts, 1, MAX_EXPERTS)
    check_int(_NAME, "num_expanded_tokens", num_expanded_tokens, 0, _MAX_INT32)
    check_int(_NAME, "alignment", alignment, 1, _MAX_INT32)
    num_tokens, num_topk = shape_of(_NAME, "topk_idx", topk_idx, 2)
    most = num_tokens * num_topk + (alignment - 1) * num_experts
    if most > _MAX_INT32:
        raise argument_error(_NAME, "alignment", "keep all positions below 2147483648", alignment)
    wait = num_expanded_tokens == 0 and not force_no_sync
    if wait and not _holds_values(topk_idx):
        requirement = "be given, or force_no_sync set, where no values are: the length of the result depends on them"
        raise argument_error(_NAME, "num_expanded_tokens", requirement, num_expanded_tokens)
    num_positions = most // alignment * alignment if wait else num_expanded_tokens
    most_blocks = max(
        1, ceildiv(num_tokens * num_topk, _ENTRIES_PER_BLOCK), ceildiv(num_positions, _POSITIONS_PER_BLOCK)
    )
    num_blocks = min(num_sms_for(topk_idx.device), most_blocks)

    # Asked for in the call: made before it, they took longer than the launch
    along_positions, along_experts = (torch.int32, 0, num_positions), (torch.int32, 0, num_experts)
    _, *positions, token_topk_to_pos, expert_start, expert_end, num_tokens_per_expert = _get_fused_mapping(
        topk_idx,
        (torch.int32, 0, num_blocks, num_experts),
        *(along_positions,) * 3,
        (torch.int32, 0, num_tokens, num_topk),
        *(along_experts,) * 3,
        alignment,
    )
    counts: list[int] = []
    if wait:
        counts = num_tokens_per_expert.tolist()
        total = sum(counts)
        positions = [each[:total] for each in positions]
    return *positions, token_topk_to_pos, expert_start, expert_end, num_tokens_per_expert, counts


def _holds_values(tensor: torch.Tensor) -> bool:
    """False while torch.compile traces, and for fake and meta tensors."""
    return not is_dynamo_compiling() and type(tensor) is torch.Tensor and not tensor.is_meta


def get_fused_mapping_ref(
    topk_idx: torch.Tensor,
    num_experts: int,
    num_expanded_tokens: int,
    alignment: int,
    force_no_sync: bool = False,
) -> FusedMapping:
    """`get_fused_mapping` in plain torch: a stable sort by expert."""
    num_tokens, num_topk = topk_idx.shape
    wait = num_expanded_tokens == 0 and not force_no_sync
    flat = topk_idx.reshape(-1)
    # One more expert for what goes nowhere
    experts = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, experts, torch.ones_like(experts))
    sizes = (counts[:num_experts] + (alignment - 1)) // alignment * alignment
    ends = sizes.cumsum(0)

    order = torch.argsort(experts, stable=True)
    sorted_experts = experts[order]
    place = torch.arange(flat.shape[0], device=flat.device) - (counts.cumsum(0) - counts)[sorted_experts]
    starts = torch.nn.functional.pad(ends - sizes, (0, 1))
    sorted_pos = torch.where(sorted_experts < num_experts, starts[sorted_experts] + place, -1)
    token_topk_to_pos = torch.empty_like(flat).scatter_(0, order, sorted_pos)

    segment_sizes = sizes.tolist() if wait else []
    num_positions = sum(segment_sizes) if wait else num_expanded_tokens
    # One more position for what has none
    target = torch.where((sorted_pos >= 0) & (sorted_pos < num_positions), sorted_pos, num_positions)

    def spread(values: torch.Tensor) -> torch.Tensor:
        result = torch.full((num_positions + 1,), -1, dtype=torch.int32, device=flat.device)
        return result.scatter_(0, target, values.int())[:num_positions]

    return (
        spread(sorted_experts),
        spread(order // max(num_topk, 1)),
        spread(order),
        token_topk_to_pos.int().reshape(num_tokens, num_topk),
        (ends - sizes).int(),
        ends.int(),
        sizes.int(),
        segment_sizes,
    )


def _get_fused_mapping_cpu(topk_idx: torch.Tensor, workspace: torch.Tensor, *outputs: Any) -> None:
    *tensors, alignment = outputs
    check_below(_NAME, "topk_idx", topk_idx, workspace.shape[1])
    results = get_fused_mapping_ref(topk_idx, workspace.shape[1], tensors[0].shape[0], alignment, force_no_sync=True)
    for tensor, result in zip(tensors, results[:7], strict=True):
        assert isinstance(result, torch.Tensor)
        tensor.copy_(result)


_get_fused_mapping = kernel(_NAME, cpu=_get_fused_mapping_cpu)


def bench_cases() -> list[BenchCase]:
    """A batch of a few tokens, the published benchmark's sizes, and all experts of a model; the host never waits."""
    sizes = [(8, 8, 256), (128, 8, 256), (8001, 6, 72), (8192, 8, 256), (65536, 8, 256), (65536, 10, 512)]
    return [_case(routing, 128) for routing in (*(Routing.full(*size) for size in sizes), TOP6_OF_RANK, TOP8_OF_RANK)]


def _case(routing: Routing, alignment: int) -> BenchCase:
    num_positions = routing.num_positions(alignment)

    def make(device: Any) -> dict[str, Any]:
        return {
            "topk_idx": routing.make(device),
            "num_experts": routing.num_experts,
            "num_expanded_tokens": num_positions,
            "alignment": alignment,
        }

    num_bytes = 12 * (routing.num_tokens * routing.num_topk + num_positions + routing.num_experts)
    return BenchCase(_NAME, {**routing.params, "alignment": alignment}, make, num_bytes)
