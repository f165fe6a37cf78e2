"""The C++ examples, built outside the tree against the installed package: with the fake driver, and for real on a GPU.

The fake driver's kernels compute nothing, so there the examples have to say that every result is wrong, after launching
all that they should.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.csrc.conftest import ROOT, run
from tests.csrc.steps import Runtime, Step, enter, tensor, workspace_size

SOURCES = ROOT / "examples" / "cpp"
MOE_LAYER = [
    "moe_topk_gate",
    "moe_get_fused_mapping",
    "moe_expand_to_fused",
    "quant_per_token_cast",
    "quant_cast_back",
    "gemm_matmul",
    "quant_swiglu_forward_and_per_token_cast",
    "quant_cast_back",
    "gemm_matmul",
    "moe_reduce_fused",
]
EXACT = ["topk_idx", "pos_to_expert", "token_topk_to_pos", "expanded", "data", "sf", "restored"]
CLOSE = ["gates_and_values", "out"]  # behind a matrix product
RESULTS = EXACT + CLOSE


@pytest.fixture(scope="module")
def package() -> Path:
    """The installed package: its headers, its library and its CMake files."""
    folder = Path(str(importlib.resources.files("tilekernels")))
    if not (folder / "lib").exists():
        pytest.skip("tilekernels is not built here")
    return folder


@pytest.fixture(scope="module")
def programs(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built examples; by the compiler alone, since a machine with a GPU may have no CMake."""
    folder = tmp_path_factory.mktemp("examples")
    library = package / "lib" / "libtilekernels.so.0"
    for source in sorted(SOURCES.glob("*.cpp")):
        flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{package}/include"]
        link = [library, f"-Wl,-rpath,{library.parent}", "-ldl", "-pthread"]
        run(["g++", *flags, source, "-o", folder / source.stem, *link])
    return folder


