"""codegen against the golden files, and the rules by which variants share or keep their checks."""

from __future__ import annotations

import copy
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2", reason="jinja2, of the build environment, is not installed")

from build_tools.codegen import generate, render
from build_tools.codegen_bind import Binding
from build_tools.codegen_model import read_kernels
from build_tools.codegen_text import identifier, readable
from build_tools.errors import CodegenError
from tests.golden_store import REGENERATE, ROOT, STORE, read_manifest

GENERATED = sorted(path.name for path in (STORE / "gen").iterdir() if not path.name.startswith("blobs."))


# ---- files -----------------------------------------------------------------------------------------------------------


def test_every_file_is_checked_in() -> None:
    assert sorted(render(read_manifest())) == GENERATED


@pytest.mark.parametrize("name", GENERATED)
def test_golden_file(name: str) -> None:
    assert render(read_manifest())[name] == (STORE / "gen" / name).read_text(), f"if this is meant: {REGENERATE}"


def test_second_run_touches_nothing(tmp_path: Path) -> None:
    generate(read_manifest(), tmp_path)
    for path in tmp_path.iterdir():
        os.utime(path, (1, 1))
    generate(read_manifest(), tmp_path)
    assert {path.stat().st_mtime for path in tmp_path.iterdir()} == {1}


def test_files_of_kernels_that_are_gone_are_removed_and_others_are_not(tmp_path: Path) -> None:
    generate(read_manifest(), tmp_path)
    (tmp_path / "blobs.cpp").write_text("// of embed\n")
    manifest = read_manifest()
    manifest["variants"] = [variant for variant in manifest["variants"] if variant["kernel"] != "demo.rank"]
    generate(manifest, tmp_path)
    assert not (tmp_path / "demo_rank.cpp").exists()
    assert (tmp_path / "demo_cast.cpp").exists()
    assert (tmp_path / "blobs.cpp").exists()
    assert "rank" not in (tmp_path / "registry.cpp").read_text() + (tmp_path / "ops.h").read_text()


def test_manifest_without_kernels_compiles(tmp_path: Path) -> None:
    generate(read_manifest() | {"kernels": [], "variants": [], "units": [], "archs": []}, tmp_path)
    includes = [f"-I{ROOT}/csrc/include", f"-I{ROOT}/csrc/src"]
    command = ["g++", "-std=c++20", "-Wall", "-Werror", *includes, "-fsyntax-only", str(tmp_path / "registry.cpp")]
    subprocess.run(command, check=True)


# ---- what variants share ---------------------------------------------------------------------------------------------

Change = Callable[[list[dict[str, Any]]], None]


def binding_of_transpose(change: Change, key: int = 1) -> Binding:
    """demo.transpose with its two-byte variants changed: aligned and general, on sm_80, then on sm_90a."""
    manifest = copy.deepcopy(read_manifest())
    change([variant for variant in manifest["variants"] if variant["variant"].startswith("b2_")])
    kernel = next(kernel for kernel in read_kernels(manifest) if kernel.name == "demo.transpose")
    return Binding(kernel, key)


def guards(binding: Binding) -> list[str]:
    return [binding.guard_body(variant) for variant in binding.variants]


def test_guard_of_all_forms_is_a_requirement() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["guards"] = ["num_rows <= 1024"]

    binding = binding_of_transpose(change)
    assert 'check_guard(frame, frame.symbols[Symbol::num_rows] <= 1024, "num_rows <= 1024")' in binding.bind_body()
    assert guards(binding) == [""] * 4


def test_guard_of_one_arch_stays_with_its_variants() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["guards"] = ["num_rows <= 1024"] if variant["arch"] == "sm_80" else []

    binding = binding_of_transpose(change)
    assert "check_guard" not in binding.bind_body()
    expected = '  if (!(frame.symbols[Symbol::num_rows] <= 1024)) return "num_rows <= 1024";\n  return nullptr;'
    assert guards(binding) == [expected, expected, "", ""]


def test_shape_of_one_form_becomes_its_guard() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            if variant["config"]["form"] == "aligned":
                variant["params"][0]["shape"][1] = "128"
                variant["guards"] = []

    binding = binding_of_transpose(change)
    assert "bind_dim(frame, Symbol::num_cols, Tensor::x, 1, INT32_MAX)" in binding.bind_body()
    expected = '  if (!(shape_is(frame.tensors[Tensor::x], 1, 128))) return "x.shape[1] == 128";\n  return nullptr;'
    assert guards(binding) == [expected, "", expected, ""]


def test_stride_of_one_form_becomes_its_guard() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["guards"] = []
            if variant["config"]["form"] == "general":
                variant["params"][0]["strides"][1] = "x_inner"
                variant["symbols"].append({"name": "x_inner", "dtype": "int32", "from": ["x", "strides", 1]})

    binding = binding_of_transpose(change)
    assert "bind_stride(frame, Symbol::x_inner, Tensor::x, 1, INT32_MAX)" in binding.bind_body()
    expected = '  if (!(stride_is(frame.tensors[Tensor::x], 1, 1))) return "x.strides[1] == 1";\n  return nullptr;'
    assert guards(binding) == [expected, "", expected, ""]


