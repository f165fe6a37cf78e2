"""Mixture of experts: routing, mapping, expansion and reduction."""

from ... import moe as _moe
from ...moe.normalize_weight import normalize_weight_sequential
from .._asserting import asserting

aux_fi = asserting(_moe.aux_fi)
expand_to_fused = asserting(_moe.expand_to_fused)
expand_to_fused_with_sf = asserting(_moe.expand_to_fused_with_sf)
get_fused_mapping = asserting(_moe.get_fused_mapping)
group_count = asserting(_moe.group_count)
inplace_unique_group_indices = asserting(_moe.inplace_unique_group_indices)
mask_indices_by_tp = asserting(_moe.mask_indices_by_tp)
normalize_weight = asserting(normalize_weight_sequential)
reduce_fused = asserting(_moe.reduce_fused)
top2_sum_gate = asserting(_moe.top2_sum_gate)
topk_gate = asserting(_moe.topk_gate)
topk_sum_and_topk_group_idx = asserting(_moe.topk_sum_and_topk_group_idx)
