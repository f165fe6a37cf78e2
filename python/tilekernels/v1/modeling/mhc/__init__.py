"""Hyper-connections with gradients."""

from .functional import expand_from_embedding as expand_from_embedding
from .functional import mhc_head as mhc_head
from .functional import mhc_pre as mhc_pre
