"""The library as an engine gets it: what it exports and needs, its headers, its hot path."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.csrc.conftest import HERE, ROOT, run, write_store

PARTS_OF_LIBC = {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2"}


@pytest.fixture
def library(installed: Path) -> Path:
    return installed / "lib" / "libtilekernels.so.0"


def test_exports_the_c_interface_alone(library: Path) -> None:
    symbols = {line.split()[-1] for line in run(["nm", "-D", "--defined-only", library]).splitlines()}
    header = (ROOT / "csrc/include/tilekernels/tilekernels.h").read_text()
    declared = set(re.findall(r"TK_API [^(]*?(tk_\w+)\(", header))
    assert symbols == declared | {"tk_demo_topk"}


def test_needs_libc_alone(library: Path) -> None:
    dynamic = run(["readelf", "--dynamic", "--wide", library])
    assert re.findall(r"SONAME.*\[(.*)\]", dynamic) == ["libtilekernels.so.0"]
    assert set(re.findall(r"NEEDED.*\[(.*)\]", dynamic)) <= PARTS_OF_LIBC


def test_runs_no_code_when_it_is_loaded(library: Path) -> None:
    """No constructor of a global: the table of initialisers holds what every shared object has."""
    sections = run(["readelf", "--sections", "--wide", library])
    (size,) = re.findall(r"\.init_array\s+INIT_ARRAY\s+\w+\s+\w+\s+(\w+)", sections)
    assert int(size, 16) == 8


def test_has_no_path_of_the_build_machine(library: Path) -> None:
    assert str(ROOT).encode() not in library.read_bytes()


def test_installs_no_link_and_every_header(installed: Path) -> None:
    files = sorted(str(file.relative_to(installed)) for file in installed.rglob("*") if not file.is_dir())
    assert not any((installed / file).is_symlink() for file in files)
    assert files == [
        "include/tilekernels/ops.h",
        "include/tilekernels/quant.hpp",
        "include/tilekernels/tilekernels.h",
        "include/tilekernels/tilekernels.hpp",
        "include/tilekernels/torch.hpp",
        "lib/cmake/tilekernels/tilekernels-config-version.cmake",
        "lib/cmake/tilekernels/tilekernels-config.cmake",
        "lib/libtilekernels.so.0",
        "lib/pkgconfig/tilekernels.pc",
        "share/tilekernels/LICENSE",
        "share/tilekernels/NOTICE",
        "share/tilekernels/manifest.json",
        "share/tilekernels/operators.md",
    ]


def test_two_builds_have_equal_bytes(library: Path, tools: dict[str, str], tmp_path: Path) -> None:
    store = tmp_path / "another store"
    write_store(store)
    options = [f"-DTILEKERNELS_STORE={store}", "-DTILEKERNELS_PYTHON=OFF"]
    run(["cmake", "-S", ROOT, "-B", tmp_path / "tree", *options], tools)
    run(["cmake", "--build", tmp_path / "tree", "--parallel", "2"], tools)
    assert (tmp_path / "tree" / "csrc" / library.name).read_bytes() == library.read_bytes()


@pytest.mark.parametrize(("language", "standard"), [("c", "c99"), ("c", "c17"), ("c++", "c++11"), ("c++", "c++20")])
def test_headers_compile_alone(installed: Path, language: str, standard: str) -> None:
    flags = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", f"-std={standard}", f"-I{installed}/include"]
    run(["g++" if language == "c++" else "gcc", *flags, "-x", language, installed / "include/tilekernels/ops.h"])


def test_nothing_is_allocated_or_locked_after_first_use(installed: Path, driver_folder: Path, tmp_path: Path) -> None:
    program, library_folder = tmp_path / "launch_cost", installed / "lib"
    run(
        ["g++", "-std=c++20", "-O2", f"-I{installed}/include", HERE / "launch_cost.cpp", "-o", program]
        + [library_folder / "libtilekernels.so.0", f"-Wl,-rpath,{library_folder}", "-ldl"]
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_CUDA_")}
    lines = run([program], environment | {"LD_LIBRARY_PATH": str(driver_folder)}).splitlines()
    counts = {name: (int(allocations), int(locks)) for name, allocations, locks, _ in map(str.split, lines)}
    assert counts == dict.fromkeys(["typed_two_launches", "by_name_one_launch", "check", "cooperative"], (0, 0))


@pytest.mark.parametrize("store", ["", "unfinished"])
def test_configuring_without_a_store_says_what_to_type(tools: dict[str, str], tmp_path: Path, store: str) -> None:
    (tmp_path / "unfinished").mkdir()
    path = tmp_path / store if store else ""
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "tree"), f"-DTILEKERNELS_STORE={path}"]
    result = subprocess.run(command, env=tools, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "python -m build_tools build" in result.stderr
