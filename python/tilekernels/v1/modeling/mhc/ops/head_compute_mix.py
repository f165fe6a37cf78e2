"""The mixes of the last residual streams."""

from .....modeling.mhc.ops import head_compute_mix as _head_compute_mix
from .....modeling.mhc.ops.head_compute_mix import MHCHeadComputeMix as MHCHeadComputeMix
from ...._asserting import asserting

mhc_head_compute_mix = asserting(_head_compute_mix.mhc_head_compute_mix)
