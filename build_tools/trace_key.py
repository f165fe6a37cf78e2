"""The key of a trace: one hash over all that its result depends on. Imports neither TileLang nor the kernel files."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import PlanError
from .kernel_files import KERNELS_ROOT, PACKAGE_ROOT

if TYPE_CHECKING:
    from .plan import Variant

# The code that makes a trace, besides the kernel's own files
_STAGE_FILES = (
    "errors.py",
    "expr.py",
    "kernel_files.py",
    "trace.py",
    "trace_access.py",
    "trace_arguments.py",
    "trace_checks.py",
    "trace_guards.py",
    "trace_print.py",
    "trace_tensor_maps.py",
)
_DEVICE_HEADERS = (".cuh", ".h", ".hpp")


def trace_key(variant: Variant) -> str:
    """sha256 (hex) over the kernel file, its imports, the stage, TileLang's version, pass configs, config and arch."""
    stage = Path(__file__).parent
    files = [
        *kernel_sources(variant.file, variant.root),
        KERNELS_ROOT / "declare.py",
        *(stage / name for name in _STAGE_FILES),
    ]
    content = {
        # By content, not by place: a build in another folder finds the same keys
        "files": sorted({(file.name, _read(file, file.stat().st_mtime_ns).digest) for file in files}),
        "tilelang": tilelang_version(),
        "kernel": variant.kernel,
        "config": variant.config,
        "arch": variant.arch,
        "pass_configs": variant.pass_configs,
        "flags": variant.flags,
        "symbol": variant.symbol,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=1)
def tilelang_version() -> str:
    """The installed TileLang's version, without importing it."""
    try:
        return importlib.metadata.version("tilelang")
    except importlib.metadata.PackageNotFoundError:
        raise PlanError(
            "TileLang is not installed: building kernels needs it, using the built package does not"
        ) from None


def kernel_sources(file: Path, root: Path) -> set[Path]:
    """The kernel file, what it imports of kernels_src and tilekernels, directly or not, and the headers named there."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        current = waiting.pop()
        if current in found or not current.is_file():
            continue
        found.add(current)
        read = _read(current, current.stat().st_mtime_ns)
        waiting += _modules(current, read.imports, root)
        waiting += [current.parent / "__init__.py"] if PACKAGE_ROOT not in current.parents else []
        waiting += [folder / header for header in read.headers for folder in _header_folders(current, root)]
    return found


class _File:
    """One version of a file: its hash, the modules it imports as (level, module, names), the headers it names."""

    def __init__(self, file: Path) -> None:
        content = file.read_bytes()
        self.digest = hashlib.sha256(content).hexdigest()
        self.imports: list[tuple[int, str, tuple[str, ...]]] = []
        self.headers: list[str] = []
        if file.suffix != ".py":
            self.headers += re.findall(r'^\s*#\s*include\s+"([^"]+)"', content.decode(), re.MULTILINE)
            return
        for node in ast.walk(ast.parse(content, str(file))):
            if isinstance(node, ast.ImportFrom):
                self.imports.append((node.level, node.module or "", tuple(alias.name for alias in node.names)))
            elif isinstance(node, ast.Import):
                self.imports += [(0, alias.name, ()) for alias in node.names]
            elif (
                isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(_DEVICE_HEADERS)
            ):
                self.headers.append(node.value)


@functools.cache
def _read(file: Path, _modified: int) -> _File:
    return _File(file)


def _header_folders(file: Path, root: Path) -> list[Path]:
    return [file.parent, root / "common", root]


def _modules(file: Path, imports: list[tuple[int, str, tuple[str, ...]]], root: Path) -> list[Path]:
    """The files that the imports of `file` may mean, packages and modules alike; not all of them exist."""
    candidates = []
    for level, module, names in imports:
        parts = module.split(".") if module else []
        if level:
            base = file.parents[level - 1]
        elif parts and parts[0] == "kernels_src":
            base, parts = root, parts[1:]
        elif parts and parts[0] == "tilekernels":
            base, parts = PACKAGE_ROOT, parts[1:]
        else:
            continue
        for path in [parts, *([*parts, name] for name in names)]:
            target = base.joinpath(*path)
            candidates += [target.with_suffix(".py"), target / "__init__.py"] if path else [target / "__init__.py"]
    # The package's own __init__ imports lazily: kernels see single modules of it
    return [candidate for candidate in candidates if candidate != PACKAGE_ROOT / "__init__.py"]
