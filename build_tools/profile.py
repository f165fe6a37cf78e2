"""Profiles: TOML files that say which GPUs, kernels and axis values a build holds.

archs = ["sm_90a"]
forms = "general"                           # of each combination of values only general forms, which take every call
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
FORMS = ("all", "general")


@dataclasses.dataclass(frozen=True)
class Profile:
    """A checked profile. `narrowed` maps a kernel to the values kept of some of its axes; where it names the kernel's
    forms, `forms` does not count."""

    name: str
    archs: tuple[str, ...]
    include: tuple[str, ...] = ("*",)
    exclude: tuple[str, ...] = ()
    narrowed: Mapping[str, Mapping[str, tuple[AxisValue, ...]]] = dataclasses.field(default_factory=dict)
    file: Path | None = None
    forms: str = "all"  # or "general": of each combination of values the last form and those named (..._)general

    def selects(self, kernel: str) -> bool:
        """Whether the kernel is built at all."""
        return _matches(kernel, self.include) and not _matches(kernel, self.exclude)

    def find_pattern(self, kernel: str, patterns: tuple[str, ...]) -> str | None:
        """The first of `patterns` that matches the kernel."""
        return next((pattern for pattern in patterns if fnmatch.fnmatchcase(kernel, pattern)), None)

    def place(self, key: str, table: str = "") -> str:
        """`file:line` of the line that sets `key` (of `table`), "" where none does."""
        if self.file is None:
            return ""
        line = _find_line(_read_text(self.file), key, table)
        file = self.file.relative_to(REPOSITORY) if REPOSITORY in self.file.parents else self.file
        return f"{file}:{line}" if line else ""

    def keeps(self, kernel: str, config: Mapping[str, AxisValue]) -> bool:
        """Whether this config of a selected kernel is built."""
        return all(config[axis] in values for axis, values in self.narrowed.get(kernel, {}).items())

    def configs(self, kernel: Kernel) -> list[tuple[int, dict[str, AxisValue]]]:
        """The configs of a selected kernel that are built, each with its position in the grid."""
        kept = [(at, config) for at, config in enumerate(kernel.configs()) if self.keeps(kernel.name, config)]
        if not self.is_general(kernel):
            return kept
        axis = next((axis for axis in kernel.axes if axis.kind == "forms"), None)
        if axis is None:
            return kept
        last: dict[tuple[AxisValue, ...], int] = {}  # of each combination, the place of the last form that it has

        def key_of(config: Mapping[str, AxisValue]) -> tuple[AxisValue, ...]:
            return tuple(value for name, value in config.items() if name != axis.name)

        for _, config in kept:
            place = axis.values.index(config[axis.name])
            last[key_of(config)] = max(place, last.get(key_of(config), 0))
        return [
            (at, config)
            for at, config in kept
            if config[axis.name] == axis.values[last[key_of(config)]] or str(config[axis.name]).endswith("general")
        ]

    def is_general(self, kernel: Kernel) -> bool:
        """Whether this profile's `forms` decides the forms of a kernel: not where a table names them."""
        named = self.narrowed.get(kernel.name, {})
        return self.forms == "general" and not any(axis.kind == "forms" and axis.name in named for axis in kernel.axes)

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
            self._check_values_occur(kernels[name], axes)

    def _check_values_occur(self, kernel: Kernel, axes: Mapping[str, tuple[AxisValue, ...]]) -> None:
        """A value that the kernel's conditions exclude together with the other values would be dropped silently."""
        configs = [config for config in kernel.configs() if self.keeps(kernel.name, config)]
        for axis, values in axes.items() if configs else ():
            for value in values:
                if all(config[axis] != value for config in configs):
                    raise self.error(
                        axis,
                        f"{value!r} is in no combination that the conditions of {kernel.name} allow with the other "
                        f"values of this table; remove it, or keep values that go with it ({kernel.file})",
                        kernel.name,
                    )

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
        return _error(self.file, _read_text(self.file), key, text, table)


