"""Threads, contexts, forks and the end of the process with the package's own library: by the fake driver, whose kernels
compute nothing, and on a GPU."""

from __future__ import annotations

import importlib.resources
import os
import subprocess
from pathlib import Path

import pytest

from tests.csrc.conftest import HERE, run

# What each scenario prints on a GPU; the fake's kernels leave results wrong.
PRINTED = {
    "threads": ["32 launched, 32 right"],
    "contexts": [
        "primary: TK_OK",
        "another device's tensor: TK_INVALID_ARGUMENT",
        "none: TK_NO_CONTEXT",
        "own: TK_OK",
        "own, in another thread: TK_OK",
        "destroyed, current in another thread: TK_CONTEXT_DESTROYED",
        "entering the device: TK_OK",
        "nothing to restore",
        "primary, after that: TK_OK",
        "right",
    ],
    "fork": ["parent: TK_OK", "child: TK_FORKED", "child: TK_FORKED", "child ended with 0", "parent: TK_OK", "right"],
    "at_exit": ["first: TK_OK", "right", "at exit: returned", "at exit: returned"],
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = Path(str(importlib.resources.files("tilekernels")))
    library = package / "lib" / "libtilekernels.so.0"
    if not library.exists():
        pytest.skip("tilekernels is not built here")
    built = tmp_path_factory.mktemp("on_a_gpu") / "on_a_gpu"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{package}/include"]
    link = [library, f"-Wl,-rpath,{library.parent}", "-ldl", "-pthread"]
    run(["g++", *flags, HERE / "on_a_gpu.cpp", *link, "-o", built])
    return built


def start(program: Path, scenario: str, **variables: str) -> list[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_CUDA_")} | variables
    result = subprocess.run(
        [program, scenario], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.splitlines()


@pytest.mark.parametrize("scenario", PRINTED)
def test_with_the_fake_driver(program: Path, driver_folder: Path, scenario: str) -> None:
    expected = [line.replace("32 right", "0 right") if "32" in line else line for line in PRINTED[scenario]]
    expected = ["wrong" if line == "right" else line for line in expected]
    assert start(program, scenario, LD_LIBRARY_PATH=str(driver_folder)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("scenario", PRINTED)
def test_on_a_gpu(program: Path, scenario: str) -> None:
    assert start(program, scenario) == PRINTED[scenario]
