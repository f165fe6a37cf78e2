"""What calls cost the CPU: importing, the first call of each operator, every later one with and without `out`.

Measured on the smallest call of each operator. What happens once in a process is measured in processes of its own.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .._outputs import is_request
from .cases import Call, find_calls

__all__ = ["measure_host", "measure_import", "record_launches", "run_python", "time_statement"]

_BURST, _ROUNDS = 50, 30  # calls between two synchronisations, so that the queue never fills; and how often
_PROCESSES = 3  # for what is measured once in a process; the median counts
_STATES = ("cold", "preloaded")
_IMPORT = """
import time, torch
start = time.perf_counter()
import tilekernels
lazy = time.perf_counter() - start
for name in ("engram", "gemm", "mhc", "moe", "quant", "rand", "transform", "transpose"): getattr(tilekernels, name)
print(lazy * 1e3, (time.perf_counter() - start) * 1e3)
"""


def measure_host(calls: Sequence[Call]) -> Iterator[dict[str, Any]]:
    """One row for the import, then one for each operator among the calls."""
    lazy_ms, ms = measure_import()
    yield {"stage": "import", "lazy_ms": lazy_ms, "ms": ms}
    smallest: dict[str, Call] = {}
    for call in sorted(calls, key=lambda call: call.case.bytes):
        smallest.setdefault(call.case.operator, call)
    first = {state: _measure_first_calls(state, list(smallest)) for state in _STATES}
    for name, call in sorted(smallest.items()):
        row: dict[str, Any] = {"stage": "host_calls", "operator": name, "params": call.case.params}
        row |= {f"{state}_us": first[state][name] for state in _STATES}
        yield row | _measure_calls(call)


def measure_import() -> tuple[float, float]:
    """Milliseconds beyond `import torch`: of `import tilekernels`, and with every family touched."""
    times = [[float(text) for text in run_python("-c", _IMPORT).split()] for _ in range(_PROCESSES)]
    lazy, whole = (statistics.median(each[at] for each in times) for at in range(2))
    return lazy, whole


def _measure_calls(call: Call) -> dict[str, float]:
    kwargs = call.case.make("cuda")
    result = call.operator(**kwargs)
    times = {"call_us": time_statement(functools.partial(call.operator, **kwargs))}
    if kwargs.get("out") is None and "out" in inspect.signature(call.operator).parameters:
        times["out_us"] = time_statement(functools.partial(call.operator, **{**kwargs, "out": result}))
    launches = record_launches(functools.partial(call.operator, **kwargs))
    if launches:
        times["entry_us"] = sum(time_statement(functools.partial(entry, *args)) for entry, args in launches)
    return times


def record_launches(run: Callable[[], object]) -> list[tuple[Callable[..., object], tuple[Any, ...]]]:
    """(function of tilekernels._C, its arguments) of each kernel that a call runs, outputs that it asks for given.

    Calling those again is what a call costs below Python: reading tensors, checks, and the launch.
    """
    extension = importlib.import_module("tilekernels._C")
    found: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    def recorder(launch: Any) -> Any:
        def record(*args: Any) -> Any:
            result = launch(*args)
            outputs = iter(result if isinstance(result, tuple) else (result,))
            complete = tuple(next(outputs) if is_request(value) else value for value in args)
            found.append((getattr(extension, launch.__name__), complete))
            return result

        record.check = launch.check  # type: ignore[attr-defined]
        return record

    replaced = [
        (module, name, value)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("tilekernels.")
        for name, value in list(vars(module).items())
        if hasattr(value, "check") and hasattr(extension, getattr(value, "__name__", ""))
    ]
    for module, name, value in replaced:
        setattr(module, name, recorder(value))
    try:
        run()
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)
    return found


def time_statement(
    run: Callable[[], object] | str, burst: int = _BURST, rounds: int = _ROUNDS, names: dict[str, Any] | None = None
) -> float:
    """Median microseconds until one call returns, whether or not the GPU has finished.

    run: a function, or the text of a statement over `names`, which costs no call of its own.
    """
    import torch

    timer = timeit.Timer(run, globals=names)
    timer.timeit(burst)
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        times.append(timer.timeit(burst) / burst * 1e6)
    return statistics.median(times)


def run_python(*arguments: str) -> str:
    """Output of a fresh interpreter, started in an empty folder; it finds this package, wherever that was found."""
    paths = [str(Path(__file__).resolve().parents[2]), *map(os.path.abspath, _python_path())]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a measuring process failed:\n{done.stderr}")
    return done.stdout


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _measure_first_calls(state: str, names: Sequence[str]) -> dict[str, float]:
    """Microseconds until each operator's first call returns. The order turns from process to process, because the first
    of all also pays for what is made once."""
    runs = [
        json.loads(run_python("-m", __name__, state, str(turn), ",".join(names)).splitlines()[-1])
        for turn in range(_PROCESSES)
    ]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def _time_first_calls(state: str, turn: int, names: Sequence[str]) -> dict[str, float]:
    import torch

    import tilekernels

    smallest: dict[str, Call] = {}
    for call in sorted(find_calls(), key=lambda call: call.case.bytes):
        if call.case.operator in names:
            smallest.setdefault(call.case.operator, call)
    calls = list(smallest.values())
    at = turn * len(calls) // _PROCESSES
    blocks = [torch.empty(1 << 20, dtype=torch.uint8, device="cuda") for _ in range(16)]
    del blocks  # torch's allocator is warm
    if state == "preloaded":
        tilekernels.preload()
    times = {}
    for call in calls[at:] + calls[:at]:
        kwargs = call.case.make("cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        call.operator(**kwargs)
        times[call.case.operator] = (time.perf_counter() - start) * 1e6
    return times


if __name__ == "__main__":
    print(json.dumps(_time_first_calls(sys.argv[1], int(sys.argv[2]), sys.argv[3].split(","))))
