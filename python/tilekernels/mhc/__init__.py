"""Manifold hyper-connections: streams of residuals, their mixes and their norms. Operators write into given tensors."""

from .expand import expand_to_mhc_bwd as expand_to_mhc_bwd
from .expand import expand_to_mhc_fwd as expand_to_mhc_fwd
from .fn_normw_merge import mhc_fn_normw_merge_bwd as mhc_fn_normw_merge_bwd
from .fn_normw_merge import mhc_fn_normw_merge_fwd as mhc_fn_normw_merge_fwd
from .norm_fn import mhc_pre_norm_fn_partials as mhc_pre_norm_fn_partials
from .norm_fn import mhc_pre_norm_fn_partials_bwd as mhc_pre_norm_fn_partials_bwd
from .pre_big_fuse import mhc_pre_big_fuse_fwd as mhc_pre_big_fuse_fwd
from .reduce_partials_and_rmsnorm import mhc_reduce_partials_and_rmsnorm_bwd as mhc_reduce_partials_and_rmsnorm_bwd
from .reduce_partials_and_rmsnorm import mhc_reduce_partials_and_rmsnorm_fwd as mhc_reduce_partials_and_rmsnorm_fwd
