"""Compiled TileLang kernels for torch tensors: nothing is compiled, traced or fetched at run time.

Operators live in families (`tilekernels.quant.per_token_cast`), loaded when first touched; importing this package loads
neither torch nor the compiled extension, and never touches a GPU.
"""

import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import ArgumentError, ArgumentTypeError, DeviceError, NotBuiltError

if TYPE_CHECKING:
    import torch

    from . import (
        config,
        engram,
        errors,
        gemm,
        layout,
        mhc,
        modeling,
        moe,
        quant,
        rand,
        testing,
        transform,
        transpose,
        v1,
    )

_LAZY_MODULES = (
    "config",
    "engram",
    "errors",
    "gemm",
    "layout",
    "mhc",
    "modeling",
    "moe",
    "quant",
    "rand",
    "testing",
    "transform",
    "transpose",
    "v1",
)
_CONFIG_NAMES = (
    "get_amax_clamp_for_quant",
    "get_device_num_sms",
    "get_num_sms",
    "get_pdl",
    "get_token_alignment",
    "set_amax_clamp_for_quant",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
)

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "DeviceError",
    "NotBuiltError",
    "__version__",
    "config",
    "covers",
    "engram",
    "errors",
    "gemm",
    "get_amax_clamp_for_quant",
    "get_device_num_sms",
    "get_num_sms",
    "get_pdl",
    "get_token_alignment",
    "layout",
    "load_pack",
    "mhc",
    "modeling",
    "moe",
    "preload",
    "quant",
    "rand",
    "set_amax_clamp_for_quant",
    "set_num_sms",
    "set_pdl",
    "set_token_alignment",
    "testing",
    "transform",
    "transpose",
    "v1",
]


def preload(names: str | Sequence[str] | None = None, device: "int | str | torch.device | None" = None) -> None:
    """Loads compiled kernels onto a GPU now, so that no later call does, also not one inside a CUDA graph capture.

    names: kernels as `tilekernels list` prints them ("moe.topk_gate"), or None for all. device: the GPU, or None for
    the current one. Raises ArgumentError for a name that this build lacks, DeviceError where no GPU is usable.
    """
    from ._dispatch import preload_kernels

    preload_kernels([names] if isinstance(names, str) else names, device)


def load_pack(path: "str | os.PathLike[str]") -> None:
    """Adds an overlay pack (`make pack`): variants and whole kernels that this build lacks.

    Calls that find nothing here are tried there, with the same checks. Packs in TILEKERNELS_PACK_PATH are loaded by
    themselves. Raises ArgumentError for a file that is no pack of this version.
    """
    from ._dispatch import load_pack as load

    load(os.fspath(path))


def covers(kernel: str, arch: str | None = None, **axes: Any) -> bool:
    """Whether this build holds a variant of `kernel` with these axis values, for `arch` ("sm_90a") or for any GPU.

    Axes and their values are the ones that `tilekernels list` prints; those left out may have any value. Needs no GPU.
    """
    from ._manifest import find_variants, load_manifest

    return bool(find_variants(load_manifest(), kernel, axes, arch))


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _CONFIG_NAMES:
        return getattr(importlib.import_module(f"{__name__}.config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
