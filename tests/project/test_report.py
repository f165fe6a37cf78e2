"""The report: which calls it lists under the bar, which reason it finds for them, and what it prints."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"stage": "machine", "gpu": "Some GPU", "date": "2026-12-01T00:00:00", "torch": "2", "copy_gbs": 4000.0}


@pytest.fixture(scope="module")
def report() -> ModuleType:
    """benchmarks/report.py, which is a script."""
    spec = importlib.util.spec_from_file_location("benchmarks_report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def make_row(operator: str, us: float, of_limit: float, **params: Any) -> dict[str, Any]:
    row = {"stage": "kernels", "operator": operator, "params": params, "us": us, "bytes": 1e8, "gbs": 1e5 / us}
    return {**row, "copy_us": us * of_limit, "of_copy": of_limit, "limit": "copy", "of_limit": of_limit}


ROWS = [
    make_row("a.wide", 50.0, 0.5, num_tokens=8001, hidden=7168, kind="x"),
    make_row("a.wide", 50.0, 0.6, num_tokens=8192, hidden=7168, kind="y"),
    make_row("a.wide", 50.0, 0.3, num_tokens=8192, hidden=4096, kind="y"),
    make_row("a.fast", 50.0, 0.95, shape=[8192, 7168]),
    make_row("a.short", 5.0, 0.1, num_tokens=8192, hidden=7168),
    make_row("a.other", 30.0, 0.7, num_experts=256),
    make_row("gemm.matmul", 50.0, 0.5, m=1, n=2, k=3),
]


def test_wide_calls_under_the_bar_are_listed_the_farthest_first(report: ModuleType) -> None:
    assert [row["of_limit"] for row in report.under_the_bar(ROWS)] == [0.5, 0.6, 0.7]


@pytest.mark.parametrize(
    ("row", "expected"), [(ROWS[0], "of x"), (ROWS[1], "of all"), (ROWS[3], None)], ids=["its own", "general", "none"]
)
def test_the_most_particular_reason_is_taken(report: ModuleType, row: dict[str, Any], expected: str | None) -> None:
    reasons = [
        {"operators": ["a.wide"], "reason": "of all", "tried": ""},
        {"operators": ["a.other", "a.wide"], "params": {"kind": "x"}, "reason": "of x", "tried": ""},
    ]
    found = report.find_reason(row, reasons)
    assert (found and found["reason"]) == expected


def test_reasons_name_operators_that_exist(report: ModuleType) -> None:
    from tilekernels.bench.cases import find_calls

    known = {call.case.operator for call in find_calls()}
    for reason in report.tomllib.loads(report.REASONS.read_text())["reason"]:
        assert set(reason["operators"]) <= known
        assert reason["reason"].strip()
        assert reason["tried"].strip()


def test_the_paper_holds_rows_reasons_counters_and_peers(report: ModuleType, tmp_path: Path) -> None:
    def write(name: str, *lines: dict[str, Any]) -> None:
        (tmp_path / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    jit = {"baseline_us": 45.0, "of_baseline": 0.9, "behind": True}
    write("kernels.jsonl", MACHINE, {**ROWS[0], "again_us": 50.5, **jit}, *ROWS[1:])
    write("peers.jsonl", {**ROWS[3], "peers": {"triton": 60.0}}, {**ROWS[3], "peers": {"compile": "RuntimeError: no"}})
    write("counters.jsonl", {**ROWS[0], "stage": "counters", "dram_pct": 51.0, "registers": 96.0})
    host = {"stage": "host_calls", "operator": "a.fast", "call_us": 7.0, "cold_us": 300.0}
    write("host_calls.jsonl", {"stage": "import", "ms": 28.0}, host)
    reasons = [{"operators": ["a.wide"], "reason": "Too slow.", "tried": "Nothing."}]
    text = report.render(report.read_results(tmp_path), reasons, "performance")
    for expected in (
        "Some GPU, 2026-12-01, torch 2. 5 operators, 7 calls. Copies of 2 GiB run at 4000 GB/s.",
        "Timed twice, the 1 calls of 20 us and more were at most 1.0% apart.",
        "* `a.wide`: Too slow. Tried: Nothing.\n  * 50%, 50.0 us: num_tokens=8001 hidden=7168 kind=x\n",
        "  * ncu: memory 51 %, 96 registers",
        "* `a.other`: not looked into yet.",
        "| a.wide | num_tokens=8192 hidden=4096 kind=y | 50.00 | 2000 | 30% |  |\n| a.wide | num_tokens=8001",
        "| a.fast | shape=8192x7168 | 50.00 | 60.0 (1.20x) |  |",
        "Of 1 calls that both time, 1 are slower here by more than 3 % and 0.4 us.",
        "| a.wide | num_tokens=8001 hidden=7168 kind=x | 50.00 | 45.00 | 0.90 behind |",
        "Importing every family takes 28 ms beyond `import torch`.",
        "| a.fast | 7.0 |  |  | 300.0 |  |",
    ):
        assert expected in text


def test_the_committed_results_make_a_paper(report: ModuleType) -> None:
    results = report.read_results(ROOT / "benchmarks" / "results" / "h200")
    text = report.render(results, report.tomllib.loads(report.REASONS.read_text())["reason"], "performance")
    assert text.count("\n| quant.") > 100


def test_plots_are_drawn(report: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.draw_distances(report.memory_bound(ROWS), tmp_path / "distance.png")
    assert (tmp_path / "distance.png").read_bytes().startswith(b"\x89PNG")
