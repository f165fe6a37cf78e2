"""report: what a build did, for the person at the terminal and as JSON for machines.

Failures come last and all at once: what failed, in which file, config and arch, the compiler's own words, where the
source is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .compile import UnitResult
from .failures import Failure
from .ptxas import Usage

WORST = 5  # how many variants with spills, and with the most registers, are named
SHOWN_OUTPUT_LINES = 40  # of a failure's output; all of it is kept in the store


@dataclasses.dataclass(frozen=True)
class TraceTime:
    """What one variant's trace took; 0 seconds from the cache."""

    kernel: str
    variant: str
    arch: str
    seconds: float
    cached: bool
    cpu_seconds: float = 0.0


@dataclasses.dataclass
class Report:
    """What happened so far; each stage adds to it."""

    profile: str
    archs: tuple[str, ...]
    store: Path
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    cpu_seconds: float = 0.0  # of all processes on this machine
    traces: list[TraceTime] = dataclasses.field(default_factory=list)
    units: list[UnitResult] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    changed: bool = False

    @property
    def nothing_done(self) -> bool:
        cached = all(trace.cached for trace in self.traces) and all(unit.cached for unit in self.units)
        return cached and not self.changed and not self.failures

    @property
    def num_variants(self) -> int:
        return len(self.traces) or sum(len(result.unit.variants) for result in self.units)


def to_dict(report: Report) -> dict[str, Any]:
    """The report as JSON: times in seconds, sizes in bytes."""
    return {
        "profile": report.profile,
        "archs": list(report.archs),
        "store": str(report.store),
        "ok": not report.failures,
        "seconds": {name: round(seconds, 3) for name, seconds in report.seconds.items()},
        "cpu_seconds": round(report.cpu_seconds, 3),
        "variants": report.num_variants,
        "operators": [dataclasses.asdict(row) for row in _rows(report)],
        "traces": [dataclasses.asdict(trace) for trace in report.traces],
        "units": [
            {
                "id": result.unit.id,
                "variants": [variant.id for variant in result.unit.variants],
                "seconds": round(result.seconds, 3),
                "cached": result.cached,
                "bytes": len(result.compiled.cubin) if result.compiled else 0,
            }
            for result in report.units
        ],
        "kernels": [
            {"symbol": symbol, "unit": unit, **dataclasses.asdict(usage)}
            for unit, symbol, usage in _usage(report.units)
        ],
        "failures": [dataclasses.asdict(failure) for failure in report.failures],
        "notes": report.notes,
    }


def print_report(report: Report, console: Console) -> None:
    """The table, the worst kernels, the notes, and at the end every failure or one line that says how it went."""
    total = sum(report.seconds.values())
    if report.nothing_done:
        console.print(
            f"nothing was to be done: {report.num_variants} variants are up to date in {report.store} ({total:.1f} s)",
            soft_wrap=True,
        )
        return
    console.print(_table(_rows(report)))
    for line in _worst_lines(report.units):
        console.print(line, soft_wrap=True, markup=False)
    for note in report.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    for alike in _by_cause(report.failures):
        print_failures(alike, console)
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.seconds.items())
    if report.failures:
        console.print(
            f"{len(report.failures)} of {report.num_variants} variants failed ({times})", soft_wrap=True, markup=False
        )
    else:
        console.print(f"{report.num_variants} variants are in {report.store} ({times})", soft_wrap=True, markup=False)


def print_failures(alike: Sequence[Failure], console: Console) -> None:
    """The first in full, the others, of the same cause, by name."""
    failure = alike[0]
    lines = failure.output.strip().splitlines()
    left_out = len(lines) - SHOWN_OUTPUT_LINES
    shown = [f"({left_out} lines before these)", *lines[left_out:]] if left_out > 0 else lines
    console.print(f"\n{failure.stage} failed: {failure.place}", style="bold red", markup=False, soft_wrap=True)
    text = [f"  file     {failure.file}", f"  problem  {failure.sentence}"]
    text += [f"  command  {failure.command}"] if failure.command else []
    text += [f"    {line}" for line in shown]
    text += [f"  kept     {failure.kept}"]
    text += [f"  as well  {other.place}, kept {other.kept}" for other in alike[1:]]
    console.print("\n".join(text), markup=False, soft_wrap=True)


