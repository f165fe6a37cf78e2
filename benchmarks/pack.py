"""Times the candidates of a pack (`python -m build_tools tune`) against each other, and says which wins each call.

    python3 benchmarks/pack.py build/tune/gemm.matmul.pack [--only m=128] [--output results.jsonl]

The calls are those of the operator's tuning_cases(), or bench_cases(). Each candidate's output is compared with the
reference first: error is the norm of the difference over the norm of the reference, the largest over all outputs. Times
are GPU times with a cold L2. Needs a GPU that nobody else uses, and the installed package; nothing is compiled here.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib
import json
import pkgutil
import statistics
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from record import Record, describe_machine

LIBRARY = "libtilekernels.so.0"
FLUSH_BYTES = 256 * 1024 * 1024  # several times the L2
REPEATS = 15
LARGEST_ERROR = 5e-3  # bf16 rounds to 2^-9 at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--only", default="", help="calls whose id contains this text")
    parser.add_argument("--output", type=Path, help="file to append the JSON lines to")
    arguments = parser.parse_args()
    table = load_pack(arguments.pack)
    record = Record(arguments.output)
    record.write(**describe_machine())
    wins: list[dict[str, Any]] = []
    for operator, case, module, launcher in find_calls(table["kernel"]):
        if arguments.only not in case.id:
            continue
        results = measure(table["candidates"], operator, case.make("cuda"), module, launcher)
        for candidate, result in zip(table["candidates"], results, strict=True):
            record.write(stage="candidate", call=case.id, values=candidate["values"], **result)
        right = [result for result in results if result.get("error", 1.0) <= LARGEST_ERROR]
        if right:
            best = min(right, key=lambda result: result["us"])
            values = table["candidates"][results.index(best)]["values"]
            first_us = results[0].get("us")
            wins.append({"call": case.id, "values": values, "us": best["us"], "as_it_is_us": first_us})
    for win in wins:
        record.write(stage="winner", **win)


def load_pack(pack: Path) -> dict[str, Any]:
    """Make the pack's library the one that `tilekernels._C` gets: the linker takes what is loaded under its name."""
    if "tilekernels._C" in sys.modules:
        raise RuntimeError("the installed kernels are loaded already")
    folder = tempfile.mkdtemp(prefix="pack-")
    with zipfile.ZipFile(pack) as archive:
        archive.extract(LIBRARY, folder)
        table: dict[str, Any] = json.loads(archive.read("pack.json"))
    ctypes.CDLL(f"{folder}/{LIBRARY}", mode=ctypes.RTLD_GLOBAL)
    try:
        importlib.import_module("tilekernels._C")
    except ImportError as error:
        raise SystemExit(
            f"{pack} was built from other sources than the installed package ({error}): build both from one tree"
        ) from error
    return table


def find_calls(kernel: str) -> Iterator[tuple[Any, Any, Any, str]]:
    """(operator, case, module, the name of its launcher) of every call that runs the kernel."""
    import tilekernels

    family = importlib.import_module(f"tilekernels.{kernel.partition('.')[0]}")
    for found in pkgutil.iter_modules(family.__path__):
        if found.name.startswith("_"):
            continue
        module = importlib.import_module(f"{family.__name__}.{found.name}")
        for launcher, value in vars(module).items():
            if getattr(value, "__name__", "") == kernel.replace(".", "_") and hasattr(value, "check"):
                cases = getattr(module, "tuning_cases", module.bench_cases)()
                for case in cases:
                    if case.operator == kernel:
                        yield getattr(module, case.operator.partition(".")[2]), case, module, launcher
                return
    raise SystemExit(f"no operator of tilekernels {tilekernels.__version__} calls {kernel}")


@functools.cache
def candidate_launch(kernel: str) -> Any:
    from tilekernels._dispatch import kernel as dispatch

    def on_cpu(*_: Any) -> None:
        raise RuntimeError("a candidate runs on a GPU")

    return dispatch(kernel, cpu=on_cpu)


def measure(candidates: list[dict[str, Any]], operator: Any, kwargs: dict[str, Any], module: Any, launcher: str) -> Any:
    """Time and error of each candidate, or why it has none; all are timed in turns, so that they share the weather."""
    expected = getattr(module, f"{operator.__name__}_ref")(**kwargs)
    results: list[dict[str, Any]] = []
    calls: list[Callable[[], object]] = []
    for candidate in candidates:

        def call(kernel: str = candidate["kernel"]) -> object:
            setattr(module, launcher, candidate_launch(kernel))
            return operator(**kwargs)

        try:
            results.append({"error": largest_error(call(), expected)})
            calls.append(call)
        except Exception as failure:  # leaves the others to be timed
            results.append({"failure": f"{type(failure).__name__}: {failure}"})
    times = iter(kernel_times_us(calls))
    return [result | {"us": next(times)} if "error" in result else result for result in results]


def kernel_times_us(calls: list[Callable[[], object]]) -> list[float]:
    """Median GPU time of each call in microseconds, with a cold L2."""
    import torch

    flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(REPEATS):
            for call in calls:
                flush.bitwise_not_()  # marks where a call starts: no operator here runs such a kernel
                call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times: list[float] = []
    for event in sorted(events, key=lambda event: event.time_range.start):
        if "bitwise_not" in event.name:
            times.append(0.0)
        else:
            times[-1] += event.time_range.elapsed_us()
    return [statistics.median(times[at :: len(calls)]) for at in range(len(calls))]


def largest_error(actual: Any, expected: Any) -> float:
    from torch.utils import _pytree

    pairs = zip(_pytree.tree_leaves(actual), _pytree.tree_leaves(expected), strict=True)
    return max((_error(one, other) for one, other in pairs if hasattr(other, "double")), default=0.0)


def _error(actual: Any, expected: Any) -> float:
    scale = expected.double().norm().item()
    return (actual.double() - expected.double()).norm().item() / (scale or 1.0)


if __name__ == "__main__":
    main()
