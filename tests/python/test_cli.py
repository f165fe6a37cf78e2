"""The command `tilekernels`, on a manifest of its own and on machines that are made up."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import pytest

import tilekernels
from tilekernels import _manifest
from tilekernels.cli import doctor as doctor_module
from tilekernels.cli import main

MANIFEST: dict[str, Any] = {
    "schema": 1,
    "version": "0.1.0",
    "profile": "demo",
    "archs": ["sm_80", "sm_90a"],
    "build": {"tilelang": "0.1.15", "nvcc": "13.0.88"},
    "kernels": [
        {
            "name": "demo.cast",
            "doc": "Casts.",
            "axes": [
                {"name": "fmt", "kind": "dtype_of", "of": "out", "values": ["e4m3", "e2m1"]},
                {"name": "group", "kind": "value", "values": [32, 128]},
                {"name": "rounded", "kind": "value", "values": [False, True]},
                {"name": "form", "kind": "forms", "values": ["aligned", "general"]},
            ],
            "params": [{"name": "x"}, {"name": "out"}],
        },
        {"name": "demo.rank", "doc": "Ranks.", "axes": [], "params": [{"name": "scores"}]},
    ],
    "variants": [
        {
            "kernel": "demo.cast",
            "arch": arch,
            "config": {"fmt": fmt, "group": 128, "rounded": rounded, "form": form},
        }
        for arch in ("sm_80", "sm_90a")
        for fmt in ("e4m3", "e2m1")
        for rounded in (False, True)
        for form in ("aligned", "general")
        if (arch, fmt) != ("sm_80", "e2m1")
    ]
    + [{"kernel": "demo.rank", "arch": "sm_90a", "config": {}}],
    "validated_on": {"sm_90a": "H200"},
}

H200 = {
    "index": 0,
    "name": "NVIDIA H200 [SXM]",
    "capability": (9, 0),
    "num_sms": 132,
    "total_memory": 2**37,
    "arch": "sm_90a",
    "wanted_arch": "sm_90a",
}
B200 = {**H200, "index": 1, "name": "NVIDIA B200", "capability": (10, 0), "arch": None, "wanted_arch": "sm_100a"}
TURING = {**H200, "index": 2, "name": "Tesla T4", "capability": (7, 5), "arch": None, "wanted_arch": None}


@pytest.fixture(autouse=True)
def _demo_manifest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The manifest above, read through the real loader."""
    (tmp_path / "manifest.json").write_text(json.dumps(MANIFEST))
    monkeypatch.setattr(_manifest.importlib.resources, "files", lambda package: tmp_path)
    _manifest.load_manifest.cache_clear()
    yield
    _manifest.load_manifest.cache_clear()


def run(*arguments: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(main, arguments)


# ---- list ------------------------------------------------------------------------------------------------------------


def test_list_shows_kernels_axes_and_archs() -> None:
    result = run("list")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "demo.cast fmt=e4m3|e2m1 group=32|128 rounded=False|True sm_80: 4 sm_90a: 8" in lines
    assert "demo.rank sm_90a: 1" in lines
    assert "form" not in result.output  # machine forms are the library's own choice


def test_list_marks_what_never_ran() -> None:
    lines = run("list").output.splitlines()
    assert "sm_80: compiled, not run" in lines
    assert "sm_90a: ran on H200" in lines


def test_list_ends_with_what_it_was_built_with() -> None:
    assert run("list").output.splitlines()[-1] == (
        "2 kernels, 13 variants; version 0.1.0, profile demo, compiled with TileLang 0.1.15 and nvcc 13.0.88"
    )


def test_list_as_json() -> None:
    listing = json.loads(run("list", "--json").output)
    assert listing["archs"] == [
        {"name": "sm_80", "validated_on": None, "not_run": []},
        {"name": "sm_90a", "validated_on": "H200", "not_run": []},
    ]
    assert listing["kernels"][0] == {
        "name": "demo.cast",
        "doc": "Casts.",
        "params": ["x", "out"],
        "axes": {"fmt": ["e4m3", "e2m1"], "group": [32, 128], "rounded": [False, True]},
        "variants": {"sm_80": 4, "sm_90a": 8},
    }


def test_list_in_a_tree_that_was_never_built(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").unlink()
    result = run("list")
    assert result.exit_code == 1
    assert "was never built; install a wheel, or build one with `make wheel`" in result.output


# ---- covers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["demo.cast"], "yes: demo.cast: 12 variants on sm_80, sm_90a"),
        (["demo.cast", "fmt=e2m1"], "yes: demo.cast fmt=e2m1: 4 variants on sm_90a"),
        (
            ["demo.cast", "group=128", "rounded=true"],
            "yes: demo.cast group=128 rounded=true: 6 variants on sm_80, sm_90a",
        ),
        (["demo.rank", "--arch", "sm_90a"], "yes: demo.rank on sm_90a: 1 variants on sm_90a"),
    ],
)
def test_covers_what_was_compiled(arguments: list[str], text: str) -> None:
    result = run("covers", *arguments)
    assert (result.exit_code, result.output.strip()) == (0, text)


