"""A trace that never ends, for tests that stop a build: leaves the worker's process id in a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from build_tools.plan import Variant


def trace_files(variant: Variant) -> dict[str, bytes]:
    """Stands in for build_tools.build.trace_files."""
    folder = Path(os.environ["SLOW_TRACE_FOLDER"])
    (folder / f".{variant.id}").write_text(str(os.getpid()))
    (folder / f".{variant.id}").rename(folder / f"tracing-{variant.id}")
    time.sleep(600)
    return {}
