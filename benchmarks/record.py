"""What the benchmark scripts share: JSON lines that say where they were measured, and the operators' own cases."""

from __future__ import annotations

import datetime
import importlib
import json
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

FAMILIES_WITHOUT_KERNELS = ("cli", "modeling", "testing", "v1")


class Record:
    """Writes one JSON object a line to standard output and, where a file is named, to the end of that file."""

    def __init__(self, file: Path | None) -> None:
        self._streams: list[TextIO] = [sys.stdout]
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._streams.append(file.open("a"))

    def write(self, **fields: Any) -> None:
        line = json.dumps({name: _rounded(value) for name, value in fields.items()})
        for stream in self._streams:
            print(line, file=stream, flush=True)


def describe_machine() -> dict[str, Any]:
    """Versions, GPU and the bandwidth of a large copy: figures of different days compare only beside these."""
    import torch

    import tilekernels
    from tilekernels.testing.bench import copy_time_us

    num_bytes = 2 << 30
    return {
        "stage": "machine",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "tilekernels": tilekernels.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name(),
        "driver": importlib.import_module("tilekernels._C").driver_version(),
        "copy_gbs": num_bytes / copy_time_us(num_bytes) / 1e3,
    }


def find_cases() -> Iterator[tuple[Callable[..., Any], Any]]:
    """(operator, BenchCase) of every operator file of the installed package."""
    import tilekernels

    for family in pkgutil.iter_modules(tilekernels.__path__):
        if not family.ispkg or family.name in FAMILIES_WITHOUT_KERNELS:
            continue
        package = importlib.import_module(f"tilekernels.{family.name}")
        for file in pkgutil.iter_modules(package.__path__):
            if not file.name.startswith("_"):
                module = importlib.import_module(f"{package.__name__}.{file.name}")
                for case in module.bench_cases():
                    yield getattr(module, case.operator.partition(".")[2]), case


def _rounded(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value
