"""Measures what calls cost on the host: import, first call of a kernel, every later call; JSON lines with their bars.

    python benchmarks/host_overhead.py [--output benchmarks/results/host.jsonl]

Needs an installed wheel, a GPU, g++ and the CUDA headers (CUDA_HOME; for the raw launch that calls are compared with).
Everything that happens once in a process is measured in processes of its own. All of them stay on one core: where the
system moves them about, the same call takes up to 1.8 times as long in one run as in the next.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from record import Record, describe_machine

from tilekernels.bench.host import measure_import as time_import
from tilekernels.bench.host import run_python, time_statement

PROCESSES = 6  # for what is measured once a process; the median counts
BURST, ROUNDS = 200, 100  # calls between two synchronisations, so that the queue never fills; and how often

IMPORT_BAR_MS = 50.0
FIRST_CALL_BARS_US = {"not preloaded": 5000.0, "preloaded": 50.0}
OVER_RAW_BARS_US = {"_C function": 0.6, "public call, outputs given": 1.5}
ENTRY_BAR_US = 0.2
ALLOCATING_BARS_US = {1: 7.0, 2: 9.5}  # by outputs; padded layouts may take PADDED_US more
PADDED_US = 1.5

SCRIPT = str(Path(__file__).resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first-calls", nargs=2, metavar=("STATE", "ROTATION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.machine:
        print(json.dumps(describe_machine()))
        return
    if arguments.first_calls:
        state, rotation = arguments.first_calls
        print(json.dumps(time_first_calls(state == "preloaded", int(rotation))))
        return
    record = Record(arguments.output)
    os.sched_setaffinity(0, {find_idle_core()})  # children inherit it
    # In a process of its own: the profiler that times the copy would go on to slow every launch of this one.
    record.write(**json.loads(run_python(SCRIPT, "--machine")))
    measure_import(record)
    measure_first_calls(record)
    measure_calls(record, measure_entries(record))


def find_idle_core() -> int:
    """The core that runs plain Python fastest: where neighbours share the host, some take 1.8 times as long."""

    def seconds(core: int) -> float:
        os.sched_setaffinity(0, {core})
        return min(timeit.repeat("sum(range(20000))", number=5, repeat=10))

    return min(sorted(os.sched_getaffinity(0)), key=seconds)


def report(record: Record, what: str, value: float, bar: float, **fields: Any) -> None:
    record.write(stage="host", what=what, **fields, value=value, bar=bar, met=value <= bar)


# ---- once a process --------------------------------------------------------------------------------------------------


def measure_import(record: Record) -> None:
    for what, ms in zip(("import tilekernels", "import tilekernels and every family"), time_import(), strict=True):
        report(record, f"{what}, beyond import torch", ms, IMPORT_BAR_MS, unit="ms")


def measure_first_calls(record: Record) -> None:
    for state, bar in FIRST_CALL_BARS_US.items():
        runs = [json.loads(run_python(SCRIPT, "--first-calls", state, str(at))) for at in range(PROCESSES)]
        for name in runs[0]:
            us, worst = statistics.median(run[name] for run in runs), max(run[name] for run in runs)
            report(record, f"first call, {state}", us, bar, call=name, worst=worst, unit="us")


def time_first_calls(preloaded: bool, rotation: int) -> dict[str, float]:
    """Microseconds until the first call of each kernel returns; the context is made, torch's allocator warm.

    rotation: which call comes first, because that one also pays for what is made once in a process.
    """
    import torch

    import tilekernels

    calls = [call for call in make_calls() if not call.is_padded]  # one for each kernel
    rotation %= len(calls)
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(16)]
    del blocks
    if preloaded:
        tilekernels.preload()
    times = {}
    for call in calls[rotation:] + calls[:rotation]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call.run()
        times[call.name] = (time.perf_counter() - start) * 1e6
    return dict(sorted(times.items()))


# ---- every call ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A public call of a few microseconds that allocates its outputs."""

    name: str
    num_outputs: int
    run: Callable[[], object]
    is_padded: bool = False  # scales whose columns start on 16 bytes