def _by_cause(failures: Sequence[Failure]) -> list[list[Failure]]:
    groups: dict[tuple[str, ...], list[Failure]] = {}
    for failure in failures:
        groups.setdefault(failure.cause, []).append(failure)
    return list(groups.values())


# ---- the table by operator ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Row:
    kernel: str
    variants: int
    trace_seconds: float
    trace_cpu_seconds: float
    compile_seconds: float
    bytes: int
    max_registers: int
    spill_bytes: int
    failed: int


def _rows(report: Report) -> list[_Row]:
    names = sorted({trace.kernel for trace in report.traces} | {result.unit.kernel for result in report.units})
    return [_row(name, report) for name in names]


def _row(kernel: str, report: Report) -> _Row:
    traces = [trace for trace in report.traces if trace.kernel == kernel]
    units = [result for result in report.units if result.unit.kernel == kernel]
    usages = [usage for _, _, usage in _usage(units)]
    return _Row(
        kernel=kernel,
        variants=len(traces) or sum(len(result.unit.variants) for result in units),
        trace_seconds=round(sum(trace.seconds for trace in traces), 3),
        trace_cpu_seconds=round(sum(trace.cpu_seconds for trace in traces), 3),
        compile_seconds=round(sum(result.seconds for result in units), 3),
        bytes=sum(len(result.compiled.cubin) for result in units if result.compiled),
        max_registers=max((usage.registers for usage in usages), default=0),
        spill_bytes=sum(usage.spill_bytes for usage in usages),
        failed=sum(failure.kernel == kernel for failure in report.failures),
    )


def _table(rows: Sequence[_Row]) -> Table:
    table = Table(show_footer=True)
    # on a narrow terminal headings fold, names do not
    table.add_column(
        "operator", footer="all", no_wrap=True, min_width=max((len(row.kernel) for row in rows), default=0)
    )
    columns: dict[str, list[float]] = {
        "variants": [row.variants for row in rows],
        "trace s": [row.trace_seconds for row in rows],
        "compile s": [row.compile_seconds for row in rows],
        "bytes": [row.bytes for row in rows],
        "max registers": [row.max_registers for row in rows],
        "spill bytes": [row.spill_bytes for row in rows],
        "failed": [row.failed for row in rows],
    }
    for name, values in columns.items():
        total = max(values, default=0) if name == "max registers" else sum(values)
        table.add_column(name, justify="right", footer=_number(total))
    for row, *values in zip(rows, *columns.values(), strict=True):
        table.add_row(row.kernel, *(_number(value) for value in values))
    return table


def _number(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _usage(results: Iterable[UnitResult]) -> list[tuple[str, str, Usage]]:
    return [
        (result.unit.id, symbol, usage)
        for result in results
        if result.compiled
        for symbol, usage in sorted(result.compiled.usage.items())
    ]


def _worst_lines(results: Sequence[UnitResult]) -> list[str]:
    usages = [(symbol, unit.rpartition("-")[0].rpartition("-")[2], usage) for unit, symbol, usage in _usage(results)]
    spilling = sorted((item for item in usages if item[2].spill_bytes), key=lambda item: -item[2].spill_bytes)[:WORST]
    greedy = sorted(usages, key=lambda item: -item[2].registers)[:WORST]
    lines = [
        f"spills: {symbol} {arch}: {usage.spill_bytes} bytes, {usage.registers} registers"
        for symbol, arch, usage in spilling
    ]
    if not spilling and usages:
        lines = ["spills: none"]
    return lines + [f"registers: {symbol} {arch}: {usage.registers}" for symbol, arch, usage in greedy]
