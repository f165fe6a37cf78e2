"""Lists the library's binary interface: statuses and other enums, structs with the place of each field, functions.

    python -m tests.csrc.abi          rewrites csrc/abi.txt from csrc/include/tilekernels/tilekernels.h
    python -m tests.csrc.abi OPS_H    rewrites csrc/abi_operators.txt from the generated header of an install

The C compiler tells sizes and offsets; names and types are read from the header.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "csrc" / "include"
HEADER = INCLUDE / "tilekernels" / "tilekernels.h"
LISTING = ROOT / "csrc" / "abi.txt"
OPERATORS = ROOT / "csrc" / "abi_operators.txt"
TITLE = """\
# The binary interface of libtilekernels.so.0, compared by tests/csrc/test_abi.py. How to change it: CONTRIBUTING.md,
# "Changing the C interface". Written by `python -m tests.csrc.abi`.
"""
OPERATORS_TITLE = """\
# The typed entries that programs may rely on: fields and enumerators may be added at the end, nothing else may change
# (tests/csrc/test_abi.py). Operators join at a release: `python -m tests.csrc.abi PREFIX/include/tilekernels/ops.h`.
"""


def list_header(header: Path, include: Path = INCLUDE) -> list[str]:
    """One line a fact, in the order of the header; fields and enumerators are indented below their type."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
    types = list(re.finditer(r"typedef (enum|struct|union) (\w+) \{(.*?)\} \2;", text, flags=re.DOTALL))
    values = _ask_compiler(header, include, [fact for found in types for fact in _questions(*found.groups())])
    lines = [f"{name} {value}" for name, value in re.findall(r"#define (TK_ABI_VERSION) (\d+)", text)]
    for found in types:
        lines += _describe_type(*found.groups(), values)
    functions = re.findall(r"TK_API ([^;]*?[ *])(tk_\w+)\(([^;]*)\);", text)
    lines += [f"function {name}: {_squeeze(result)} ({_squeeze(params)})" for result, name, params in functions]
    return lines


def _questions(kind: str, name: str, body: str) -> Iterator[str]:
    """C expressions whose values the listing shows."""
    if kind == "enum":
        yield from re.findall(r"\b(TK_\w+)", body)
        return
    yield f"sizeof({name})"
    for _, field in _fields(body):
        yield f"offsetof({name}, {field})"
        yield f"sizeof((({name}*)0)->{field})"


def _describe_type(kind: str, name: str, body: str, values: dict[str, int]) -> Iterator[str]:
    if kind == "enum":
        yield f"enum {name}"
        yield from (f"  {each} = {values[each]}" for each in re.findall(r"\b(TK_\w+)", body))
        return
    yield f"{kind} {name}: {values[f'sizeof({name})']} bytes"
    for declared, field in _fields(body):
        place, size = values[f"offsetof({name}, {field})"], values[f"sizeof((({name}*)0)->{field})"]
        yield f"  {place} {field}: {declared}, {size} bytes"


def _fields(body: str) -> list[tuple[str, str]]:
    """(type, name) of each field of a struct."""
    return [
        (_squeeze(declared) + array, name)
        for declared, name, array in re.findall(r"\s*([^;]*?[ *])(\w+)(\[\w+\])?;", body)
    ]


def _squeeze(text: str) -> str:
    return " ".join(text.split()).replace(" *", "*")


def _ask_compiler(header: Path, include: Path, questions: list[str]) -> dict[str, int]:
    prints = "".join(f'  printf("%lld\\n", (long long)({question}));\n' for question in questions)
    source = (
        f'#include <stddef.h>\n#include <stdio.h>\n#include "{header}"\nint main(void) {{\n{prints}  return 0;\n}}\n'
    )
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "ask"
        command = ["gcc", "-x", "c", "-", f"-I{include}", "-o", str(program)]
        subprocess.run(command, input=source, text=True, check=True)
        answers = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(questions, map(int, answers), strict=True))


def main() -> None:
    if len(sys.argv) > 1:
        header = Path(sys.argv[1])
        OPERATORS.write_text(OPERATORS_TITLE + "\n".join(list_header(header, header.parents[1])) + "\n")
        return
    LISTING.write_text(TITLE + "\n".join(list_header(HEADER)) + "\n")


if __name__ == "__main__":
    main()
