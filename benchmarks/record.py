"""What the scripts of this folder share: records that are printed too."""

from __future__ import annotations

import sys
from pathlib import Path

from tilekernels.bench import record
from tilekernels.bench.record import describe_machine

__all__ = ["Record", "describe_machine"]


class Record(record.Record):
    """Writes one JSON object a line to standard output and, where a file is named, to the end of that file."""

    def __init__(self, file: Path | None) -> None:
        super().__init__(file, sys.stdout)
