"""References of hyper-connections, differentiable."""

from ...modeling.mhc.reference import expand_to_mhc_ref as expand_to_mhc_ref
from ...modeling.mhc.reference import mhc_head_compute_mix_ref as mhc_head_compute_mix_ref
from ...modeling.mhc.reference import mhc_post_ref as mhc_post_ref
from ...modeling.mhc.reference import mhc_pre_apply_mix_ref as mhc_pre_apply_mix_ref
from ...modeling.mhc.reference import mhc_pre_norm_fn_ref as mhc_pre_norm_fn_ref
from ...modeling.mhc.reference import mhc_pre_split_mixes_ref as mhc_pre_split_mixes_ref
from ...modeling.mhc.reference import sinkhorn_normalize_ref as sinkhorn_normalize_ref
