"""The input of a layer."""

from .....modeling.mhc.ops import pre_apply_mix as _pre_apply_mix
from .....modeling.mhc.ops.pre_apply_mix import MHCPreApplyMix as MHCPreApplyMix
from ...._asserting import asserting

mhc_pre_apply_mix = asserting(_pre_apply_mix.mhc_pre_apply_mix)
