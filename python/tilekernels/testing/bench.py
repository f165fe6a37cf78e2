"""Timing on the GPU: kernel time as CUPTI reports it, with a cold L2, beside a plain copy of as many bytes.

A figure means little alone: `copy_time_us` times the copy in the same process with the same timer.
"""

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["copy_time_us", "dtype_to_str", "kernel_time_us", "make_param_id"]

# Zeroed before each call: several times the L2 of any GPU here (60 MiB on an H200), so that inputs come from memory.
_FLUSH_BYTES = 256 * 1024 * 1024

_TOTAL_US = 30_000  # of measured calls; the mean over them is the result
_MIN_REPEATS, _MAX_REPEATS = 10, 1000
_WARMUP_CALLS = 3

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


def kernel_time_us(fn: Callable[[], object], total_us: float = _TOTAL_US) -> float:
    """Mean GPU time of one call of fn in microseconds: the sum of all it launches, gaps and host time left out.

    L2 is flushed before each call. fn has to launch equally many kernels, copies and fills each time.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(_WARMUP_CALLS):
        fn()
    estimate = sum(_device_times(fn, flush, _MIN_REPEATS)) / _MIN_REPEATS
    repeats = min(max(int(total_us / max(estimate, 0.1)), _MIN_REPEATS), _MAX_REPEATS)
    return sum(_device_times(fn, flush, repeats)) / repeats


def copy_time_us(num_bytes: int) -> float:
    """Time of a plain device copy that moves num_bytes in all, read and written together."""
    source = torch.empty(max(num_bytes // 2, 1), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return kernel_time_us(lambda: target.copy_(source))


def _device_times(fn: Callable[[], object], flush: torch.Tensor, repeats: int) -> list[float]:
    """Duration of every device activity of fn in `repeats` calls; the flush comes first in each and is left out."""
    torch.cuda.synchronize()
    # acc_events: without it torch warns that it would drop events of earlier cycles; there is one cycle here.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(repeats):
            flush.zero_()
            fn()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    per_call, left_over = divmod(len(events), repeats)
    if left_over or per_call < 2:
        raise RuntimeError(
            f"testing.kernel_time_us: {len(events)} device activities in {repeats} calls; the function must launch "
            "something, and equally much in each call"
        )
    events.sort(key=lambda event: event.time_range.start)
    return [event.time_range.elapsed_us() for at, event in enumerate(events) if at % per_call]
