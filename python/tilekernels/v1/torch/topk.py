"""References of the gates."""

from __future__ import annotations

import torch

from ...moe.top2_sum_gate import top2_sum_gate_ref as top2_sum_gate
from ...moe.topk_gate import topk_gate_ref as stable_topk
from ...moe.topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx_ref

__all__ = ["stable_topk", "top2_sum_gate", "topk_sum_and_topk_group_idx"]


def topk_sum_and_topk_group_idx(scores: torch.Tensor, num_group_sum_topk: int, num_topk_groups: int) -> torch.Tensor:
    """The reference of the operator of that name, which calls its second argument num_topk_sum."""
    return topk_sum_and_topk_group_idx_ref(scores, num_group_sum_topk, num_topk_groups)
