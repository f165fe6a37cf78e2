"""Matrix products."""

from .matmul import matmul as matmul
