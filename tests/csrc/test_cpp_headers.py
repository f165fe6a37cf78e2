"""The C++ headers: views, failures with and without exceptions, scale layouts as in Python, views of at::Tensor."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.csrc.conftest import HERE, run
from tilekernels.layout import SfLayout

TYPES = [{"rounded": False}, {"rounded": True, "packed": True}, {"e4m3": True}]  # ScaleType of quant.hpp

FROM_TORCH = """\
#include <cstdio>
#include <ATen/ops/empty_strided.h>
#include "tilekernels/torch.hpp"

int main() {
  const at::Tensor scores = at::empty_strided({3, 5}, {8, 1}, at::kBFloat16);
  const tilekernels::Tensor view = tilekernels::from_torch(scores);
  const tk_tensor* tensor = view;
  std::printf("%d dimensions: %d %d, %d %d\\n", tensor->ndim, int(tensor->shape[0]), int(tensor->shape[1]),
              int(tensor->strides[0]), int(tensor->strides[1]));
  std::printf("%d bits of code %d on %d:%d, %d\\n", tensor->dtype.bits, tensor->dtype.code, tensor->device.device_type,
              tensor->device.device_id, tensor->data == scores.data_ptr());
  try {
    tilekernels::from_torch(at::empty_strided({3}, {1}, at::kComplexFloat));
  } catch (const std::invalid_argument& error) {
    std::printf("%s\\n", error.what());
  }
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


def test_views_of_at_tensor(installed: Path, tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        pytest.skip("torch is not installed")
    include = Path(spec.origin).parent / "include"
    if not (include / "ATen" / "core" / "Tensor.h").exists():
        pytest.skip("this torch has no C++ headers")
    (tmp_path / "from_torch.cpp").write_text(FROM_TORCH)
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{installed}/include", "-isystem", include]
    libraries = [f"-L{include.parent / 'lib'}", f"-Wl,-rpath,{include.parent / 'lib'}", "-ltorch_cpu", "-lc10"]
    library, program = installed / "lib" / "libtilekernels.so.0", tmp_path / "from_torch"
    link = [library, f"-Wl,-rpath,{library.parent}", *libraries, "-o", program]
    run(["g++", *flags, tmp_path / "from_torch.cpp", *link])
    assert run([program]).splitlines() == [
        "2 dimensions: 3 5, 8 1",
        "16 bits of code 4 on 1:0, 1",
        "tilekernels::from_torch: no kernel takes tensors of ComplexFloat",
    ]
