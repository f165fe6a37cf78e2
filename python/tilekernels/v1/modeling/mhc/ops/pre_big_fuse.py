"""All of a hyper-connection before a layer."""

from .....modeling.mhc.ops import pre_big_fuse as _pre_big_fuse
from ...._asserting import asserting

mhc_pre_big_fuse = asserting(_pre_big_fuse.mhc_pre_big_fuse)
