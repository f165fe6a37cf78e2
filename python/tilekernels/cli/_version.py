"""The version as installers show it."""

import importlib.metadata

from .. import __version__

__all__ = ["find_version"]


def find_version() -> str:
    """The version with the label of what was compiled in, 0.1.0+cu130.sm90a; without a label in a source tree."""
    try:
        return importlib.metadata.version("tilekernels")
    except importlib.metadata.PackageNotFoundError:
        return __version__