def load_profile(path_or_name: str | Path) -> Profile:
    """Read `profiles/<name>.toml` or the file at a path."""
    file = Path(path_or_name)
    if file.suffix != ".toml":
        file = PROFILES_FOLDER / f"{path_or_name}.toml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in PROFILES_FOLDER.glob("*.toml")))
        raise PlanError(f"no profile {path_or_name}: give a path to a .toml file or one of {known}")
    text = _read_text(file)
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(_place_toml_error(file, text, str(error))) from None

    def fail(key: str, problem: str, table: str = "") -> PlanError:
        return _error(file, text, key, problem, table)

    archs = _texts(content.pop("archs", None), "archs", '["sm_90a"]', fail)
    if not archs:
        raise fail("archs", "must name at least one GPU")
    check_archs(archs, lambda problem: fail("archs", problem))
    forms = content.pop("forms", "all")
    if forms not in FORMS:
        raise fail("forms", f"must be one of {', '.join(map(repr, FORMS))}, got {forms!r}")
    operators = content.pop("operators", {})
    if not isinstance(operators, dict):
        raise fail("operators", "must be a table with include and exclude")
    for key in operators.keys() - {"include", "exclude"}:
        raise fail(key, "unknown key; allowed: include, exclude", "operators")
    include = _texts(operators.get("include", ["*"]), "include", '["quant.*"]', fail, "operators")
    exclude = _texts(operators.get("exclude", []), "exclude", '["quant.*"]', fail, "operators")
    return Profile(file.stem, archs, include, exclude, _narrowed(content, fail), file, forms)


def _read_text(file: Path) -> str:
    try:
        content = file.read_bytes()
        return content.decode()
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise PlanError(
            f"{file}:{line}: not UTF-8, as TOML must be (byte 0x{content[error.start]:02x}): save the file as UTF-8"
        ) from None
    except OSError as error:
        raise PlanError(f"{file}: the profile cannot be read ({error.strerror})") from None


def _place_toml_error(file: Path, text: str, problem: str) -> str:
    """`x.toml:3: not valid TOML, near archs: ...`; the reader says "(at line 3, column 9)" or "(at end ...)"."""
    found = re.search(r" \(at line (\d+), column \d+\)$| \(at end of document\)$", problem)
    lines = text.splitlines() or [""]
    number = int(found[1]) if found and found[1] else len(lines)
    before = [line for line in lines[:number] if re.match(r"\s*['\"\w\[]", line)]
    near = re.match(r"\s*(\[+[^\]]*\]*|['\"]?[\w.-]+['\"]?)", before[-1]) if before else None
    key = f", near {near[1].strip()}" if near else ""
    return f"{file}:{number}: not valid TOML{key}: {problem[: found.start()] if found else problem}"


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
                kernel,
                'unknown key; allowed: archs, forms, [operators] and tables of kernels, quoted: ["<family>.<kernel>"]',
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
    """TOML readers give no positions of keys: look for the line."""
    line = _find_line(text, key, table)
    where = f"{file}:{line}" if line else str(file)
    return PlanError(f"{where}: {f'[{table}] ' if table else ''}{key}: {problem}")


def _find_line(text: str, key: str, table: str) -> int:
    """The number of the line that sets `key`, 0 if none does; a table may also stand in one line, `"a.b" = {...}`."""
    lines = text.splitlines()
    name = rf"['\"]?{re.escape(table)}['\"]?\s*"
    head = re.compile(rf"\s*(?:\[\s*{name}\]|{name}=\s*\{{)") if table else None
    start = next((number for number, line in enumerate(lines) if head and head.match(line)), 0 if not table else -1)
    if start < 0:
        return 0
    if table and "{" in lines[start].partition("=")[2]:
        return start + 1
    setting = re.compile(rf"\s*\[?\s*['\"]?{re.escape(key)}['\"]?\s*[\]=]")
    return next((number + 1 for number in range(start, len(lines)) if setting.match(lines[number])), 0)
