"""Matrix transposition."""

from ... import transpose as _transpose
from .._asserting import asserting

batched_transpose = asserting(_transpose.batched_transpose)
transpose = asserting(_transpose.transpose)
