"""How a kernel uses device helpers: `include("cast.cuh", "scale.cuh")` once inside T.Kernel, then T.call_extern.

Headers are looked up in the family's folder and in common; they guard themselves against being read twice.
"""

from __future__ import annotations

from typing import Any

import tilelang.language as T


def include(*headers: str) -> Any:
    """Put `#include "header"` lines on top of the kernel's CUDA source."""
    return T.import_source("".join(f'#include "{header}"\n' for header in headers))


def aligned(num_bytes: int, pointer: Any) -> Any:
    """The pointer of a tensor for a helper that moves so many bytes at once: the runtime guards the alignment.

    Needs `include("aligned.cuh")`; `pointer` is `T.access_ptr(...)`.
    """
    return T.call_extern("handle", f"tk::aligned<{num_bytes}>", pointer)
