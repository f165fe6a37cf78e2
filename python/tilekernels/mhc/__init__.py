"""Manifold hyper-connections: streams of residuals, their mixes and their norms. Operators write into given tensors."""

from .expand import expand_to_mhc_bwd as expand_to_mhc_bwd
from .expand import expand_to_mhc_fwd as expand_to_mhc_fwd
from .fn_normw_merge import mhc_fn_normw_merge_bwd as mhc_fn_normw_merge_bwd
from .fn_normw_merge import mhc_fn_normw_merge_fwd as mhc_fn_normw_merge_fwd
from .head_compute_mix import mhc_head_compute_mix_bwd as mhc_head_compute_mix_bwd
from .head_compute_mix import mhc_head_compute_mix_fwd as mhc_head_compute_mix_fwd
from .multilayer_recompute import mhc_multilayer_recompute as mhc_multilayer_recompute
from .norm_fn import mhc_pre_norm_fn_partials as mhc_pre_norm_fn_partials
from .norm_fn import mhc_pre_norm_fn_partials_bwd as mhc_pre_norm_fn_partials_bwd
from .post import mhc_post_bwd as mhc_post_bwd
from .post import mhc_post_fwd as mhc_post_fwd
from .pre_apply_mix import mhc_pre_apply_mix_bwd as mhc_pre_apply_mix_bwd
from .pre_apply_mix import mhc_pre_apply_mix_fwd as mhc_pre_apply_mix_fwd
from .pre_big_fuse import mhc_pre_big_fuse_fwd as mhc_pre_big_fuse_fwd
from .pre_split_mixes import mhc_pre_split_mixes_bwd as mhc_pre_split_mixes_bwd
from .pre_split_mixes import mhc_pre_split_mixes_fwd as mhc_pre_split_mixes_fwd
from .reduce_partials_and_rmsnorm import mhc_reduce_partials_and_rmsnorm_bwd as mhc_reduce_partials_and_rmsnorm_bwd
from .reduce_partials_and_rmsnorm import mhc_reduce_partials_and_rmsnorm_fwd as mhc_reduce_partials_and_rmsnorm_fwd
from .sinkhorn import mhc_sinkhorn_bwd as mhc_sinkhorn_bwd
from .sinkhorn import mhc_sinkhorn_fwd as mhc_sinkhorn_fwd
