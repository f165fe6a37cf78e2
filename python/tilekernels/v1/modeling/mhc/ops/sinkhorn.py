"""Sinkhorn's normalisation of mixes."""

from .....modeling.mhc.ops import sinkhorn as _sinkhorn
from ...._asserting import asserting

sinkhorn_normalize = asserting(_sinkhorn.sinkhorn_normalize)
