"""Recomputation of many layers."""

from .....modeling.mhc.ops import multilayer_recompute as _multilayer_recompute
from ...._asserting import asserting

mhc_multilayer_recompute = asserting(_multilayer_recompute.mhc_multilayer_recompute)
