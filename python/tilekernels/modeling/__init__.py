"""Autograd functions and modules over the operators, which record no gradients themselves."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import engram, mhc
    from .mhc.pipeline import MHCPipeline

_LAZY_MODULES = ("engram", "mhc")
_LAZY_NAMES = {"MHCPipeline": "mhc.pipeline"}  # name -> module

__all__ = ["MHCPipeline", "engram", "mhc"]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _LAZY_NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY_NAMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
