"""Finding and importing the kernel files of kernels_src.

Plan lists kernels without TileLang (its import takes seconds, and `list` must work where it is not installed): kernel
files are then imported over an inert stand-in for it. Trace imports the same files over the real one. Either way
nothing stays behind in sys.modules, so that the next import reads the files as they then are.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kernels_src
from kernels_src import declare

from .errors import PlanError

REPOSITORY = Path(__file__).resolve().parents[1]
KERNELS_ROOT = REPOSITORY / "kernels_src"
PACKAGE_ROOT = REPOSITORY / "python" / "tilekernels"
_KEPT = ("kernels_src", "kernels_src.declare")


def find_kernel_files(root: Path) -> list[Path]:
    """All `<root>/<family>/<op>.py`, sorted; `common` holds no kernels."""
    return sorted(
        file
        for file in root.glob("*/*.py")
        if file.parent.name not in ("common", "__pycache__") and file.name != "__init__.py"
    )


def load_kernels(root: Path | None = None) -> dict[str, declare.Kernel]:
    """Every declared kernel by name, sorted, without TileLang. PlanError lists all files that cannot be imported."""
    root = root or KERNELS_ROOT
    failures = []
    with importing(root, stand_in=True):
        for file in find_kernel_files(root):
            try:
                import_kernel_file(root, file)
            except Exception as error:
                failures.append(f"{file}{line_in(file, error, ':{}')}: {type(error).__name__}: {error}")
        kernels = dict(sorted(declare.KERNELS.items()))
    if failures:
        raise PlanError("kernel files that cannot be imported:\n  " + "\n  ".join(failures))
    return kernels


def import_kernel_file(root: Path, file: Path) -> types.ModuleType:
    """Import one kernel file under its name in kernels_src; call it inside `importing`."""
    return importlib.import_module(".".join(("kernels_src", *file.relative_to(root).with_suffix("").parts)))


@contextlib.contextmanager
def importing(root: Path, stand_in: bool) -> Iterator[None]:
    """Inside, families under `root` can be imported as kernels_src.<family>, and their kernels enter declare.KERNELS.

    `tilekernels` is the package of this tree, without running its __init__, whatever version the process has loaded.
    """
    saved_modules = {name: module for name, module in sys.modules.items() if _is_ours(name)}
    saved_path, saved_kernels, saved_bytecode = kernels_src.__path__, dict(declare.KERNELS), sys.dont_write_bytecode
    finder = _InertFinder() if stand_in and "tilelang" not in sys.modules else None
    for name in saved_modules:
        del sys.modules[name]
    bare_package = types.ModuleType("tilekernels")
    bare_package.__path__ = [str(PACKAGE_ROOT)]
    sys.modules["tilekernels"] = bare_package
    kernels_src.__path__ = [str(root)]  # declare stays loaded, wherever the families lie
    declare.KERNELS.clear()
    sys.dont_write_bytecode = True  # an edit within one second of the last must be seen
    if finder:
        sys.meta_path.insert(0, finder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if finder:
            sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _is_ours(name) or (finder and _is_tilelang(name))]:
            del sys.modules[name]
            if name.startswith("kernels_src.") and name.count(".") == 1:
                kernels_src.__dict__.pop(name.split(".")[1], None)
        sys.modules.update(saved_modules)
        kernels_src.__path__, sys.dont_write_bytecode = saved_path, saved_bytecode
        declare.KERNELS.clear()
        declare.KERNELS.update(saved_kernels)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in ("kernels_src", "tilekernels") and name not in _KEPT


def _is_tilelang(name: str) -> bool:
    return name.split(".")[0] == "tilelang"


def line_in(file: Path, error: Exception, form: str) -> str:
    """The number of the line of `file` that raised `error`, as `form` wants it; empty if it was raised elsewhere."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError) and error.filename == str(file):
        lines = [error.lineno]
    return form.format(lines[-1]) if lines else ""


# ---- the stand-in for TileLang --------------------------------------------------------------------------------------


class _Inert:
    """Answers every attribute, call and operator with itself: enough for decorators and constants at module level."""

    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def _itself(self, *_: Any, **__: Any) -> _Inert:
        return self

    __call__ = __getitem__ = __neg__ = _itself
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _itself
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __or__ = __ror__ = _itself


class _InertModule(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - what makes it a package

    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert()


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds tilelang and everything below it as inert modules."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if _is_tilelang(fullname) else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""
