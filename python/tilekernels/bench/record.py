"""JSON lines that say where they were measured, and reading them back: the newest row of each call counts."""

from __future__ import annotations

import datetime
import importlib
import json
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Record", "Row", "describe_machine", "newest_rows", "read_lines", "row_key"]

Row = Mapping[str, Any]
_COPY_BYTES = 2 << 30


class Record:
    """Writes one JSON object a line to the end of a file, if one is named, and to the given streams."""

    def __init__(self, file: Path | None, *streams: TextIO) -> None:
        self._file, self._streams = file, streams
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)

    def write(self, **fields: Any) -> None:
        line = json.dumps(_rounded(fields))
        for stream in self._streams:
            print(line, file=stream, flush=True)
        if self._file is not None:
            with self._file.open("a") as stream:
                print(line, file=stream)


def describe_machine() -> dict[str, Any]:
    """Versions, GPU and the bandwidth of a large copy: figures of different days compare only beside these."""
    import torch

    from .. import __version__
    from ..testing.bench import copy_time_us

    return {
        "stage": "machine",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tilekernels": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(),
        "driver": importlib.import_module("tilekernels._C").driver_version(),
        "copy_gbs": _COPY_BYTES / copy_time_us(_COPY_BYTES) / 1e3,
    }


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Every JSON object of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def row_key(row: Row) -> tuple[str, str]:
    """What makes two rows rows of the same call, whatever the order of its parameters."""
    return row["operator"], json.dumps(row["params"], sort_keys=True)


def newest_rows(lines: Iterable[Row]) -> list[Row]:
    """The last row of each call, in the order in which the calls first appear; lines of other kinds are left out."""
    return list({row_key(row): row for row in lines if row.get("stage") == "kernels"}.values())


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return value
