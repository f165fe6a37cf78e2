"""The checked-in kernel store of tests/build_tools/golden, built as CMake builds any store: library, `_C`, headers.

Its manifest is written by hand; its cubins are texts that the fake driver of tests/csrc reads; its gen/ is what codegen
and embed must write (test_codegen.py, test_embed.py). Made once for all tests and workers, under build/tests/golden.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "tests" / "build_tools" / "golden"
SANITIZE = os.environ.get("TILEKERNELS_SANITIZE", "")  # see tests/csrc/conftest.py; the library alone is built then
BUILD = ROOT / "build" / "tests" / "-".join(["golden", *filter(None, SANITIZE.split(","))])

# To accept a change of the generators: look at what `git diff` shows afterwards.
REGENERATE = (
    "python -m build_tools.codegen tests/build_tools/golden && python -m build_tools.embed tests/build_tools/golden"
)


def read_manifest() -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((STORE / "manifest.json").read_text())
    return manifest


@functools.cache
def install_golden() -> Path:
    """The folder with _C.*.so, lib/libtilekernels.so.0, include/ and manifest.json made of the golden store."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tree, prefix = BUILD / "cmake", BUILD / "prefix"
        python = ["-DTILEKERNELS_PYTHON=OFF"] if SANITIZE else [f"-DPython_EXECUTABLE={sys.executable}"]
        options = [f"-DTILEKERNELS_STORE={STORE}", f"-DTILEKERNELS_SANITIZE={SANITIZE}", *python]
        _run("cmake", "-S", ROOT, "-B", tree, *options)
        _run("cmake", "--build", tree, "--parallel", "2")
        _run("cmake", "--install", tree, "--prefix", prefix)
    return prefix


def _run(*command: str | Path) -> None:
    environment = os.environ | {"PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        [str(part) for part in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}"