def make_calls() -> list[Call]:
    import torch

    from tilekernels import moe, quant, transpose

    matrix = torch.randn((64, 512), device="cuda", dtype=torch.bfloat16)
    scores = torch.randn((8, 256), device="cuda")
    x = torch.randn((8, 4096), device="cuda", dtype=torch.bfloat16)
    ragged = torch.randn((7, 4096), device="cuda", dtype=torch.bfloat16)
    sf = torch.ones((8, 32), device="cuda")
    cast, sf_only, given_sf = (
        quant.per_token_cast,
        quant.per_token_cast_with_sf_only,
        quant.per_token_cast_with_precomputed_sf,
    )
    packed = (None, True, True, True)
    return [
        Call("transpose.transpose", 1, lambda: transpose.transpose(matrix)),
        Call("moe.topk_gate", 1, lambda: moe.topk_gate(scores, 8)),
        Call("quant.per_token_cast_with_sf_only", 1, lambda: sf_only(x, "e4m3", 128)),
        Call("quant.per_token_cast_with_precomputed_sf", 1, lambda: given_sf(x, "e4m3", 128, sf)),
        Call("quant.per_token_cast", 2, lambda: cast(x, "e4m3", 128)),
        Call("quant.per_token_cast, packed columns, 8 tokens", 2, lambda: cast(x, "e4m3", 128, *packed), True),
        Call("quant.per_token_cast, packed columns, 7 tokens", 2, lambda: cast(ragged, "e4m3", 128, *packed), True),
    ]


def measure_entries(record: Record) -> dict[str, float]:
    """The C++ program's figures; returns the raw launch of each kernel it knows."""
    package = Path(str(files("tilekernels")))
    nvcc = shutil.which("nvcc")
    cuda = os.environ.get("CUDA_HOME") or (Path(nvcc).resolve().parents[1] if nvcc else "/usr/local/cuda")
    library = package / "lib" / "libtilekernels.so.0"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "launch_overhead"
        source = Path(__file__).with_name("launch_overhead.cpp")
        includes = [f"-I{package / 'include'}", f"-I{cuda}/include"]
        libraries = [str(library), f"-Wl,-rpath,{library.parent}", "-ldl"]
        subprocess.run(["g++", "-std=c++17", "-O2", *includes, str(source), *libraries, "-o", str(program)], check=True)
        lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    raw = {}
    for line in map(json.loads, lines):
        raw[line["kernel"]] = line["raw_us"]
        over = line.pop("over_raw_us")
        report(record, "C++ entry over raw launch", over, ENTRY_BAR_US, **line, unit="us")
    return raw


def measure_calls(record: Record, raw: dict[str, float]) -> None:
    """raw: microseconds of cuLaunchKernelEx for the kernels whose calls are compared with it."""
    import torch

    import tilekernels
    from tilekernels import quant

    tilekernels.preload()
    data = torch.empty((8, 4096), device="cuda", dtype=torch.float8_e4m3fn)
    sf = torch.empty((8, 32), device="cuda")
    names = {
        "native": importlib.import_module("tilekernels._C"),
        "quant": quant,
        "matrix": torch.zeros((64, 512), device="cuda", dtype=torch.bfloat16),
        "transposed": torch.zeros((512, 64), device="cuda", dtype=torch.bfloat16),
        "x": torch.randn((8, 4096), device="cuda", dtype=torch.bfloat16),
        "data": data,
        "sf": sf,
        "out": (data, sf),
    }
    native_cast = "native.quant_per_token_cast(x, None, data, sf, 1, 1, 1e-4, False, 128, False)"
    statements = [
        ("_C function", "transpose.transpose", "native.transpose_transpose(matrix, transposed)"),
        ("_C function", "quant.per_token_cast", native_cast),
        ("public call, outputs given", "quant.per_token_cast", "quant.per_token_cast(x, 'e4m3', 128, out=out)"),
    ]
    for what, kernel, statement in statements:
        us = time_text(statement, names)
        over = us - raw[kernel]
        report(record, f"{what}, over raw launch", over, OVER_RAW_BARS_US[what], kernel=kernel, us=us, unit="us")
    # What torch itself takes, for comparison: nothing is held to it.
    for statement in ("torch.empty_strided((8, 4096), (4096, 1), dtype=dtype, device=device)", "torch.empty_like(x)"):
        peers = {"torch": torch, "x": names["x"], "dtype": data.dtype, "device": data.device}
        record.write(stage="host", what="torch", call=statement, value=time_text(statement, peers), unit="us")
    for call in make_calls():
        bar = ALLOCATING_BARS_US[call.num_outputs] + (PADDED_US if call.is_padded else 0)
        us = time_text("run()", {"run": call.run})
        report(record, f"public call, {call.num_outputs} allocated", us, bar, call=call.name, unit="us")


def time_text(statement: str, names: dict[str, Any]) -> float:
    """Median microseconds to issue the statement once; it runs in the timer's own loop, without a call around it."""
    return time_statement(statement, BURST, ROUNDS, names)


if __name__ == "__main__":
    main()
