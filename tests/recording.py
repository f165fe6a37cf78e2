"""`--record FILE`: appends one JSON line a test file to FILE, with what ran where. Runs on a GPU are kept that way.

python -P -m pytest tests -m gpu --record benchmarks/results/h200/tests.jsonl
"""

from __future__ import annotations

import collections
import datetime
import json
import platform
from importlib import metadata
from pathlib import Path

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped")


def add_record_option(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="file to append the counts of each test file to, as JSON lines")


def record_outcomes(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file is None or hasattr(config, "workerinput"):  # pytest-xdist's controller sees the results of all its workers
        return
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            counts[report.nodeid.split("::")[0]][outcome] += 1
    machine = describe_machine()
    with file.open("a") as stream:
        for name in sorted(counts):
            line = {"stage": "tests", **machine, "file": name, **{each: counts[name][each] for each in OUTCOMES}}
            print(json.dumps(line), file=stream)


def describe_machine() -> dict[str, str]:
    import torch

    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tilekernels": metadata.version("tilekernels"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
