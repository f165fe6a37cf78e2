"""What docs/cpp.md names is there: functions, C++ names, statuses, files; its programs compile."""

from __future__ import annotations

import ast
import importlib.resources
import json
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


def docstrings(family: str) -> str:
    functions = (
        node
        for file in (ROOT / "python" / "tilekernels" / family).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    )
    return "\n".join(ast.get_docstring(function) or "" for function in functions)


def test_every_number_of_an_argument_struct_is_explained() -> None:
    """In the comment of its entry, in a docstring of its family, or in the table of docs/cpp.md."""
    manifest = Path(str(importlib.resources.files("tilekernels"))) / "manifest.json"
    if not manifest.exists():
        pytest.skip("tilekernels is not built here")
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", DOC, re.MULTILINE)
    table = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    unexplained = []
    for kernel in json.loads(manifest.read_text())["kernels"]:
        numbers = [each["name"] for each in kernel["params"] if each["kind"] == "scalar"]
        numbers += [each["name"] for each in kernel["axes"] if each["kind"] == "value"]
        text = kernel["doc"] + docstrings(kernel["name"].split(".")[0])
        for name in sorted({*numbers} - {*kernel["derived"]} - table):
            if not re.search(rf"\b{name}\b", text):
                unexplained.append(f"{kernel['name']}: {name}")
    assert unexplained == []