def test_narrow_symbol_of_one_form_becomes_its_guard() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["guards"] = []
            if variant["config"]["form"] == "general":
                variant["symbols"][2]["dtype"] = "int64"

    binding = binding_of_transpose(change)
    assert "bind_stride(frame, Symbol::x_stride, Tensor::x, 0, INT64_MAX)" in binding.bind_body()
    expected = (
        '  if (!(frame.symbols[Symbol::x_stride] <= INT32_MAX)) return "x_stride <= 2147483647";\n  return nullptr;'
    )
    assert guards(binding) == [expected, "", expected, ""]


def test_null_that_one_form_takes_is_refused_by_the_guard_of_the_other() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["guards"] = []
            variant["params"][0]["nullable"] = variant["config"]["form"] == "general"

    binding = binding_of_transpose(change)
    assert "check_tensor(frame, Tensor::x, DType::none, 2, true, false)" in binding.bind_body()
    expected = '  if (!(frame.tensors[Tensor::x] != nullptr)) return "x is not None";\n  return nullptr;'
    assert guards(binding) == [expected, "", expected, ""]


def test_expectation_from_a_tensor_that_may_be_null_waits_for_it() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["guards"] = []
            variant["params"][0]["nullable"] = True
            variant["params"][1]["shape"][1] = "floordiv(num_rows, 2)"

    body = binding_of_transpose(change).bind_body()
    assert "knows(frame, 1u << Symbol::num_rows) ? tk::floordiv(frame.symbols[Symbol::num_rows], 2) : kAny" in body


def test_square_compares_its_second_dimension() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["guards"] = []
            variant["params"][0]["shape"] = ["num_rows", "num_rows"]

    body = binding_of_transpose(change).bind_body()
    square = "{frame.symbols[Symbol::num_rows], frame.symbols[Symbol::num_rows]}"
    assert f'check_shape(frame, Tensor::x, {square}, "(num_rows, num_rows)")' in body


def test_dense_strides_may_be_left_out() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["params"][1]["strides"] = ""

    assert binding_of_transpose(change).bind_body() == binding_of_transpose(lambda _: None).bind_body()


def test_guard_on_an_output_that_is_not_there_yet_is_put_off() -> None:
    def change(variants: list[dict[str, Any]]) -> None:
        for variant in variants:
            variant["guards"] = ["is_dtype(out, int16)"]

    body = binding_of_transpose(change).bind_body()
    absent = "!((!frame.check_only || frame.tensors[Tensor::out] != nullptr))"
    assert f"{absent} || is_dtype(frame.tensors[Tensor::out], DType::int16)" in body


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("shape", ["num_rows"], "demo.transpose: forms of one key must agree on ranks, x has 1 and 2 dimensions in"),
        ("dtype", "int32", "demo.cast: forms of one key must agree on dtypes, x is bfloat16 and int32 in"),
    ],
)
def test_forms_that_do_not_fit_together_are_refused(field: str, value: object, text: str) -> None:
    manifest = read_manifest()
    kernel = text.split(":")[0]
    variants = [variant for variant in manifest["variants"] if variant["kernel"] == kernel]
    other = copy.deepcopy(variants[-1])
    other["params"][0][field] = value
    manifest["variants"].append(other)
    with pytest.raises(CodegenError, match=text):
        render(manifest)


def add_symbols(manifest: dict[str, Any]) -> None:
    symbols = manifest["variants"][-1]["symbols"]
    symbols += [{"name": f"s{index}", "dtype": "int32", "from": ["x", "shape", 0]} for index in range(30)]


def add_dimensions(manifest: dict[str, Any]) -> None:
    manifest["variants"][-1]["params"][0].update(shape=["2"] * 9, strides="")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (add_symbols, "demo.transpose: must have at most 32 symbols, got 33"),
        (add_dimensions, "demo.transpose: must have at most 8 dimensions, got 9"),
    ],
    ids=["symbols", "dimensions"],
)
def test_what_the_runtime_has_no_room_for_is_refused(change: Callable[[dict[str, Any]], None], text: str) -> None:
    manifest = read_manifest()
    change(manifest)
    with pytest.raises(CodegenError, match=text):
        render(manifest)


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("floordiv(hidden + 31, 32)", "(hidden + 31) // 32"),
        ("floormod(x_stride * 2, 16) == 0", "(x_stride * 2) % 16 == 0"),
        ("and_(a < b, not_(is_null(x)))", "a < b and not (x is None)"),
        ("aligned(x, 16)", "alignment of x to 16 bytes"),
        ("is_dtype(out, int32)", "out is int32"),
        ("max(a - (b - c), shr(a, 1))", "max(a - (b - c), a >> 1)"),
    ],
)
def test_expressions_in_words(text: str, words: str) -> None:
    assert readable(text) == words


@pytest.mark.parametrize(("name", "field"), [("hidden", "hidden"), ("register", "register_"), ("size", "size_")])
def test_names_that_c_keeps_for_itself(name: str, field: str) -> None:
    assert identifier(name) == field
