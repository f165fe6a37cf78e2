"""Kernels that only an overlay pack has, from Python: functions of the extension for each of them, launches through the
fake driver, and the operator that stood for one so far.

The pack holds demo.transpose of the golden store under another name, demo.swap.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.golden_store import BUILD, ROOT, STORE, install_golden, read_manifest
from tilekernels import _dispatch

LAUNCH = "module.demo_swap(Tensor('bfloat16', 64, 128), Tensor('bfloat16', 128, 64))"
ASKED = "describe(module.demo_swap(Tensor('bfloat16', 64, 128), ('bfloat16', 0, 128, 64)))"
WRONG = "module.demo_swap(Tensor('bfloat16', 64, 128), Tensor('bfloat16', 64, 128))"
NAMES = "[name for name in dir(module) if 'swap' in name], [kernel['name'] for kernel in module.kernels()]"
FUNCTIONS = ["check_demo_swap", "demo_swap"]
KERNELS = ["demo.cast", "demo.rank", "demo.transpose"]


@pytest.fixture(scope="module")
def pack() -> Path:
    """Made as `make pack` makes it, once for all workers."""
    pytest.importorskip("jinja2", reason="jinja2, of the build environment, is not installed")
    folder = BUILD.with_name(f"{BUILD.name}-pack")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store, tree = folder / "store", folder / "cmake"
        write_store(store)
        options = [f"-DTILEKERNELS_STORE={store}", "-DTILEKERNELS_PYTHON=OFF", "-DTILEKERNELS_PACK=ON"]
        run("cmake", "-S", ROOT, "-B", tree, *options)
        run("cmake", "--build", tree, "--parallel", "2", "--target", "tilekernels")
        shutil.copyfile(tree / "csrc" / "libtilekernels.so.0", folder / "swap.so")
    return folder / "swap.so"


def write_store(store: Path) -> None:
    manifest = read_manifest()
    for part in ("kernels", "variants"):
        key = "name" if part == "kernels" else "kernel"
        kept = [each for each in manifest[part] if each[key] == "demo.transpose"]
        manifest[part] = [{**each, key: "demo.swap"} for each in kept]
    units = {variant["unit"] for variant in manifest["variants"]}
    manifest["units"] = [unit for unit in manifest["units"] if unit["id"] in units]
    shutil.copytree(STORE, store, dirs_exist_ok=True, ignore=shutil.ignore_patterns("gen"))
    (store / "manifest.json").write_text(json.dumps(manifest))
    for stage in ("codegen", "embed"):
        run(sys.executable, "-m", f"build_tools.{stage}", store)


def run(*command: str | Path) -> None:
    environment = os.environ | {"PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    sources = sorted((ROOT / "tests" / "csrc").glob("fake_*.cpp"))
    run("g++", "-std=c++17", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *sources, "-o", folder / "libcuda.so.1")
    return folder


def ask(expressions: dict[str, str], pack: Path, driver: Path, log: Path, **variables: str) -> dict[str, Any]:
    """What the expressions answer, and what was launched, in a process of their own."""
    (module,) = install_golden().glob("_C.*.so")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("FAKE_CUDA_", "TILEKERNELS_PACK"))}
    fake = {"LD_LIBRARY_PATH": str(driver), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_DEVICES": "9.0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.python.c_module_cuda_runner", str(module), str(pack)],
        input=json.dumps(expressions), env=kept | fake | variables,
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)["answers"]
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return answers | {"launched": [each["name"] for each in records if each["call"] == "cuLaunchKernelEx"]}


def test_loaded_at_run_time(pack: Path, driver: Path, tmp_path: Path) -> None:
    expressions = {"before": NAMES, "load": "module.load_pack(path)", "after": NAMES}
    expressions |= {"again": "module.load_pack(path)", "once": NAMES, "launch": LAUNCH, "asked": ASKED, "wrong": WRONG}
    found = ask(expressions, pack, driver, tmp_path / "log")
    assert found["before"] == [None, repr(([], KERNELS))]
    assert found["load"] == found["again"] == [None, "None"]
    assert found["after"] == found["once"] == [None, repr((FUNCTIONS, [*KERNELS, "demo.swap"]))]
    assert found["launch"] == [None, "None"]
    assert found["asked"] == [None, "('FakeTensor', [128, 64])"]
    assert found["launched"] == ["tk_demo_transpose__b2_aligned"] * 2
    assert found["wrong"][0] == "ArgumentError"
    assert found["wrong"][1].startswith("demo.swap: out must have shape (num_cols, num_rows) = (128, 64)")


def test_named_by_the_environment(pack: Path, driver: Path, tmp_path: Path) -> None:
    found = ask({"names": NAMES, "launch": LAUNCH}, pack, driver, tmp_path / "log", TILEKERNELS_PACK_PATH=str(pack))
    assert found["names"] == [None, repr((FUNCTIONS, [*KERNELS, "demo.swap"]))]
    assert found["launched"] == ["tk_demo_transpose__b2_aligned"]


def test_an_operator_without_a_kernel_takes_that_of_a_pack(
    demo_scale: _dispatch.Launch, fake_extension: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operator files are imported once, before or after a pack is loaded."""
    monkeypatch.setattr(_dispatch, "load_extension", lambda: fake_extension)
    monkeypatch.setattr(_dispatch, "_LATE", {})
    monkeypatch.setattr(_dispatch, "_UNBUILT", {})
    monkeypatch.setattr(fake_extension, "packs", [])
    _dispatch._table.cache_clear()
    launch = _dispatch.kernel("demo.late", cpu=lambda x, bias, out, factor, num_rounds, mode, num_groups: out.copy_(x))
    wrong = (torch.ones(3), None, torch.empty(3), 1.0, 1, "once", 1)
    launch(*wrong)  # nothing knows what would be right
    _dispatch.load_pack("late.so")
    assert fake_extension.packs == ["late.so"]
    for call in (launch, launch.check):
        with pytest.raises(ValueError, match="x must have 2 dimensions, got 1"):
            call(*wrong)
    x, out = torch.ones(2, 2), torch.empty(2, 2)
    launch(x, None, out, 1.0, 1, "once", 1)
    assert torch.equal(out, x)
    _dispatch._table.cache_clear()
