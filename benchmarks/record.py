"""What the scripts of this folder share: records that are printed too, and the operators' own cases."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tilekernels.bench import record
from tilekernels.bench.cases import find_calls
from tilekernels.bench.record import describe_machine

__all__ = ["Record", "describe_machine", "find_cases"]


class Record(record.Record):
    """Writes one JSON object a line to standard output and, where a file is named, to the end of that file."""

    def __init__(self, file: Path | None) -> None:
        super().__init__(file, sys.stdout)


def find_cases() -> Iterator[tuple[Callable[..., Any], Any]]:
    """(operator, BenchCase) of every operator file of the installed package."""
    return ((call.operator, call.case) for call in find_calls())
