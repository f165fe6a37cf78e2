"""Timing on the GPU: kernel time as CUPTI reports it, with a cold L2; two other clocks to check it by.

A figure means little alone: time a copy of as many bytes in the same call (`time_kernels`), or use `tilekernels bench`.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "Timing",
    "copy_time_us",
    "dtype_to_str",
    "event_time_us",
    "graph_time_us",
    "kernel_time_us",
    "make_param_id",
    "time_kernels",
]

# Zeroed before each call: several times the L2 of any GPU here (60 MiB on an H200), so that inputs come from memory.
_FLUSH_BYTES = 256 * 1024 * 1024

# Of measured calls. On an H200 single calls of 20 us and more lie within 2 % of each other; a median of ten is enough.
_TOTAL_US = 4_000.0
_MIN_REPEATS, _MAX_REPEATS = 10, 50
_WARMUP_CALLS = 2
# Its kernel tells where the calls of one function end: nothing that is timed here takes a hypotenuse.
_MARKER = "hypot"

_SHORT_NAMES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "e4m3",
    "int8": "e2m1",
}


def make_param_id(params: dict[str, Any]) -> str:
    """A test id: `num_tokens=4001-dtype=bf16`."""
    return "-".join(
        f"{name}={dtype_to_str(value) if isinstance(value, torch.dtype) else value}" for name, value in params.items()
    )


def dtype_to_str(dtype: torch.dtype) -> str:
    """The short name of an element format; int8 is what holds e2m1. Raises ValueError for a dtype that is none."""
    name = str(dtype).removeprefix("torch.")
    if name not in _SHORT_NAMES:
        raise ValueError(f"testing.dtype_to_str: dtype must be one of {', '.join(_SHORT_NAMES)}, got {name}")
    return _SHORT_NAMES[name]


@dataclass(frozen=True)
class Timing:
    """GPU time of one call in microseconds: all that it launches, gaps and host time left out."""

    us: float  # the median
    mean_us: float
    spread: float  # the distance between the quartiles over the median
    repeats: int
    num_kernels: int  # kernels, copies and fills in one call


def kernel_time_us(fn: Callable[[], object], total_us: float = _TOTAL_US) -> float:
    """Median GPU time of one call of fn in microseconds: the sum of all it launches, gaps and host time left out.

    L2 is flushed before each call. fn has to launch equally many kernels, copies and fills each time.
    """
    return time_kernels([fn], total_us)[0].us


def copy_time_us(num_bytes: int) -> float:
    """Time of a plain device copy that moves num_bytes in all, read and written together."""
    source = torch.empty(max(num_bytes // 2, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return kernel_time_us(lambda: target.copy_(source))


def time_kernels(
    fns: Sequence[Callable[[], object]], total_us: float = _TOTAL_US, warmup_us: float = 0.0
) -> list[Timing]:
    """The timing of each function, all under one start of the profiler, which costs more than most of the calls.

    Each is called twice and then for warmup_us, then as often as fits in total_us of its own time, between 10 and 50
    times, with a flushed L2.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    marker = torch.ones(1, device="cuda")
    repeats = []
    for fn in fns:
        for _ in range(_WARMUP_CALLS):
            fn()
        us = event_time_us(fn, repeats=1, flush=flush)
        repeats.append(_choose_repeats(us, total_us))
        for _ in range(int(warmup_us / max(us, 1.0))):
            fn()

    def work() -> None:
        for fn, count in zip(fns, repeats, strict=True):
            marker.hypot_(marker)
            for _ in range(count):
                flush.zero_()
                fn()

    segments = _split_at_markers(_record_device_events(work))
    if len(segments) != len(fns):
        raise RuntimeError(f"testing.time_kernels: {len(segments)} of {len(fns)} functions were seen by the profiler")
    return [_summarize(events, count) for events, count in zip(segments, repeats, strict=True)]


def event_time_us(fn: Callable[[], object], repeats: int = 10, flush: torch.Tensor | None = None) -> float:
    """Median time of one call between two CUDA events, with a flushed L2: gaps between kernels and the launch counted.

    While the flush runs the host is ahead of the device; a call that takes the host longer than that shows host time.
    """
    if flush is None:
        flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        fn()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)


def graph_time_us(fn: Callable[[], object], repeats: int = 10) -> float:
    """Time of one call in a replayed CUDA graph, with a flushed L2: a graph of flushes and calls less one of flushes.

    fn has to be fit for capture. Gaps between kernels are counted, host time is not.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    fn()
    torch.cuda.synchronize()
    times = []
    for with_call in (True, False):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                flush.zero_()
                if with_call:
                    fn()
        graph.replay()
        times.append(statistics.median(_replay_us(graph) for _ in range(5)))
    return (times[0] - times[1]) / repeats


def _replay_us(graph: Any) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def _choose_repeats(us: float, total_us: float) -> int:
    return min(max(int(total_us / max(us, 0.1)), _MIN_REPEATS), _MAX_REPEATS)


@dataclass(frozen=True)
class _Event:
    """A kernel, copy or fill on the device."""

    name: str
    start_ns: int
    us: float


def _record_device_events(work: Callable[[], None]) -> list[_Event]:
    """What the device did while `work` ran, in the order of its start."""
    torch.cuda.synchronize()
    # acc_events: without it torch warns that it would drop events of earlier cycles; there is one cycle here.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        work()
        torch.cuda.synchronize()
    # Kineto's own records: torch's FunctionEvents of the same take a millisecond for twenty of them.
    recorded = profile.profiler.kineto_results.events()
    on_device = [event for event in recorded if event.device_type() == torch.autograd.DeviceType.CUDA]
    events = [_Event(event.name(), event.start_ns(), event.duration_ns() / 1e3) for event in on_device]
    return sorted(events, key=lambda event: event.start_ns)


def _split_at_markers(events: Sequence[_Event]) -> list[list[_Event]]:
    segments: list[list[_Event]] = []
    for event in events:
        if _MARKER in event.name:
            segments.append([])
        elif segments:
            segments[-1].append(event)
    return segments


def _summarize(events: Sequence[_Event], repeats: int) -> Timing:
    """events: those of `repeats` calls; the flush comes first in each and is left out."""
    per_call, left_over = divmod(len(events), repeats)
    if left_over or per_call < 2:
        raise RuntimeError(
            f"testing.kernel_time_us: {len(events)} device activities in {repeats} calls; the function must launch "
            "something, and equally much in each call"
        )
    times = [sum(event.us for event in events[at + 1 : at + per_call]) for at in range(0, len(events), per_call)]
    median = statistics.median(times)
    first, _, third = statistics.quantiles(times, n=4) if repeats > 1 else (median,) * 3
    return Timing(median, statistics.fmean(times), (third - first) / median, repeats, per_call - 1)
