"""A hyper-connection around a layer."""

from ....modeling.mhc import functional as _functional
from ..._asserting import asserting

expand_from_embedding = asserting(_functional.expand_from_embedding)
mhc_head = asserting(_functional.mhc_head)
mhc_post = asserting(_functional.mhc_post)
mhc_pre = asserting(_functional.mhc_pre)