@pytest.fixture(scope="module")
def batch(package: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The batch and what the references make of it, in files."""
    files = [tmp_path_factory.mktemp("batch") / name for name in ("batch.tensors", "expected.tensors")]
    run([sys.executable, SOURCES / "make_batch.py", *files])
    return files


def start(command: Sequence[str | Path], **variables: str) -> tuple[int, list[str]]:
    """Exit code and lines of output."""
    result = subprocess.run(
        [str(part) for part in command],
        env={key: value for key, value in os.environ.items() if not key.startswith("FAKE_CUDA_")} | variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stderr == ""
    return result.returncode, result.stdout.splitlines()


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def launched(records: list[dict[str, Any]], *, captured: bool) -> list[str]:
    """Kernels in the order in which they were launched, without their variants."""
    return [
        record["name"].removeprefix("tk_").split("__")[0]
        for record in records
        if record["call"] == "cuLaunchKernelEx" and record.get("captured", False) == captured
    ]


# ---- without a GPU ---------------------------------------------------------------------------------------------------


def test_quantize(programs: Path, driver_folder: Path, tmp_path: Path) -> None:
    fake = {"LD_LIBRARY_PATH": str(driver_folder), "FAKE_CUDA_LOG": str(tmp_path / "log")}
    assert start([programs / "quantize"], **fake) == (0, ["1.0 is 0x00 times 0"])
    records = read_log(tmp_path / "log")
    assert launched(records, captured=False) == ["quant_per_token_cast"]
    assert not any(record.get("refused") for record in records)  # compute-sanitizer reports what the driver refuses


def test_moe_layer(programs: Path, batch: list[Path], driver_folder: Path, tmp_path: Path) -> None:
    fake = {"LD_LIBRARY_PATH": str(driver_folder), "FAKE_CUDA_LOG": str(tmp_path / "log")}
    code, lines = start([programs / "moe_layer", *batch], **fake)
    assert code == 1
    assert [line.split(": ")[:2] for line in lines] == [[how, name] for how in ("eager", "graph") for name in RESULTS]
    assert not any(": 0 of" in line or ": close" in line for line in lines)
    records = read_log(tmp_path / "log")
    assert launched(records, captured=False) == launched(records, captured=True) == MOE_LAYER
    assert [each["num_launches"] for each in records if each["call"] == "cuGraphLaunch"] == [len(MOE_LAYER)]


@pytest.mark.parametrize(("devices", "used"), [("9.0", {0: 200}), ("9.0,9.0", {0: 100, 1: 100})], ids=["one", "two"])
def test_two_contexts(programs: Path, driver_folder: Path, tmp_path: Path, devices: str, used: dict[int, int]) -> None:
    log = tmp_path / "log"
    fake = {"LD_LIBRARY_PATH": str(driver_folder), "FAKE_CUDA_LOG": str(log), "FAKE_CUDA_DEVICES": devices}
    code, lines = start([programs / "two_contexts"], **fake)
    assert code == 1
    assert [re.sub(r"\d+ wrong", "N wrong", line) for line in lines] == [
        f"context {index} on cuda:{list(used)[-1] if index else 0}: 2 streams, 100 launches: N wrong values"
        for index in range(2)
    ]
    launches = [record for record in read_log(log) if record["call"] == "cuLaunchKernelEx"]
    assert Counter(launch["device"] for launch in launches) == used
    assert len({launch["stream"] for launch in launches}) == 4
    assert not any(launch["primary"] for launch in launches)


@pytest.mark.parametrize("program", ["quantize", "two_contexts"])
def test_without_a_driver_the_examples_say_so(programs: Path, program: str) -> None:
    result = subprocess.run(
        [programs / program], env={"LD_LIBRARY_PATH": ""}, capture_output=True, text=True, check=False
    )
    if result.returncode == 0:
        pytest.skip("this machine has a driver")
    assert result.returncode == 1
    assert "NVIDIA driver" in result.stderr


def test_cmake_builds_what_the_library_has_kernels_for(package: Path, tools: dict[str, str], tmp_path: Path) -> None:
    folder = f"-Dtilekernels_DIR={package}/lib/cmake/tilekernels"
    configured = run(["cmake", "-S", SOURCES, "-B", tmp_path, folder], tools)
    run(["cmake", "--build", tmp_path, "--parallel", "2"], tools)
    assert "is left out" not in configured
    assert all((tmp_path / source.stem).exists() for source in SOURCES.glob("*.cpp"))


def mapping_workspace(package: Path, driver_folder: Path, scratch: Path, num_sms: int, *experts: int) -> dict[str, Any]:
    """What the library says of the mapping's workspace, whose rows are the blocks that run."""
    tensors: list[Step | None] = [tensor("int64", 61, 4), *[None] * 5, *(tensor("int32", count) for count in experts)]
    tensors += [None] * (9 - len(tensors))
    step = workspace_size("moe.get_fused_mapping", 1, *tensors, scalars=[16], num_sms=num_sms)
    runtime = Runtime(package / "lib" / "libtilekernels.so.0", driver_folder, scratch)
    answer: dict[str, Any] = runtime.run(enter(), step).answers[-1]
    return answer


@pytest.mark.parametrize(("num_sms", "rows"), [(8, 8), (0, 132)], ids=["chosen", "all"])
def test_workspace_of_a_persistent_kernel(
    package: Path, driver_folder: Path, tmp_path: Path, num_sms: int, rows: int
) -> None:
    answer = mapping_workspace(package, driver_folder, tmp_path, num_sms, 24)
    assert (answer["shape"], answer["num_bytes"]) == ([rows, 24], rows * 24 * 4)


def test_workspace_that_depends_on_what_is_not_given(package: Path, driver_folder: Path, tmp_path: Path) -> None:
    answer = mapping_workspace(package, driver_folder, tmp_path, 8)
    assert (answer["status"], answer["message"]) == (
        "TK_INVALID_ARGUMENT",
        "moe.get_fused_mapping: the size of workspace depends on num_experts: the tensors that have it must be given",
    )


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_quantize_on_a_gpu(programs: Path) -> None:
    # 1.0 / (1.0 / 448) is the largest e4m3, 0x7e
    assert start([programs / "quantize"]) == (0, ["1.0 is 0x7e times 0.00223214"])


@pytest.mark.gpu
def test_moe_layer_on_a_gpu(programs: Path, batch: list[Path]) -> None:
    code, lines = start([programs / "moe_layer", *batch])
    assert [line for line in lines if ": 0 of" not in line and ": close" not in line] == []
    assert (code, len(lines)) == (0, 2 * len(RESULTS))


@pytest.mark.gpu
def test_two_contexts_on_a_gpu(programs: Path) -> None:
    code, lines = start([programs / "two_contexts"])
    assert [line.split(": ")[-1] for line in lines] == ["right", "right"]
    assert code == 0
