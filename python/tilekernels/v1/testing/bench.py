"""Names and reports of generation 1's benchmarks."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from typing import Any

import torch

from ...testing.bench import dtype_to_str as dtype_to_str
from ...testing.bench import make_param_id as make_param_id

_SHORT_NAMES = {
    "num_ep_ranks": "ep",
    "num_experts": "experts",
    "use_tma_aligned_col_major_sf": "col",
    "use_packed_ue8m0": "ue8m0",
    "round_sf": "round",
}
_WIDTH = 5  # of a value, so that the keys of a table lie below each other

empty_suppress = nullcontext


def make_param_key(params: dict[str, Any]) -> str:
    """A benchmark's key: the parameters with short names, those that are None left out."""
    shown = {
        name: dtype_to_str(value) if isinstance(value, torch.dtype) else str(value)
        for name, value in params.items()
        if value is not None
    }
    return " ".join(f"{_SHORT_NAMES.get(name, name)}={value:<{_WIDTH}}" for name, value in shown.items()).rstrip()


def print_average_perf(
    latency_list: Sequence[float], bandwidth_list: Sequence[float], relative_speed_list: Sequence[float]
) -> None:
    """Prints the geometric means of latencies (us), bandwidths (GB/s) and relative speeds."""
    means = [_geometric_mean(values) for values in (latency_list, bandwidth_list, relative_speed_list)]
    print("average: {:.2f} us, {:.1f} GB/s, {:.3f} x".format(*means))


@contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """Sends what the process writes to its standard output and error meanwhile nowhere, also from C."""
    with ExitStack() as stack:
        null = stack.enter_context(open(os.devnull, "w"))
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            kept = os.dup(descriptor)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, descriptor)
            os.dup2(null.fileno(), descriptor)
        stack.enter_context(redirect_stdout(null))
        stack.enter_context(redirect_stderr(null))
        yield


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else math.nan
