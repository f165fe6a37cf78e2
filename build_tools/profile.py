"""Profiles: TOML files that say which GPUs, kernels and axis values a build holds.

archs = ["sm_90a"]
[operators]
include = ["quant.*", "moe.topk_gate"]      # patterns on <family>.<kernel>; everything when left out
exclude = []
["quant.per_token_cast"]                    # fewer values of an axis
num_per_channels = [128]
"""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernels_src.declare import ARCHS, Axis, AxisValue, Kernel

from .errors import PlanError
from .kernel_files import REPOSITORY

# tomli is the same module before it entered the standard library
tomllib: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

PROFILES_FOLDER = REPOSITORY / "profiles"


@dataclasses.dataclass(frozen=True)
class Profile:
    """A checked profile. `narrowed` maps a kernel to the values kept of some of its axes."""

    name: str
    archs: tuple[str, ...]
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    narrowed: Mapping[str, Mapping[str, tuple[AxisValue, ...]]] = dataclasses.field(default_factory=dict)
    file: Path | None = None

    def selects(self, kernel: str) -> bool:
        """Whether the kernel is built at all."""
        return _matches(kernel, self.include) and not _matches(kernel, self.exclude)

    def keeps(self, kernel: str, config: Mapping[str, AxisValue]) -> bool:
        """Whether this config of a selected kernel is built."""
        return all(config[axis] in values for axis, values in self.narrowed.get(kernel, {}).items())

    def check_against(self, kernels: Mapping[str, Kernel]) -> None:
        """Raise PlanError for a pattern that matches no kernel, an unknown kernel, axis or value."""
        for pattern in (*self.include, *self.exclude):
            if pattern != "*" and not any(fnmatch.fnmatchcase(kernel, pattern) for kernel in kernels):
                raise self.error("operators", f"{pattern!r} matches no kernel; kernels: {', '.join(kernels)}")
        for name, axes in self.narrowed.items():
            if name not in kernels:
                raise self.error(name, f"no such kernel; kernels: {', '.join(kernels)}")
            for axis_name, values in axes.items():
                self._check_axis(kernels[name], axis_name, values)

    def _check_axis(self, kernel: Kernel, axis_name: str, values: tuple[AxisValue, ...]) -> None:
        by_name: dict[str, Axis] = {axis.name: axis for axis in kernel.axes}
        if axis_name not in by_name:
            raise self.error(
                axis_name, f"{kernel.name} has no such axis; axes: {', '.join(by_name) or 'none'}", kernel.name
            )
        axis = by_name[axis_name]
        declared = {(type(value), value) for value in axis.values}
        for value in values:
            if (type(value), value) not in declared:
                allowed = ", ".join(map(repr, axis.values))
                raise self.error(
                    axis_name, f"{value!r} is not built for {kernel.name}; allowed: {allowed}", kernel.name
                )
        if not values or (axis.kind == "forms" and axis.values[-1] not in values):
            needed = f"{axis.values[-1]!r}, which fits every call" if axis.kind == "forms" else "at least one value"
            raise self.error(axis_name, f"must keep {needed}", kernel.name)

    def error(self, key: str, text: str, table: str = "") -> PlanError:
        """A PlanError that says where in the profile `key` (of `table`) stands."""
        if self.file is None:
            return PlanError(f"profile {self.name}: {key}: {text}")
        return _error(self.file, self.file.read_text(), key, text, table)


def load_profile(path_or_name: str | Path) -> Profile:
    """Read `profiles/<name>.toml` or the file at a path."""
    file = Path(path_or_name)
    if file.suffix != ".toml":
        file = PROFILES_FOLDER / f"{path_or_name}.toml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in PROFILES_FOLDER.glob("*.toml")))
        raise PlanError(f"no profile {path_or_name}: give a path to a .toml file or one of {known}")
    text = file.read_text()
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{file}: not valid TOML: {error}") from None

    def fail(key: str, problem: str, table: str = "") -> PlanError:
        return _error(file, text, key, problem, table)

    archs = _texts(content.pop("archs", None), "archs", '["sm_90a"]', fail)
    if not archs:
        raise fail("archs", "must name at least one GPU")
    check_archs(archs, lambda problem: fail("archs", problem))
    operators = content.pop("operators", {})
    if not isinstance(operators, dict):
        raise fail("operators", "must be a table with include and exclude")
    for key in operators.keys() - {"include", "exclude"}:
        raise fail(key, "unknown key; allowed: include, exclude", "operators")
    include = _texts(operators.get("include", ["*"]), "include", '["quant.*"]', fail, "operators")
    exclude = _texts(operators.get("exclude", []), "exclude", '["quant.*"]', fail, "operators")
    return Profile(file.stem, archs, include, exclude, _narrowed(content, fail), file)


def check_archs(archs: tuple[str, ...], error: Any = PlanError) -> None:
    """Raise `error(text)` for a GPU that cannot be built for."""
    for arch in archs:
        if arch not in ARCHS:
            raise error(f"unknown arch {arch!r}; allowed: {', '.join(ARCHS)}")


def _narrowed(content: dict[str, Any], fail: Any) -> dict[str, dict[str, tuple[AxisValue, ...]]]:
    narrowed: dict[str, dict[str, tuple[AxisValue, ...]]] = {}
    for kernel, axes in content.items():
        if not isinstance(axes, dict) or not re.fullmatch(r"\w+\.\w+", kernel):
            raise fail(
                kernel, 'unknown key; allowed: archs, [operators] and tables of kernels, quoted: ["<family>.<kernel>"]'
            )
        for axis, values in axes.items():
            if not isinstance(values, list) or not all(isinstance(value, int | str) for value in values):
                raise fail(axis, f"must be a list of ints, strings or bools, got {values!r}", kernel)
        narrowed[kernel] = {axis: tuple(values) for axis, values in axes.items()}
    return narrowed


def _texts(value: Any, key: str, example: str, fail: Any, table: str = "") -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fail(key, f"must be a list of strings such as {example}, got {value!r}", table)
    return tuple(value)


def _matches(kernel: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(kernel, pattern) for pattern in patterns)


def _error(file: Path, text: str, key: str, problem: str, table: str = "") -> PlanError:
    """TOML readers give no positions: look for the line that sets `key`, below the head of `table`."""
    lines = text.splitlines()
    head = re.compile(rf"\s*\[\s*['\"]?{re.escape(table)}['\"]?\s*\]") if table else None
    start = next((number for number, line in enumerate(lines) if head and head.match(line)), 0)
    setting = re.compile(rf"\s*\[?\s*['\"]?{re.escape(key)}['\"]?\s*[\]=]")
    line = next((number for number in range(start, len(lines)) if setting.match(lines[number])), None)
    where = f"{file}:{line + 1}" if line is not None else str(file)
    return PlanError(f"{where}: {f'[{table}] ' if table else ''}{key}: {problem}")
