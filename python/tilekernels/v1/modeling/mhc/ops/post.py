"""The residual streams behind a layer."""

from .....modeling.mhc.ops import post as _post
from .....modeling.mhc.ops.post import MHCPost as MHCPost
from ...._asserting import asserting

mhc_post = asserting(_post.mhc_post)
mhc_post_bwd = asserting(_post.mhc_post_bwd)
mhc_post_fwd = asserting(_post.mhc_post_fwd)
