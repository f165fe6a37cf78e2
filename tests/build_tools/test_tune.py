"""tune: candidates are the kernel's file with other constants; the pack holds them all. Tracing is a stand-in."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from build_tools import build as build_module
from build_tools import tune as tune_module
from build_tools.errors import BuildError
from build_tools.progress import make_console
from build_tools.tune import LIBRARY, make_candidates, parse_values, rewrite, tune
from tests.build_tools import fake_trace

FILE = '''"""Scales, in µs."""

from kernels_src.declare import grid, kernel

_WARPS: int = 4
_TILES = {
    "ä": (1, 2),
}  # of a block


@kernel(axes=grid(factor=(2, 3)), archs=("sm_90a",))
def scale(factor):
    """Scale x."""
    return _WARPS


@kernel(axes=grid(factor=(2,)), archs=("sm_90a",))
def scale_back(factor):
    """Scale x back."""


def helper():
    return _TILES
'''


def test_a_candidate_is_the_file_with_other_constants_and_kernels_of_other_names() -> None:
    written = rewrite(FILE, "__3", {"_WARPS": "8", "_TILES": '{"x": 1}'})
    expected = FILE.replace("= 4", "= 8").replace('{\n    "ä": (1, 2),\n}', '{"x": 1}')
    expected = expected.replace("def scale(", "def scale__3(").replace("def scale_back(", "def scale_back__3(")
    assert written == expected


def test_constant_that_does_not_exist_is_refused() -> None:
    with pytest.raises(BuildError, match="the kernel file sets no constant _ROWS at its top level"):
        rewrite(FILE, "__1", {"_ROWS": "1"})


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("_A=1", ["1"]),
        ("_A=1,2, 4", ["1", "2", "4"]),
        ("_A=Tile(1, 2),{'a': [3, 4]}", ["Tile(1, 2)", "{'a': [3, 4]}"]),
        ("_A=(1, 2)", ["(1, 2)"]),
    ],
)
def test_values_are_expressions(text: str, values: list[str]) -> None:
    assert parse_values(text) == ("_A", values)


@pytest.mark.parametrize("text", ["_A", "_A=", "=1", "a b=1", "_A=1,,2", "_A=)"])
def test_values_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(BuildError, match=r"--try takes NAME=VALUE,VALUE\.\.\., a constant"):
        parse_values(text)


def test_first_candidate_is_the_file_and_then_come_all_combinations() -> None:
    candidates = make_candidates("demo.scale", [("_A", ["1", "2"]), ("_B", ["3", "4"])])
    assert [candidate.kernel for candidate in candidates] == [f"demo.scale__{number}" for number in range(5)]
    assert [dict(candidate.values) for candidate in candidates] == [
        {},
        {"_A": "1", "_B": "3"},
        {"_A": "1", "_B": "4"},
        {"_A": "2", "_B": "3"},
        {"_A": "2", "_B": "4"},
    ]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "kernels"
    (root / "demo").mkdir(parents=True)
    (root / "demo" / "scale.py").write_text(FILE)
    library = tmp_path / LIBRARY
    library.write_bytes(b"library")
    monkeypatch.setattr(build_module, "trace_files", fake_trace.trace_files)
    # The parameters of what --keep leaves out are read from real kernels, which these are not.
    monkeypatch.setattr(build_module, "read_signatures", lambda left_out, run: [])
    monkeypatch.setattr(tune_module, "_build_library", lambda store, folder: library)
    return root


def test_pack(tmp_path: Path, kernels: Path) -> None:
    pack = tmp_path / "out" / "demo.scale.pack"
    report = tune("demo.scale", ["_WARPS=1,2"], ["factor=3"], pack, 1, tmp_path / "cache", make_console(), kernels)
    assert report.failures == []
    assert {trace.variant for trace in report.traces} == {"f3"}
    with zipfile.ZipFile(pack) as archive:
        assert archive.read(LIBRARY) == b"library"
        table = json.loads(archive.read("pack.json"))
    assert table["kernel"] == "demo.scale"
    assert [(each["kernel"], each["values"]) for each in table["candidates"]] == [
        ("demo.scale__0", {}),
        ("demo.scale__1", {"_WARPS": "1"}),
        ("demo.scale__2", {"_WARPS": "2"}),
    ]
    assert all(each["registers"] > 0 and each["spill_bytes"] == 0 for each in table["candidates"])


def test_unknown_kernel_and_axis_are_named(tmp_path: Path, kernels: Path) -> None:
    def run(kernel: str, keep: str) -> None:
        tune(kernel, ["_WARPS=1"], [keep], tmp_path / "p.pack", 1, tmp_path / "cache", make_console(), kernels)

    with pytest.raises(BuildError, match=r"no kernel demo\.blur; known: demo\.scale, demo\.scale_back"):
        run("demo.blur", "factor=2")
    with pytest.raises(BuildError, match=r"--keep takes AXIS=VALUE,VALUE\.\.\.; axes: factor"):
        run("demo.scale", "size=2")
