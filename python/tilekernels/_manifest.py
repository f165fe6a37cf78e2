"""The record of what this build holds: `manifest.json` beside this file, written by the build, read by the command.

Needs neither torch nor the compiled extension.
"""

import functools
import importlib.resources
import json
from collections.abc import Mapping
from typing import Any

from .errors import NotBuiltError, argument_error

__all__ = ["caller_axes", "find_kernel", "find_variants", "load_manifest"]

Manifest = Mapping[str, Any]

_KEYS = ("schema", "version", "profile", "archs", "kernels", "variants")


@functools.cache
def load_manifest() -> Manifest:
    """The manifest of the installed build; raises NotBuiltError in a tree that was never built."""
    file = importlib.resources.files(__package__) / "manifest.json"
    if not file.is_file():
        raise NotBuiltError(
            "tilekernels: this copy holds no manifest.json, so it was never built; "
            "install a wheel, or build one with `make wheel`"
        )
    try:
        manifest: Manifest = json.loads(file.read_text(encoding="utf-8"))
        missing = [key for key in _KEYS if key not in manifest]
    except (ValueError, TypeError) as error:
        raise NotBuiltError(f"tilekernels: manifest.json is damaged ({error}); install the wheel again") from error
    if missing:
        raise NotBuiltError(f"tilekernels: manifest.json lacks {', '.join(missing)}; install the wheel again")
    return manifest


def find_kernel(manifest: Manifest, name: str) -> Mapping[str, Any] | None:
    """The manifest's entry of a kernel, or None if this build holds no such kernel."""
    return next((entry for entry in manifest["kernels"] if entry["name"] == name), None)


def caller_axes(kernel: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The axes that a call decides, by its tensors or by name; machine forms are the library's own choice."""
    return [axis for axis in kernel["axes"] if axis["kind"] != "forms"]


def find_variants(
    manifest: Manifest, kernel: str, axes: Mapping[str, Any], arch: str | None = None
) -> list[Mapping[str, Any]]:
    """The variants of `kernel` with these axis values, given as themselves or as text, for one arch or for all.

    None for a kernel or a value that was not compiled. Raises ArgumentError for an axis that the kernel does not have.
    """
    entry = find_kernel(manifest, kernel)
    if entry is None:
        return []
    wanted = {name: _parse_value(_find_axis(entry, name), value) for name, value in axes.items()}
    return [
        variant
        for variant in manifest["variants"]
        if variant["kernel"] == kernel
        and arch in (None, variant["arch"])
        and all(variant["config"].get(name) == value for name, value in wanted.items())
    ]


def _find_axis(kernel: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    axes = {axis["name"]: axis for axis in caller_axes(kernel)}
    if name not in axes:
        raise argument_error(kernel["name"], "axis", f"be one of {', '.join(axes) or '(it has none)'}", name)
    return axes[name]


def _parse_value(axis: Mapping[str, Any], value: Any) -> Any:
    """The declared value that `value` means, by itself or as text; if there is none, `value`, which fits nothing."""
    return next((known for known in axis["values"] if str(known).lower() == str(value).lower()), value)
