"""Residual streams from embeddings."""

from .....modeling.mhc.ops import expand as _expand
from .....modeling.mhc.ops.expand import ExpandToMHCFn as ExpandToMHCFn
from ...._asserting import asserting

expand_to_mhc = asserting(_expand.expand_to_mhc)
