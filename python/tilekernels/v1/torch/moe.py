"""References of routing."""

from ...moe.aux_fi import aux_fi_ref as aux_fi
from ...moe.group_count import group_count_ref as group_count
from ...moe.inplace_unique_group_indices import inplace_unique_group_indices_ref as inplace_unique_group_indices
from ...moe.mask_indices_by_tp import mask_indices_by_tp_ref as mask_indices_by_tp
from ...moe.normalize_weight import normalize_weight_sequential_ref as normalize_weight

__all__ = ["aux_fi", "group_count", "inplace_unique_group_indices", "mask_indices_by_tp", "normalize_weight"]
