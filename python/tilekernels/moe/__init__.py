"""Mixture of experts: routing, mapping, expansion and reduction."""

from .aux_fi import aux_fi as aux_fi
from .expand_to_fused import expand_to_fused as expand_to_fused
from .expand_to_fused import expand_to_fused_with_sf as expand_to_fused_with_sf
from .fused_topk_gating import fused_topk_gating as fused_topk_gating
from .get_fused_mapping import get_fused_mapping as get_fused_mapping
from .group_count import group_count as group_count
from .inplace_unique_group_indices import inplace_unique_group_indices as inplace_unique_group_indices
from .mask_indices_by_tp import mask_indices_by_tp as mask_indices_by_tp
from .moe_topk_gate import moe_topk_gate as moe_topk_gate
from .moe_topk_gate import moe_topk_gate_backward as moe_topk_gate_backward
from .moe_topk_gate import moe_topk_gate_forward as moe_topk_gate_forward
from .normalize_weight import normalize_weight as normalize_weight
from .reduce_fused import reduce_fused as reduce_fused
from .scoring import ScoringFunc as ScoringFunc
from .top2_sum_gate import top2_sum_gate as top2_sum_gate
from .topk_gate import topk_gate as topk_gate
from .topk_sum_and_topk_group_idx import topk_sum_and_topk_group_idx as topk_sum_and_topk_group_idx
