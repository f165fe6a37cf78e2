"""Autograd functions over the operators. Loaded when first touched."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import engram, mhc

_LAZY_MODULES = ("engram", "mhc")

__all__ = ["engram", "mhc"]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
