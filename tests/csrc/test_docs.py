"""What docs/cpp.md names is there: functions, C++ names, statuses, files; its programs compile."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

import pytest

from tests.csrc.conftest import ROOT, run

DOC = (ROOT / "docs" / "cpp.md").read_text()
HEADERS = ROOT / "csrc" / "include" / "tilekernels"


def test_statuses_are_all_explained() -> None:
    header = (HEADERS / "tilekernels.h").read_text()
    statuses = set(re.findall(r"^  (TK_\w+) = \d+", header.split("} tk_status;")[0], re.MULTILINE))
    assert set(re.findall(r"^\| `(TK_\w+)`", DOC, re.MULTILINE)) == statuses - {"TK_OK"}


def test_functions_and_cxx_names_exist() -> None:
    text = "".join(path.read_text() for path in HEADERS.iterdir())
    operators = ("tk_moe_",)  # of ops.h, compiled below
    names = {name for name in re.findall(r"\btk_\w+", DOC) if not name.startswith(operators)}
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", text)] == []
    for name in sorted(set(re.findall(r"tilekernels::(\w+)", DOC)) - {"tilekernels", "static"}):
        assert re.search(rf"\b{name}\b", text), name


def test_headers_of_the_table_are_those_that_there_are(installed: Path) -> None:
    listed = re.findall(r"^\| `include/tilekernels/([\w.]+)`", DOC, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (installed / "include" / "tilekernels").iterdir())


def test_the_call_compiles(tmp_path: Path) -> None:
    include = Path(str(importlib.resources.files("tilekernels"))) / "include"
    if not include.exists():
        pytest.skip("tilekernels is not built here")
    (block,) = [text for text in re.findall(r"```cpp\n(.*?)```", DOC, re.DOTALL) if "#include" in text]
    (tmp_path / "call.cpp").write_text(block)
    run(["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{include}", tmp_path / "call.cpp"])
