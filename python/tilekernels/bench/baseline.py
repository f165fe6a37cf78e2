"""Rows of other runs beside ours: our own earlier ones, and those of the JIT original (jit_names.py turns its words).

Rows of the original match where no parameter that both sides have differs. Its number of tokens is partly drawn at
random: one within a quarter matches, and the time is scaled by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from .jit_names import simplify, translate_benchmark, translate_call
from .record import Row, newest_rows, read_lines, row_key

__all__ = ["Baseline", "Change", "add_baseline", "find_changes", "is_slower", "read_baseline"]

# Two runs of a call of microseconds differ by a few tenths of one, whatever the percentage.
_NOISE_US = 0.4
_BEHIND = 0.03  # two runs on two cards of a kind differ by 2 %
_TOKEN_RANGE = 0.75  # of the smaller to the larger number of tokens
# Parameters of ours that change little or nothing of the time
_UNIMPORTANT = ("num_routed", "kv", "alignment", "counted", "n_splits")


@dataclass(frozen=True)
class Baseline:
    """Times to compare with."""

    own: Mapping[tuple[str, str], float]
    jit: Mapping[str, Sequence[tuple[Mapping[str, Any], float]]] = field(default_factory=dict)
    gpu: str | None = None  # that the own ones were measured on

    def find(self, row: Row) -> float | None:
        """The time of the same call there, in microseconds, for as many tokens."""
        return self.own.get(row_key(row), self.find_jit(row))

    def find_jit(self, row: Row) -> float | None:
        """The JIT original's."""
        ours = _simplify(row["params"])
        fits = [(theirs, us) for theirs, us in self.jit.get(row["operator"], ()) if _agree(ours, theirs)]
        tokens = ours.get("num_tokens", 1)
        scaled = [(abs(theirs.get("num_tokens", tokens) - tokens), us, theirs) for theirs, us in fits]
        if not scaled:
            return None
        _, us, theirs = min(scaled, key=lambda fit: fit[:2])
        return us * tokens / theirs.get("num_tokens", tokens)


@dataclass(frozen=True)
class Change:
    """A call whose time is not what it was."""

    name: str
    us: float
    baseline_us: float | None  # None: the baseline does not have it

    @property
    def ratio(self) -> float:
        return self.us / self.baseline_us if self.baseline_us else float("nan")

    def describe(self) -> str:
        if self.baseline_us is None:
            return f"?? {self.name}: {self.us:.2f} us, not in the baseline"
        mark = "--" if self.us > self.baseline_us else "++"
        return f"{mark} {self.name}: {self.us:.2f} us, {self.baseline_us:.2f} before: {self.ratio:.2f} times"


def read_baseline(files: Iterable[Path]) -> Baseline:
    """Files of JSON lines of either kind. Raises ArgumentError for one that cannot be read or holds no times."""
    own: dict[tuple[str, str], float] = {}
    jit: dict[str, list[tuple[Mapping[str, Any], float]]] = {}
    gpu = None
    for file in files:
        try:
            lines = read_lines(file)
        except (OSError, ValueError) as error:
            raise ArgumentError(f"bench: {file} cannot be read as JSON lines: {error}") from None
        own.update({row_key(row): row["us"] for row in newest_rows(lines) if "us" in row})
        gpu = next((line["gpu"] for line in reversed(lines) if line.get("stage") == "machine"), gpu)
        num_found = len(own)
        for line in lines:
            found = _translate(line)
            if found is not None:
                operator, words, us = found
                jit.setdefault(operator, []).append((words, us))
                num_found += 1
        if not num_found:
            raise ArgumentError(f"bench: {file} must hold rows with operator and us, or kernel and time_us, got none")
    return Baseline(own, jit, gpu)


def add_baseline(row: dict[str, Any], baseline: Baseline) -> None:
    """The columns that a baseline adds to a row that it knows."""
    us = baseline.find(row)
    if us is not None and "us" in row:
        row["baseline_us"] = us
        row["of_baseline"] = us / row["us"]
        row["behind"] = is_slower(row["us"], us, _BEHIND)


def is_slower(us: float, before: float, threshold: float) -> bool:
    """Whether a time is longer by more than a share of it, and by more than what two timings of one call differ."""
    return us > before * (1 + threshold) and us - before > _NOISE_US


def find_changes(rows: Iterable[Row], baseline: Baseline, threshold: float) -> tuple[list[Change], list[Change]]:
    """(what takes longer by more than the threshold or was never timed before, what takes less), worst first."""
    worse, better = [], []
    for row in rows:
        if "us" not in row:
            continue
        before = baseline.own.get(row_key(row))
        change = Change(f"{row['operator']}{_show(row['params'])}", row["us"], before)
        if before is None or is_slower(row["us"], before, threshold):
            worse.append(change)
        elif is_slower(before, row["us"], threshold):
            better.append(change)
    return sorted(worse, key=lambda change: -change.ratio), sorted(better, key=lambda change: change.ratio)


def _show(params: Mapping[str, Any]) -> str:
    return f"[{' '.join(f'{name}={value}' for name, value in params.items())}]"


def _translate(line: Mapping[str, Any]) -> tuple[str, Mapping[str, Any], float] | None:
    found = None
    if {"kernel", "params", "time_us"} <= line.keys():
        found, us = translate_benchmark(line["kernel"], line["params"]), line["time_us"]
    elif line.get("stage") == "ops":
        found, us = translate_call(line["op"], line["n"], line["h"]), line["us"]
    return None if found is None else (*found, float(us))


def _simplify(params: Mapping[str, Any]) -> dict[str, Any]:
    words = {name: simplify(value) for name, value in params.items()}
    if "sf" in words:
        words["sf"] = {"col_packed": "packed", "col_fp32": "col"}.get(words["sf"], words["sf"])
        if words["sf"] in ("row_fp32", "row_rounded"):
            words["sf"] = "row"
    return words


def _agree(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    for name, value in theirs.items():
        if name not in ours:
            if value:
                return False
        elif name == "num_tokens":
            if min(value, ours[name]) < _TOKEN_RANGE * max(value, ours[name]):
                return False
        elif ours[name] != value:
            return False
    return all(name in theirs or name in _UNIMPORTANT or not value for name, value in ours.items())
