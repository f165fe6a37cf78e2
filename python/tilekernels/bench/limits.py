"""What the card can do at best, by the same timer in the same run: copies, fills, plain kernels, torch's matmul.

A copy's time by size is measured once, on sizes that copy well, and is as good as linear between them. How fast memory
is depends on how much of the traffic is written (H200: fills 4.7 TB/s, copies 4.25, four writes to a read 4.0), so a
call that writes more than it reads is measured against a plain kernel that reads and writes as many bytes. torch
compiles that one, by the NVRTC it brings; where it cannot, a copy and a fill take its place.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..testing.bench import time_kernels

__all__ = ["Curve", "Limits", "make_plain_call", "measure_limits"]

_KIB, _MIB = 1 << 10, 1 << 20
# Bytes moved in all: from what is launch alone to where time grows with size
_SIZES = (
    *(size * _KIB for size in (4, 16, 64, 256, 512)),
    *(size * _MIB for size in (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)),
)
_CURVE_US = 10_000.0  # of measured calls for a point: many rows lean on it

_CHUNK = 16  # bytes of one access
_THREADS = 256
_MOST_STORES = 8  # of a thread that has nothing to load
_PLAIN = """
extern "C" __global__ void tk_plain(const uint4* x, uint4* out, int num_read, int num_written, int num_threads) {
  const int start = blockIdx.x * blockDim.x + threadIdx.x;
  uint4 value = make_uint4(start, start, start, start);
  if (start < num_read) value = x[start];
  for (long long at = start; at < num_written; at += num_threads) out[at] = value;
}
"""


@dataclass(frozen=True)
class Curve:
    """Time by size, linear between what was measured and in proportion beyond."""

    sizes: Sequence[int]
    times_us: Sequence[float]

    def at(self, num_bytes: float) -> float:
        sizes, times = self.sizes, self.times_us
        if num_bytes <= sizes[0]:
            return times[0]
        if num_bytes >= sizes[-1]:
            return times[-1] * num_bytes / sizes[-1]
        after = bisect.bisect_right(sizes, num_bytes)
        share = (num_bytes - sizes[after - 1]) / (sizes[after] - sizes[after - 1])
        return times[after - 1] + share * (times[after] - times[after - 1])

    def gbs(self) -> float:
        """The bandwidth of the largest size."""
        return self.sizes[-1] / self.times_us[-1] / 1e3


@dataclass(frozen=True)
class Limits:
    """The card's times of plain work by bytes moved: a copy's read and written together, a fill's written."""

    copy: Curve
    fill: Curve

    def copy_and_fill_us(self, num_read: float, num_written: float) -> float:
        """Of a copy of what is read and a fill of what is written beyond, less one launch of the two."""
        rest = max(num_written - num_read, 0)
        return self.copy.at(num_read + min(num_read, num_written)) + self.fill.at(rest) - self.fill.times_us[0]


def measure_limits() -> Limits:
    """Both curves."""
    source = torch.zeros(_SIZES[-1] // 2, dtype=torch.uint8, device="cuda")
    target = torch.zeros(_SIZES[-1], dtype=torch.uint8, device="cuda")
    copies = [functools.partial(target[: size // 2].copy_, source[: size // 2]) for size in _SIZES]
    fills = [functools.partial(target[:size].view(torch.int32).fill_, 1) for size in _SIZES]
    times = [timing.us for timing in time_kernels([*copies, *fills], _CURVE_US)]
    return Limits(Curve(_SIZES, times[: len(_SIZES)]), Curve(_SIZES, times[len(_SIZES) :]))


def make_plain_call(num_read: int, num_written: int) -> Callable[[], object] | None:
    """A kernel that reads and writes as many bytes, in accesses of 16; None where torch cannot compile it."""
    launch = _compile_plain()
    if launch is None:
        return None
    read, written = (max(num_bytes // _CHUNK, 1) for num_bytes in (num_read, num_written))
    threads = max(read if num_read else 1, -(-written // _MOST_STORES))
    blocks = -(-threads // _THREADS)
    x = torch.zeros(read * _CHUNK, dtype=torch.uint8, device="cuda")
    out = torch.empty(written * _CHUNK, dtype=torch.uint8, device="cuda")
    arguments = [x, out, read if num_read else 0, written, blocks * _THREADS]
    return functools.partial(launch, grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=arguments)


@functools.cache
def _compile_plain() -> Callable[..., Any] | None:
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        return None
    try:
        launch: Callable[..., Any] = compile_kernel(_PLAIN, "tk_plain")
    except (RuntimeError, OSError):  # no NVRTC in this installation
        return None
    return launch
