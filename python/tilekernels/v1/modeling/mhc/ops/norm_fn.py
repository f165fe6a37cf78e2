"""A token's mixes from its residual streams."""

from .....modeling.mhc.ops import norm_fn as _norm_fn
from .....modeling.mhc.ops.norm_fn import MHCPreNormFn as MHCPreNormFn
from ...._asserting import asserting

mhc_pre_norm_fn = asserting(_norm_fn.mhc_pre_norm_fn)
