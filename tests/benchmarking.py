"""Benchmarks under pytest: `--run-benchmark` times every operator's calls and compares with a committed run.

python -P -m pytest tests -m gpu --run-benchmark --benchmark-output new.jsonl

The names of options and fixtures are those of the public operator set. A call that takes longer than it did by more
than the threshold, or that the baseline does not have, turns a passing run into a failing one. Run alone on an idle
GPU, without pytest-xdist: the controller sees no rows of its workers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
BASELINE = ROOT / "benchmarks" / "results" / "h200" / "kernels.jsonl"
THRESHOLD = 0.15
ROWS = pytest.StashKey[list[dict[str, Any]]]()


def add_benchmark_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("benchmarks")
    group.addoption(
        "--run-benchmark", action="store_true", help="run tests marked benchmark too; warnings are off then"
    )
    group.addoption("--benchmark-output", type=Path, metavar="FILE", help="file to append rows to, as JSON lines")
    group.addoption("--benchmark-baseline", type=Path, default=BASELINE, metavar="FILE", help="rows to compare with")
    group.addoption(
        "--benchmark-regression-threshold",
        type=float,
        default=THRESHOLD,
        metavar="SHARE",
        help=f"how much longer a call may take than in the baseline (default {THRESHOLD})",
    )
    group.addoption("--benchmark-verbose", action="store_true", help="print every row, with bandwidth and limit")


def configure_benchmarks(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    if config.getoption("--run-benchmark"):
        config.addinivalue_line("filterwarnings", "ignore")


def skip_benchmarks(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-benchmark"):
        for item in items:
            if item.get_closest_marker("benchmark"):
                item.add_marker(pytest.mark.skip(reason="needs --run-benchmark"))


def add_row(config: pytest.Config, row: dict[str, Any]) -> None:
    """Keep a row for the report, append it to the output, print it if asked."""
    from tilekernels.bench.record import Record

    config.stash[ROWS].append(row)
    Record(config.getoption("--benchmark-output")).write(**row)
    if config.getoption("--benchmark-verbose"):
        shown = " ".join(f"{name}={value}" for name, value in row["params"].items())
        limit = f" {row['of_limit']:.0%} of {row['limit']}" if "of_limit" in row else ""
        print(f"BENCH {row['operator']}[{shown}]: {row['us']:.2f} us {row.get('gbs') or 0:.0f} GB/s{limit}")


@pytest.fixture
def benchmark_timer() -> Callable[..., float]:
    """benchmark_timer(fn) -> microseconds of GPU time, with a cold L2; other arguments go to fn."""
    from tilekernels.testing.bench import kernel_time_us

    def time(fn: Callable[..., object], **overrides: Any) -> float:
        return kernel_time_us(functools.partial(fn, **overrides) if overrides else fn)

    return time


@pytest.fixture
def benchmark_record(request: pytest.FixtureRequest) -> Callable[..., None]:
    """benchmark_record(kernel=, params=, time_us=, ...): a row of a benchmark that times something itself."""

    def record(
        kernel: str,
        params: dict[str, Any],
        time_us: float,
        operation: str = "fwd",
        bandwidth_gbs: float | None = None,
        extras: dict[str, Any] | None = None,
    ) -> None:
        row = {"stage": "kernels", "operator": kernel, "operation": operation, "params": params, "us": time_us}
        add_row(request.config, {**row, "gbs": bandwidth_gbs, **(extras or {})})

    return record


def report_benchmarks(config: pytest.Config) -> list[str]:
    """What to print at the end: changes against the baseline, worst first; empty if nothing was timed."""
    rows = config.stash[ROWS]
    if not rows:
        return []
    worse, better, note = compare(rows, config)
    lines = [change.describe() for change in [*worse, *better]]
    return [*lines, f"{len(rows)} calls timed: {len(worse)} slower or new, {len(better)} faster{note}"]


def has_regressed(config: pytest.Config) -> bool:
    rows = config.stash[ROWS]
    return bool(rows) and bool(compare(rows, config)[0])


def compare(rows: list[dict[str, Any]], config: pytest.Config) -> tuple[list[Any], list[Any], str]:
    """(slower or new, faster, what to add to the last line)."""
    import torch

    from tilekernels.bench.baseline import find_changes, read_baseline

    file: Path = config.getoption("--benchmark-baseline")
    baseline = read_baseline([file])
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    if baseline.gpu != gpu:
        return [], [], f"; not compared: {file.name} was measured on {baseline.gpu}, this is {gpu}"
    return (*find_changes(rows, baseline, config.getoption("--benchmark-regression-threshold")), f" than {file.name}")
