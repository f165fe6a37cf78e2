"""Compile units, nvcc and what is refused of its output; with kernels of a few lines."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from build_tools import compile as compile_module
from build_tools.cache import Cache
from build_tools.compile import (
    CompileError,
    compile_key,
    compile_source,
    compile_unit,
    find_compiled,
    find_machine_trace,
    run_nvcc,
)
from build_tools.ptxas import Usage, parse, without_times
from build_tools.toolchain import Toolchain, find_toolchain
from build_tools.units import BASE_FLAGS, MAX_VARIANTS, arch_flag, extra_flags, make_units
from tests.build_tools.fake_trace import kernel_source, launch, traced

FLAGS = (*BASE_FLAGS, arch_flag("sm_90a"))
KERNEL = 'extern "C" __global__ void tk_k(float* x) { x[threadIdx.x] *= 2.f; }\n'


@pytest.fixture(scope="module")
def toolchain() -> Toolchain:
    return find_toolchain()


# ---- units ----------------------------------------------------------------------------------------------------------


def test_units_are_cut_by_sorted_id_and_flags(tmp_path: Path) -> None:
    variants = [traced(f"f{number:02}") for number in range(MAX_VARIANTS + 3)]
    variants += [traced("fast", pass_configs={"tl.enable_fast_math": True}), traced("f00", arch="sm_80")]
    units = make_units(reversed(variants), tmp_path)
    assert [(unit.id, len(unit.variants), unit.extra_flags) for unit in units] == [
        ("demo.scale-sm_80-0", 1, ()),
        ("demo.scale-sm_90a-0", 16, ()),
        ("demo.scale-sm_90a-1", 3, ()),
        ("demo.scale-sm_90a-2", 1, ("--use_fast_math",)),
    ]
    assert [variant.id for variant in units[2].variants] == ["f16", "f17", "f18"]
    assert units == make_units(variants, tmp_path)


def test_pass_options_become_flags_as_in_tilelang() -> None:
    options = {
        "tl.enable_fast_math": True,
        "tl.ptxas_register_usage_level": 10,
        "tl.device_compile_flags": "-DA=1 -DB",
        "tl.disable_tma_lower": True,
    }
    assert extra_flags(launch(pass_configs=options, flags=["-maxrregcount=64"])) == (
        "-DA=1",
        "-DB",
        "--use_fast_math",
        "--ptxas-options=--register-usage-level=10",
        "-maxrregcount=64",
    )
    assert extra_flags(launch(pass_configs={"tl.enable_fast_math": False})) == ()


def test_the_source_has_one_head_and_no_name_with_two_types(tmp_path: Path) -> None:
    (unit,) = make_units([traced("f2", 2), traced("f3", 3, "int")], tmp_path)
    assert unit.source.count("#include <cuda_fp16.h>") == 1
    assert unit.source.count("tk_demo_scale__f2(") == 2
    assert unit.source.count("tk_demo_scale__f3(") == 2
    assert "extern __shared__ __align__(1024) int tile[]" not in unit.source
    assert "int* const tile = reinterpret_cast<int*>(tk_shared_1024);" in unit.source


def test_own_headers_become_part_of_the_source(tmp_path: Path) -> None:
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "scale.cuh").write_text('#include "inner.cuh"\n__device__ int scale() { return inner(); }\n')
    (tmp_path / "common" / "inner.cuh").write_text("__device__ int inner() { return 7; }\n")
    with_header = [
        dataclasses.replace(variant, source='#include "common/scale.cuh"\n' + variant.source)
        for variant in (traced("f2"), traced("f3"))
    ]
    (unit,) = make_units([*with_header, traced("f4")], tmp_path)
    assert unit.source.count("int inner()") == 1
    assert unit.source.index("int inner()") < unit.source.index("int scale()") < unit.source.index("__global__")
    assert '#include "' not in unit.source


# ---- nvcc -----------------------------------------------------------------------------------------------------------


def test_a_unit_compiles_comes_back_from_the_cache_and_has_the_same_bytes(toolchain: Toolchain, tmp_path: Path) -> None:
    (unit,) = make_units([traced("f2", 2), traced("f3", 3, "int")], tmp_path)
    cold = compile_unit(unit, toolchain, Cache(tmp_path, "compile"), tmp_path)
    assert cold.bad == ()
    assert cold.compiled is not None
    assert not cold.cached
    assert set(cold.compiled.usage) == {"tk_demo_scale__f2", "tk_demo_scale__f3"}
    assert all(usage.registers > 0 for usage in cold.compiled.usage.values())
    assert "Compile time" not in cold.compiled.ptxas

    elsewhere = compile_unit(unit, toolchain, Cache(tmp_path / "other", "compile"), tmp_path)
    assert elsewhere.compiled == cold.compiled

    warm = find_compiled(unit, toolchain, Cache(tmp_path, "compile"))
    assert warm is not None
    assert warm.cached
    assert warm.compiled == cold.compiled


def test_the_shared_memory_pointer_changes_no_byte(toolchain: Toolchain, tmp_path: Path) -> None:
    (unit,) = make_units([traced()], tmp_path)
    symbol = "tk_demo_scale__f2"
    assert (
        compile_source(unit.source, [symbol], FLAGS, toolchain).cubin
        == compile_source(kernel_source(name=symbol), [symbol], FLAGS, toolchain).cubin
    )


def test_the_key_holds_source_flags_and_compiler_and_no_place(toolchain: Toolchain, tmp_path: Path) -> None:
    (unit,) = make_units([traced()], tmp_path)
    key = compile_key(unit, toolchain)
    moved = dataclasses.replace(
        toolchain, nvcc=Path("/elsewhere/nvcc"), source="CUDACXX", include=(Path("/elsewhere"),)
    )
    assert compile_key(unit, moved) == key
    assert compile_key(unit, dataclasses.replace(toolchain, build="cuda_13.1")) != key
    assert compile_key(unit, dataclasses.replace(toolchain, tilelang="0.1.16")) != key
    assert compile_key(dataclasses.replace(unit, source=unit.source + "\n"), toolchain) != key
    assert compile_key(dataclasses.replace(unit, flags=(*unit.flags, "-DX")), toolchain) != key


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_every_arch_is_understood_by_nvcc(toolchain: Toolchain, arch: str) -> None:
    compiled = compile_source(KERNEL, ["tk_k"], (*BASE_FLAGS, arch_flag(arch)), toolchain)
    assert f"for '{arch}'" in compiled.ptxas


def test_the_failing_variants_are_named_by_the_compilers_words(toolchain: Toolchain, tmp_path: Path) -> None:
    variants = [traced(f"f{number}", number) for number in range(5)]
    broken = {"f1": "no_such_function()", "f4": "another_one()"}
    variants = [
        dataclasses.replace(variant, source=variant.source.replace("__syncthreads()", broken[variant.id]))
        if variant.id in broken
        else variant
        for variant in variants
    ]
    (unit,) = make_units(variants, tmp_path)
    result = compile_unit(unit, toolchain, Cache(tmp_path, "compile"), tmp_path)
    assert result.compiled is None
    found = {bad.variants[0].id: bad for bad in result.bad}
    assert set(found) == set(broken)
    for variant_id, name in broken.items():
        error = found[variant_id].error
        assert f'identifier "{name.removesuffix("()")}" is undefined' in error.output
        assert error.sentence.startswith("nvcc ended with exit code ")
        assert error.command.endswith("-o unit.cubin unit.cu")
        assert error.output.count("error") == 1
        line = int(error.output.split("(")[1].split(")")[0])
        assert name in found[variant_id].source.splitlines()[line - 1]
    assert find_compiled(unit, toolchain, Cache(tmp_path, "compile")) is None


def test_ptxas_errors_are_found_too(toolchain: Toolchain, tmp_path: Path) -> None:
    huge = traced("huge")
    huge = dataclasses.replace(
        huge,
        source=huge.source.replace(
            "  __syncthreads", "  __shared__ volatile float a[100000]; a[n] = 1;\n  __syncthreads"
        ),
    )
    (unit,) = make_units([traced(), huge], tmp_path)
    result = compile_unit(unit, toolchain, Cache(tmp_path, "compile"), tmp_path)
    assert [bad.variants[0].id for bad in result.bad] == ["huge"]
    assert "too much shared data" in result.bad[0].error.output


def test_errors_without_a_line_of_a_variant_are_found_by_halves(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "blame", lambda *_: {})
    variants = [traced(f"f{number}", number) for number in range(5)]
    variants[3] = dataclasses.replace(variants[3], source=variants[3].source.replace("__syncthreads()", "no_such_name"))
    (unit,) = make_units(variants, tmp_path)
    (bad,) = compile_unit(unit, toolchain, Cache(tmp_path, "compile"), tmp_path).bad
    assert [variant.id for variant in bad.variants] == ["f3"]
    assert 'identifier "no_such_name" is undefined' in bad.error.output
    assert bad.source.count("__launch_bounds__") == 1


def test_a_unit_whose_variants_all_fail_takes_one_run_of_nvcc(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []

    def counted(*arguments: Any) -> tuple[int, str]:
        runs.append(1)
        return run_nvcc(*arguments)

    monkeypatch.setattr(compile_module, "run_nvcc", counted)
    variants = [traced(f"f{number}", number) for number in range(8)]
    variants = [
        dataclasses.replace(variant, source=variant.source.replace("__syncthreads()", "no_such_function()"))
        for variant in variants
    ]
    (unit,) = make_units(variants, tmp_path)
    result = compile_unit(unit, toolchain, Cache(tmp_path, "compile"), tmp_path)
    assert [bad.variants[0].id for bad in result.bad] == [f"f{number}" for number in range(8)]
    assert len(runs) == 1


def test_variants_that_fail_only_together_are_named_together(
    toolchain: Toolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_module, "blame", lambda *_: {})
    variants = [
        dataclasses.replace(variant, source=variant.source + f"__device__ {kind} tk_helper;\n")
        for variant, kind in ((traced("f2"), "int"), (traced("f3"), "float"))
    ]
    (unit,) = make_units(variants, tmp_path)
    (bad,) = compile_unit(unit, toolchain, Cache(tmp_path, "compile"), tmp_path).bad
    assert [variant.id for variant in bad.variants] == ["f2", "f3"]
    assert "tk_helper" in bad.error.output


def test_a_source_without_its_kernel_is_refused(toolchain: Toolchain) -> None:
    with pytest.raises(CompileError, match="the source defines no kernel tk_other"):
        compile_source(KERNEL, ["tk_k", "tk_other"], FLAGS, toolchain)


def test_device_asserts_are_refused_for_their_path(toolchain: Toolchain) -> None:
    source = "#include <cassert>\n" + KERNEL.replace("{ x", '{ assert(x != nullptr && "/somebody/home/kernel.cu"); x')
    with pytest.raises(
        CompileError, match=r"would not be the same elsewhere: it contains the path /somebody/home/kernel\.cu"
    ):
        compile_source(source, ["tk_k"], FLAGS, toolchain)


def test_an_anonymous_namespace_is_refused(toolchain: Toolchain) -> None:
    source = "namespace { __device__ __noinline__ float twice(float v) { return v * 2 + clock(); } }\n"
    source += KERNEL.replace("*= 2.f", "= twice(x[threadIdx.x])")
    with pytest.raises(CompileError, match="would not be the same elsewhere"):
        compile_source(source, ["tk_k"], FLAGS, toolchain)


def test_what_counts_as_a_path() -> None:
    assert find_machine_trace(b"\0/usr/lib/kernel.cu\0") != ""
    assert find_machine_trace(b"\0-arch sm_90a\0cuda_13.0.r13.0/compiler.36424714_0\0") == ""
    assert find_machine_trace(b"\0/a/b\0/ab/cd\0//\0") == ""
    assert "_INTERNAL_" in find_machine_trace(b"\0_INTERNAL_0a1b2c_7_unit_cu\0")


def test_flags_from_the_environment_do_not_reach_nvcc(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = compile_source(KERNEL, ["tk_k"], FLAGS, toolchain)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-G")
    assert compile_source(KERNEL, ["tk_k"], FLAGS, toolchain) == plain


# ---- running processes ----------------------------------------------------------------------------------------------


def test_a_hanging_compiler_is_stopped_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_module, "NVCC_TIMEOUT", 0.5)
    start = time.monotonic()
    code, output = run_nvcc(["sh", "-c", "echo begun; sleep 60 & sleep 60"], tmp_path)
    assert time.monotonic() - start < 20
    assert code != 0
    assert "begun" in output
    assert "stopped after 0.5 s" in output


def test_stop_compilers_ends_running_ones_and_starts_no_more(tmp_path: Path) -> None:
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(run_nvcc(["sleep", "60"], tmp_path)[0]))
    thread.start()
    while not compile_module._running:
        time.sleep(0.01)
    try:
        compile_module.stop_compilers()
        thread.join(20)
        assert results == [-9]
        assert run_nvcc([shutil.which("true") or "true"], tmp_path)[1] == "stopped"
    finally:
        compile_module.allow_compilers()
    assert run_nvcc(["true"], tmp_path)[0] == 0


# ---- ptxas ----------------------------------------------------------------------------------------------------------

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'tk_b' for 'sm_90a'
ptxas info    : Function properties for tk_b
    16 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem, 8 bytes cmem[2]
ptxas info    : Compile time = 41.993 ms
ptxas info    : Compiling entry function 'tk_a' for 'sm_90a'
ptxas info    : Function properties for tk_a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
ptxas info    : Compile time = 28.343 ms
"""


def test_ptxas_output_by_symbol() -> None:
    found = parse(PTXAS)
    assert found == {"tk_b": Usage(255, 24, 40, 1024), "tk_a": Usage(32, 0, 0, 0)}
    assert found["tk_b"].spill_bytes == 64


def test_ptxas_times_are_left_out() -> None:
    assert "Compile time" not in without_times(PTXAS)
    assert parse(without_times(PTXAS)) == parse(PTXAS)


def test_real_spills_are_seen(toolchain: Toolchain) -> None:
    body = "".join(f"float a{n} = x[{n} * k];" for n in range(80))
    body += "__syncthreads();" + "".join(f"x[{n} * k + 1] = a{n};" for n in range(80))
    source = f'extern "C" __global__ void tk_k(volatile float* x, int k) {{ {body} }}'
    usage = compile_source(source, ["tk_k"], (*FLAGS, "-maxrregcount=24"), toolchain).usage["tk_k"]
    assert usage.registers <= 24
    assert usage.spill_stores > 0
    assert usage.spill_loads > 0