CAST_HOLDS = "demo.cast was compiled for fmt=e4m3|e2m1 group=32|128 rounded=False|True on sm_80|sm_90a"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["demo.cast", "group=32"], f"no: this build holds no demo.cast group=32; {CAST_HOLDS}"),
        (["demo.cast", "group=48"], f"no: this build holds no demo.cast group=48; {CAST_HOLDS}"),
        (
            ["demo.cast", "fmt=e2m1", "--arch", "sm_80"],
            f"no: this build holds no demo.cast fmt=e2m1 on sm_80; {CAST_HOLDS}",
        ),
        (["demo.sort"], "no: this build holds no demo.sort; its kernels are demo.cast, demo.rank"),
        (
            ["demo.cast", "form=aligned"],
            "Error: demo.cast: axis must be one of fmt, group, rounded, got form",
        ),
        (["demo.rank", "k=1"], "Error: demo.rank: axis must be one of (it has none), got k"),
    ],
)
def test_covers_says_what_there_is_instead(arguments: list[str], text: str) -> None:
    result = run("covers", *arguments)
    assert (result.exit_code, result.output.strip()) == (1, text)


def test_covers_wants_pairs() -> None:
    result = run("covers", "demo.cast", "e4m3")
    assert result.exit_code == 2
    assert "axes are given as AXIS=VALUE, got 'e4m3'" in result.output


def test_covers_from_python() -> None:
    assert tilekernels.covers("demo.cast", fmt="e2m1", rounded=True)
    assert not tilekernels.covers("demo.cast", "sm_80", fmt="e2m1")
    assert not tilekernels.covers("demo.sort")


# ---- doctor ----------------------------------------------------------------------------------------------------------


def run_doctor(
    monkeypatch: pytest.MonkeyPatch, gpus: list[dict[str, Any]], driver: int | None = 13000
) -> click.testing.Result:
    extension = SimpleNamespace(
        driver_version=lambda: driver,
        required_driver_version=lambda: 13000,
        devices=lambda: gpus,
        packs=lambda: ["/srv/tilekernels_pack_more.so"],
    )
    monkeypatch.setattr(doctor_module, "load_native", lambda: extension)
    return run("doctor")


def test_doctor_is_content_with_a_served_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_doctor(monkeypatch, [H200])
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert "holds: sm_80 (compiled, not run), sm_90a (ran on H200); 2 kernels, profile demo" in lines
    assert "driver: CUDA 13.0" in lines
    assert "pack: /srv/tilekernels_pack_more.so" in lines
    assert "0 NVIDIA H200 [SXM] 9.0 served by sm_90a" in lines


def test_doctor_names_the_wheel_for_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_doctor(monkeypatch, [H200, B200, TURING])
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    assert f"1 NVIDIA B200 10.0 not served install tilekernels=={tilekernels.__version__}+cu130.sm100a" in lines
    assert "2 Tesla T4 7.5 not served no wheel is made for this compute capability" in lines


def test_doctor_asks_for_a_newer_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_doctor(monkeypatch, [H200], driver=12080)
    assert result.exit_code == 1
    assert "driver: CUDA 12.8, too old; update it: these kernels need a driver for CUDA 13.0 or newer (>= 580)" in (
        result.output
    )
    assert "not served" in result.output


def test_doctor_is_not_content_with_an_old_driver_that_hides_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_doctor(monkeypatch, [], driver=12080).exit_code == 1


def test_doctor_needs_no_driver_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_doctor(monkeypatch, [], driver=None)
    assert result.exit_code == 0
    assert "driver: none found (libcuda.so.1); a GPU needs a driver for CUDA 13.0 or newer (>= 580)" in result.output
    assert "GPUs: none that can be used; CPU tensors run the references" in result.output


def test_doctor_shows_the_diagnosis_of_a_broken_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ImportError("tilekernels._C does not load: two builds are mixed")

    monkeypatch.setattr(doctor_module, "load_native", load)
    result = run("doctor")
    assert result.exit_code == 1
    assert "extension: does not load\ntilekernels._C does not load: two builds are mixed" in result.output


def test_doctor_finds_a_truncated_library_before_it_loads_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def load() -> None:
        raise AssertionError("was loaded")

    library = tmp_path / "tilekernels" / "lib" / "libtilekernels.so.0"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"x" * 100)
    entry = importlib.metadata.PackagePath("tilekernels/lib/libtilekernels.so.0")
    entry.dist, entry.size = SimpleNamespace(locate_file=lambda path: tmp_path / path), 1000
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [entry])
    monkeypatch.setattr(doctor_module, "load_native", load)
    result = run("doctor")
    assert result.exit_code == 1
    assert "extension: damaged, install the wheel again: tilekernels/lib/libtilekernels.so.0" in " ".join(
        result.output.split()
    )


def test_doctor_in_a_tree_that_was_never_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "load_native", lambda: None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "extension: not built here" in result.output


# ---- the rest --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "folder"),
    [("--include-dir", "include"), ("--lib-dir", "lib"), ("--cmake-dir", "lib/cmake/tilekernels")],
)
def test_folders_for_a_cpp_build(option: str, folder: str, tmp_path: Path) -> None:
    result = run(option)
    assert (result.exit_code, result.output.strip()) == (0, str(tmp_path / folder))


def test_help_lists_the_commands() -> None:
    output = run("--help").output
    assert [name for name in ("list", "doctor", "covers") if f"\n  {name} " not in output] == []


def test_module_runs_as_a_command_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys, runpy\nsys.argv = ['tilekernels', '--version']\n"
        "try: runpy.run_module('tilekernels', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert tilekernels.__version__ in result.stdout
