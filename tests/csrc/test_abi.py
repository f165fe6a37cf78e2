"""Programs that were compiled against an earlier header go on working: the binary interface is what is written down."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.csrc import abi
from tests.csrc.conftest import run

HOW = "see 'Changing the C interface' in CONTRIBUTING.md"


def read_listing(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if not line.startswith("#")]


def blocks(lines: Iterable[str]) -> dict[str, list[str]]:
    """{type or function: the lines below it}; a struct's size is not part of its name."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("  "):
            found[list(found)[-1]].append(line)
        else:
            found[line.split(":")[0] if line.startswith(("struct", "union")) else line] = []
    return found


def changes(before: list[str], after: list[str]) -> list[str]:
    """What an old program would stumble over: lines that are gone, moved or different."""
    now = blocks(after)
    return [
        f"{name}: was {was}, is {now.get(name)}"
        for name, was in blocks(before).items()
        if name not in now or now[name][: len(was)] != was
    ]


def test_interface_is_the_one_written_down() -> None:
    assert abi.list_header(abi.HEADER) == read_listing(abi.LISTING), HOW


def test_operators_are_those_written_down(needs_extension: None) -> None:
    """A library of another profile may lack some of them."""
    header = Path(str(importlib.resources.files("tilekernels"))) / "include" / "tilekernels" / "ops.h"
    after = abi.list_header(header, header.parents[1])
    known = blocks(after)
    before = read_listing(abi.OPERATORS)
    built = {name for name in blocks(before) if name in known}
    assert built, f"{header} has none of the operators of {abi.OPERATORS.name}"
    assert [change for change in changes(before, after) if change.split(":")[0] in built] == [], HOW


def test_golden_operators_are_listed() -> None:
    """Every fact of a generated header has its line."""
    golden = abi.ROOT / "tests" / "build_tools" / "golden" / "gen" / "ops.h"
    lines = abi.list_header(golden)
    assert blocks(lines)["enum tk_demo_cast_rounding"] == [
        "  TK_DEMO_CAST_ROUNDING_NEAREST = 0",
        "  TK_DEMO_CAST_ROUNDING_UP = 1",
    ]
    assert blocks(lines)["struct tk_demo_rank_args"] == [
        "  0 size: size_t, 8 bytes",
        "  8 scores: const tk_tensor*, 8 bytes",
        "  16 num_sms: int32_t, 4 bytes",
        "  24 workspace: const tk_tensor*, 8 bytes",
        "  32 out: const tk_tensor*, 8 bytes",
    ]
    assert "function tk_demo_rank: tk_status (const tk_demo_rank_args* args, tk_stream stream)" in lines


@pytest.mark.parametrize(
    ("old", "new", "is_change"),
    [
        (["struct a: 8 bytes", "  0 size"], ["struct a: 16 bytes", "  0 size", "  8 more"], False),
        (["struct a: 16 bytes", "  0 size", "  8 x"], ["struct a: 16 bytes", "  0 size", "  8 y"], True),
        (["enum e", "  A = 0"], ["enum e", "  B = 0", "  A = 1"], True),
        (["function f: int (void)"], ["function f: int (int x)"], True),
        ([], ["function f: int (void)"], False),
    ],
    ids=["appended field", "renamed field", "enumerator in front", "other parameters", "new function"],
)
def test_what_counts_as_a_change(old: list[str], new: list[str], is_change: bool) -> None:
    assert bool(changes(old, new)) == is_change


def test_library_exports_what_is_written_down(installed: Path) -> None:
    symbols = run(["nm", "-D", "--defined-only", installed / "lib" / "libtilekernels.so.0"])
    exported = {line.split()[-1] for line in symbols.splitlines()}
    listed = {line.split()[1].rstrip(":") for line in read_listing(abi.LISTING) if line.startswith("function")}
    assert listed <= exported, HOW
