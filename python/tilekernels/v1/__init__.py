"""Generation 1 of the operators: its names, argument lists and results, over the same kernels.

For programs and tests written for it: `import tilekernels.v1 as tile_kernels`. Its kernel factories are not here. What
differs from it: more sizes are taken, and argument errors are ValueErrors or TypeErrors as well as AssertionErrors.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import config, engram, modeling, moe, quant, testing, torch, transpose
    from .config import get_device_num_sms, get_num_sms, set_num_sms

_LAZY_MODULES = ("config", "engram", "modeling", "moe", "quant", "testing", "torch", "transpose")
_CONFIG_NAMES = ("get_device_num_sms", "get_num_sms", "set_num_sms")

__all__ = [
    "config",
    "engram",
    "get_device_num_sms",
    "get_num_sms",
    "modeling",
    "moe",
    "quant",
    "set_num_sms",
    "testing",
    "torch",
    "transpose",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _CONFIG_NAMES:
        return getattr(importlib.import_module(f"{__name__}.config"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
