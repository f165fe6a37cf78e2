"""What goes wrong around the library, or happens at a bad time: each has its own status and sentence, none a crash."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.csrc.conftest import HERE, run
from tests.csrc.sanitizers import compile_flags, environment, launcher
from tests.csrc.steps import Runtime, enter, sync, transpose

CREATE_OWN = {"do": "create_context", "name": "own", "device": 0}
DESTROY_OWN = {"do": "destroy_context", "name": "own"}
SECONDS = 120  # a hang is a failure


def compile_program(source: str, installed: Path, folder: Path, *libraries: str | Path) -> Path:
    program = folder / source.removesuffix(".cpp")
    flags = ["-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{installed}/include", *compile_flags()]
    run(["g++", *flags, HERE / source, "-o", program, *libraries, "-ldl", "-pthread"])
    return program


def run_program(
    command: Sequence[str | Path], driver_folder: Path, log: Path, **settings: object
) -> tuple[int, list[str], list[dict[str, Any]]]:
    """Exit code, lines of output and the fake driver's records; the process must not hang."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("FAKE_CUDA_")}
    variables |= {f"FAKE_CUDA_{key.upper()}": str(value) for key, value in settings.items()}
    variables |= {"LD_LIBRARY_PATH": str(driver_folder), "FAKE_CUDA_LOG": str(log)}
    result = subprocess.run(
        [*launcher(), *map(str, command)],
        env=variables | environment(is_instrumented=True),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert result.stderr == ""
    records = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return result.returncode, result.stdout.splitlines(), records


# ---- many threads ----------------------------------------------------------------------------------------------------


def test_32_threads_from_the_first_use_on(installed: Path, driver_folder: Path, tmp_path: Path) -> None:
    library = installed / "lib" / "libtilekernels.so.0"
    program = compile_program("stress.cpp", installed, tmp_path, library, f"-Wl,-rpath,{library.parent}")
    code, lines, records = run_program([program], driver_folder, tmp_path / "log", devices="9.0,9.0")
    assert (code, lines) == (0, ["right"])
    calls = [record["call"] for record in records]
    assert (calls.count("cuInit"), calls.count("cuLibraryLoadData")) == (1, 1)  # one unit fits these GPUs
    assert calls.count("cuLaunchKernelEx") == 32 * 30 * 4


# ---- unloading and exit ----------------------------------------------------------------------------------------------

ORDERS = [
    ("open launch close", ["TK_OK"]),
    ("open launch close open launch close launch", ["TK_OK"] * 3),
    ("open close", []),
    ("open_driver open launch close_driver launch close", ["TK_OK"] * 2),
    ("open open_driver launch close close_driver launch", ["TK_OK"] * 2),
    ("open launch close fork launch", ["TK_OK", "child 0", "TK_OK"]),
    ("open at_exit launch", ["TK_OK"] * 2),
    ("at_exit static open launch close", ["TK_OK"] * 3),
    ("open launch threads", ["TK_OK"]),
    ("open launch threads close fork", ["TK_OK", "child 0"]),
]


@pytest.mark.parametrize(("order", "printed"), ORDERS, ids=[order.replace(" ", "-") for order, _ in ORDERS])
def test_unloading_and_exit(
    installed: Path, driver_folder: Path, tmp_path: Path, order: str, printed: list[str]
) -> None:
    program = compile_program("lifetime.cpp", installed, tmp_path)
    library = installed / "lib" / "libtilekernels.so.0"
    code, lines, records = run_program([program, library, *order.split()], driver_folder, tmp_path / "log")
    assert (code, lines) == (0, printed)
    # However often it was opened, the library is one: its cubins are loaded once and stay where the driver reads them.
    assert [record["call"] for record in records].count("cuLibraryLoadData") == bool(printed)


# ---- contexts --------------------------------------------------------------------------------------------------------


def test_context_that_was_destroyed(runtime: Runtime) -> None:
    """The thread that destroys its current context has none; others, and those who set it again, still name it."""
    again = {"do": "set_context", "name": "own"}
    result = runtime.run(CREATE_OWN, transpose(100, 200), DESTROY_OWN, transpose(100, 200), again, transpose(100, 200))
    statuses = [answer["status"] for answer in result.answers if "status" in answer]
    assert statuses == ["TK_OK", "TK_NO_CONTEXT", "TK_CONTEXT_DESTROYED"]
    assert result.last[1] == (
        "the CUDA context that is current in this thread was destroyed; make another one current (cuCtxSetCurrent, "
        "cudaSetDevice) or call tk_enter_device first"
    )


def test_another_context_serves_after_one_was_destroyed(runtime: Runtime) -> None:
    result = runtime.run(CREATE_OWN, transpose(100, 200), DESTROY_OWN, enter(), transpose(100, 200))
    assert result.last == ("TK_OK", "")
    assert len(result.calls("cuLibraryLoadData")) == 1


def test_preload_into_a_destroyed_context(runtime: Runtime) -> None:
    preload = {"do": "preload", "names": None, "device": -1}
    result = runtime.run(CREATE_OWN, DESTROY_OWN, {"do": "set_context", "name": "own"}, preload)
    assert result.last[0] == "TK_CONTEXT_DESTROYED"


# ---- out of memory ---------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = [
    ("cuDevicePrimaryCtxRetain", enter(), "making the primary context of cuda:0: "),
    ("cuLibraryLoadData", sync(8), "demo.sync: loading n16 (demo-sm_90a-0, "),
    ("cuLibraryGetKernel", sync(8), "demo.sync: loading n16 (demo-sm_90a-0, "),
    ("cuLaunchKernelEx", sync(8), "demo.sync: launching tk_demo_sync__n16 on cuda:0: "),
    (
        "cuKernelGetFunction",
        {"do": "preload", "names": ["demo.sync"], "device": 0},
        "demo.sync: loading tk_demo_sync__n16 into the context of cuda:0: ",
    ),
]


@pytest.mark.parametrize(("call", "step", "start"), OUT_OF_MEMORY, ids=[call for call, *_ in OUT_OF_MEMORY])
def test_out_of_memory_says_where_and_is_not_remembered(
    runtime: Runtime, call: str, step: dict[str, Any], start: str
) -> None:
    steps = [step, step] if step["do"] == "enter" else [enter(), step, step]
    first, second = runtime.run(*steps, fail=f"{call}:2:1").answers[-2:]
    assert first["status"] == "TK_OUT_OF_MEMORY"
    assert first["message"].startswith(start)
    assert first["message"].endswith(f"{call} failed with 2: CUDA_ERROR_OUT_OF_MEMORY (out of memory)")
    assert second["status"] == "TK_OK"


# ---- statuses --------------------------------------------------------------------------------------------------------


def test_every_status_has_a_name_of_its_own(runtime: Runtime) -> None:
    (names,) = runtime.run({"do": "status_names"}, driver=False).answers
    assert len(set(names)) == len(names) == 13
    assert all(name.startswith("TK_") for name in names)
    assert "TK_UNKNOWN_STATUS" not in names
