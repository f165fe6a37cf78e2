"""The operators of generation 1 in plain torch: what its tests compare with, and make data with."""

from .cast import cast as cast
from .cast import cast_back as cast_back
from .cast_e5m6 import cast_back_from_e5m6 as cast_back_from_e5m6
from .cast_e5m6 import cast_to_e5m6 as cast_to_e5m6
from .expand_to_fused import expand_to_fused as expand_to_fused
from .expand_to_fused import expand_to_fused_with_sf as expand_to_fused_with_sf
from .mhc import expand_to_mhc_ref as expand_to_mhc_ref
from .mhc import mhc_head_compute_mix_ref as mhc_head_compute_mix_ref
from .mhc import mhc_post_ref as mhc_post_ref
from .mhc import mhc_pre_apply_mix_ref as mhc_pre_apply_mix_ref
from .mhc import mhc_pre_norm_fn_ref as mhc_pre_norm_fn_ref
from .mhc import mhc_pre_split_mixes_ref as mhc_pre_split_mixes_ref
from .mhc import sinkhorn_normalize_ref as sinkhorn_normalize_ref
from .moe import aux_fi as aux_fi
from .moe import group_count as group_count
from .moe import inplace_unique_group_indices as inplace_unique_group_indices
from .moe import mask_indices_by_tp as mask_indices_by_tp
from .moe import normalize_weight as normalize_weight
from .per_channel_cast_fused import per_channel_cast_fused as per_channel_cast_fused
from .reduce_fused import reduce_fused as reduce_fused
from .swiglu import swiglu_backward as swiglu_backward
from .swiglu import swiglu_forward as swiglu_forward
from .topk import stable_topk as stable_topk
from .topk import top2_sum_gate as top2_sum_gate
from .topk import topk_sum_and_topk_group_idx as topk_sum_and_topk_group_idx
