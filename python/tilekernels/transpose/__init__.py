"""Matrix transposition of 1-, 2- and 4-byte elements."""

from .transpose import batched_transpose as batched_transpose
from .transpose import transpose as transpose
