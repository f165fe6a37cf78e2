"""The C++ headers: views, failures with and without exceptions, scale layouts as in Python, views of at::Tensor."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.csrc.conftest import HERE, run
from tilekernels.layout import SfLayout

TYPES = [{"rounded": False}, {"rounded": True, "packed": True}, {"e4m3": True}]  # ScaleType of quant.hpp

FROM_TORCH = """\
#include "tilekernels/torch.hpp"
tk_status gate(const at::Tensor& scores) {
  const tilekernels::Tensor view = tilekernels::from_torch(scores);
  const tk_tensor* tensor = view;
  return tensor->ndim == 2 ? TK_OK : TK_INVALID_ARGUMENT;
}
"""


def build(installed: Path, folder: Path, *flags: str) -> Path:
    library, program = installed / "lib" / "libtilekernels.so.0", folder / "cpp_headers"
    link = [library, f"-Wl,-rpath,{library.parent}"]
    warnings = ["-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror", "-pedantic"]
    run(["g++", *flags, *warnings, f"-I{installed}/include", HERE / "cpp_headers.cpp", *link, "-o", program])
    return program


@pytest.mark.parametrize("standard", ["c++17", "c++20", "c++23"])
def test_views_and_refusals(installed: Path, tmp_path: Path, standard: str) -> None:
    lines = run([build(installed, tmp_path, f"-std={standard}")]).splitlines()
    assert [line for line in lines if line.startswith(("wrong", "refused"))] == [
        "refused: tilekernels::Tensor: strides must have 2 elements, one per dimension, got 1",
        "refused: tilekernels::Dims: must be at most 8 numbers, got 9",
        "refused: demo.topk: the arguments must be a struct whose size field is sizeof that struct, 48 here, got null",
    ]


def test_without_exceptions(installed: Path, tmp_path: Path) -> None:
    lines = run([build(installed, tmp_path, "-std=c++17", "-fno-exceptions", "-fno-rtti")]).splitlines()
    assert [line for line in lines if line.startswith(("wrong", "refused"))] == []


def test_scale_layouts_are_those_of_python(installed: Path, tmp_path: Path) -> None:
    lines = [line for line in run([build(installed, tmp_path, "-std=c++17")]).splitlines() if line.startswith("layout")]
    assert len(lines) == 3 * 2 * 4 * 4
    for line in lines:
        case, _, got = line.removeprefix("layout ").partition(": ")
        kind, order, rows, groups = map(int, case.split())
        layout = SfLayout(col_major=order == 1, **TYPES[kind])
        num_bytes = layout.storage_size(rows, groups) * layout.itemsize
        expected = (*layout.shape(rows, groups), *layout.strides(rows, groups), num_bytes)
        assert tuple(map(int, got.split())) == expected, line


def test_formats(installed: Path, tmp_path: Path) -> None:
    lines = [line for line in run([build(installed, tmp_path, "-std=c++17")]).splitlines() if line.startswith("data")]
    assert lines == ["data 0: 8 bits of code 10, 64", "data 1: 8 bits of code 0, 32", "data 2: 8 bits of code 1, 96"]


def test_views_of_at_tensor_compile(installed: Path, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    include = Path(spec.origin).parent / "include"
    if not (include / "ATen" / "core" / "Tensor.h").exists():
        pytest.skip("this torch has no C++ headers")
    (tmp_path / "from_torch.cpp").write_text(FROM_TORCH)
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{installed}/include"]
    run(["g++", *flags, "-isystem", include, tmp_path / "from_torch.cpp"])
