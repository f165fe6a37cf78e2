"""Which Pythons and compilers wheels are packed for; the packing itself is tested on the finished wheel."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib, of the build environment, is not installed")

from build_tools import packing, wheels
from build_tools.errors import BuildError
from build_tools.packing import Interpreter, Target, ask_python, find_pythons


def write_python(path: Path, answer: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def answer(version: str, tag: str, header: str = "true") -> str:
    return f'echo \'[[{version}], "{tag}", ".{tag}.so", {header}]\''


def test_the_newest_of_each_minor_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyenv, path = tmp_path / "pyenv", tmp_path / "bin"
    wanted = [
        write_python(pyenv / "versions/3.10.13/bin/python3", answer("3, 10, 13", "cpython-310")),
        write_python(path / "python3.12", answer("3, 12, 9", "cpython-312")),
        write_python(path / "python3.14t", answer("3, 14, 0", "cpython-314t")),
    ]
    write_python(pyenv / "versions/3.10.2/bin/python3", answer("3, 10, 2", "cpython-310"))
    write_python(pyenv / "versions/3.9.1/bin/python3", answer("3, 9, 1", "cpython-39"))
    write_python(pyenv / "versions/3.13.0/bin/python3", answer("3, 13, 0", "cpython-313", header="false"))
    write_python(pyenv / "versions/pypy/bin/python3", answer("3, 10, 14", "pypy310"))
    write_python(path / "python3.11", "echo 'pyenv: python3.11: command not found'; exit 127")
    monkeypatch.setenv("PYENV_ROOT", str(pyenv))
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(path / "python3.11"))
    found = [python for python in find_pythons() if tmp_path in python.parents]
    assert found == wanted


def test_what_is_no_python_answers_nothing(tmp_path: Path) -> None:
    assert ask_python(tmp_path / "missing") is None
    assert ask_python(write_python(tmp_path / "bad", "exit 1")) is None
    with pytest.raises(BuildError, match=r"is no CPython >= 3\.10 with headers"):
        packing.prepare_python(tmp_path / "missing")


def test_toolchain_of_another_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "ROOT", tmp_path)
    monkeypatch.setattr(packing, "find_zig", lambda: Path("/opt/zig"))
    monkeypatch.setattr(packing.platform, "machine", lambda: "x86_64")
    environment = packing.zig_environment(Target("aarch64"))
    text = Path(environment["CMAKE_TOOLCHAIN_FILE"]).read_text()
    assert "set(CMAKE_SYSTEM_PROCESSOR aarch64)" in text
    assert 'set(CMAKE_CXX_COMPILER "/opt/zig;c++;-target;aarch64-linux-gnu.2.28")' in text
    own = Path(packing.zig_environment(Target("x86_64"))["CMAKE_TOOLCHAIN_FILE"]).read_text()
    assert "CMAKE_SYSTEM_NAME" not in own  # not a cross build: the interpreter may be run
    assert "linux-gnu.2.28;-idirafter;/usr/include" in own  # Debian keeps its pyconfig.h there


def test_targets_have_the_names_of_their_tags() -> None:
    assert [Target(machine).name for machine in ("x86_64", "aarch64", None)] == [
        "manylinux_2_28_x86_64",
        "manylinux_2_28_aarch64",
        "native",
    ]
    assert Interpreter.running().tag == f"cp{sys.version_info[0]}{sys.version_info[1]}"


def test_an_unknown_processor_is_refused() -> None:
    with pytest.raises(BuildError, match="unknown processor 'riscv64'; allowed: x86_64, aarch64"):
        wheels.check_machines(["x86_64", "riscv64"])


def test_a_file_of_another_processor_is_found(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(b"\x7fELF" + bytes(14) + (62).to_bytes(2, "little"))
    wheels.check_elf(file, "x86_64")
    with pytest.raises(BuildError, match=r"lib\.so must be an ELF file of aarch64, got machine number 62"):
        wheels.check_elf(file, "aarch64")
