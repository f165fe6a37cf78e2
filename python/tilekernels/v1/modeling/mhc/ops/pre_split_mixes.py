"""A token's mixes, split by their use."""

from .....modeling.mhc.ops import pre_split_mixes as _pre_split_mixes
from .....modeling.mhc.ops.pre_split_mixes import MHCPreSplitMixes as MHCPreSplitMixes
from ...._asserting import asserting

mhc_pre_split_mixes = asserting(_pre_split_mixes.mhc_pre_split_mixes)
