"""Builds libtilekernels from hand_tables.cpp and the fake driver, once for all tests and workers, under build/tests.

TILEKERNELS_SANITIZE=address,undefined (or thread) builds both with these sanitizers: test_sanitizers.py runs the tests
of this folder so.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.csrc.sanitizers import SANITIZE, compile_flags
from tests.csrc.steps import Runtime

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "tests" / "-".join(["csrc", *filter(None, SANITIZE.split(","))])
DRIVER_SOURCES = (HERE / "fake_driver.h", HERE / "fake_driver.cpp", HERE / "fake_engine.cpp")


@pytest.fixture(scope="session")
def tools() -> dict[str, str]:
    """The environment in which cmake and ninja of this Python environment are found."""
    return os.environ | {"PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="session")
def installed(tools: dict[str, str]) -> Path:
    """The library of hand_tables.cpp, configured, built and installed as an engine's packager would do it."""
    BUILD.mkdir(parents=True, exist_ok=True)
    with locked(BUILD / "lock"):
        store, tree, prefix = BUILD / "store", BUILD / "cmake", BUILD / "prefix"
        write_store(store)
        for command in (
            ["cmake", "-S", ROOT, "-B", tree, f"-DTILEKERNELS_STORE={store}", "-DTILEKERNELS_PYTHON=OFF"]
            + [f"-DTILEKERNELS_SANITIZE={SANITIZE}"],
            ["cmake", "--build", tree, "--parallel", "2"],
            ["cmake", "--install", tree, "--prefix", prefix],
        ):
            run(command, tools)
    return prefix


@pytest.fixture(scope="session")
def driver_folder() -> Path:
    """The folder with the fake libcuda.so.1."""
    folder = BUILD / "driver"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(BUILD / "lock"):
        library, newest = folder / "libcuda.so.1", max(source.stat().st_mtime for source in DRIVER_SOURCES)
        if not library.exists() or library.stat().st_mtime < newest:
            flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *compile_flags()]
            run(["g++", *flags, *DRIVER_SOURCES[1:], "-o", library])
    return folder


@pytest.fixture
def runtime(installed: Path, driver_folder: Path, tmp_path: Path) -> Runtime:
    return Runtime(installed / "lib" / "libtilekernels.so.0", driver_folder, tmp_path)


def write_store(store: Path) -> None:
    """A kernel store as build_tools leaves it, made of the tables written by hand."""
    (store / "gen").mkdir(parents=True, exist_ok=True)
    copy_if_changed(HERE / "hand_tables.cpp", store / "gen" / "hand_tables.cpp")
    copy_if_changed(HERE / "hand_ops.h", store / "gen" / "ops.h")
    (store / "gen" / "operators.md").write_text("# Operators\n")
    kernels = [{"name": f"demo.{name}"} for name in ("cast", "sync", "topk", "transpose")]
    manifest = {"schema": 1, "profile": "hand", "archs": ["sm_80", "sm_90a"], "build": {"nvcc": "13.0.88"}}
    (store / "manifest.json").write_text(json.dumps(manifest | {"kernels": kernels}))


def copy_if_changed(source: Path, target: Path) -> None:
    if not target.exists() or target.read_bytes() != source.read_bytes():
        shutil.copyfile(source, target)


def run(command: list[str | Path], environment: dict[str, str] | None = None) -> str:
    """Run a build command; its output is the reason of the failure."""
    result = subprocess.run(
        [str(part) for part in command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}"
    return result.stdout


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds a file lock, so that of several test workers one builds and the others wait."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
