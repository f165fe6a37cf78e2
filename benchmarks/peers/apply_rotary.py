"""Times transform.apply_rotary beside a Triton kernel that does the same, the fastest of several settings; JSON lines.

    python benchmarks/peers/apply_rotary.py [--output FILE]

us: GPU time with a cold L2, query and key together; peer_us: the same of the peer. Needs a GPU that nobody else uses,
and Triton.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from record import Record, describe_machine

from tilekernels.testing import calc_diff
from tilekernels.testing.bench import kernel_time_us
from tilekernels.transform import apply_rotary
from tilekernels.transform.apply_rotary import bench_cases

HEADS, WARPS = (1, 4, 8, 16, 32), (1, 2, 4, 8)
# Their products are rounded in other places
MAX_DIFF = 1e-6
TUNING_US = 2000.0


@triton.jit
def _rotate(
    x, cache, positions, offset, token_stride, head_stride, cache_stride, num_heads,
    half: tl.constexpr, num: tl.constexpr, has_positions: tl.constexpr, interleaved: tl.constexpr,
    conjugate: tl.constexpr,
):  # fmt: skip
    """One token and `num` of its heads."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * num + tl.arange(0, num)
    inside = (head < num_heads)[:, None]
    row = (tl.load(positions + token).to(tl.int64) if has_positions else token) + offset
    column = tl.arange(0, half)
    cos = tl.load(cache + row * cache_stride + column)[None, :]
    sin = tl.load(cache + row * cache_stride + half + column)[None, :]
    if conjugate:
        sin = -sin
    start = x + token * token_stride + head[:, None] * head_stride
    if interleaved:
        at = start + tl.arange(0, 2 * half)[None, :]
        a, b = tl.split(tl.reshape(tl.load(at, inside).to(tl.float32), (num, half, 2)))
        turned = tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), (num, 2 * half))
        tl.store(at, turned.to(x.dtype.element_ty), inside)
    else:
        at = start + column[None, :]
        a, b = tl.load(at, inside).to(tl.float32), tl.load(at + half, inside).to(tl.float32)
        tl.store(at, (a * cos - b * sin).to(x.dtype.element_ty), inside)
        tl.store(at + half, (a * sin + b * cos).to(x.dtype.element_ty), inside)


def rotate(call: dict[str, Any], heads: int, warps: int) -> None:
    """The peer's apply_rotary, for three dimensions."""
    cache, positions = call["cos_sin_cache"], call["positions"]
    for x in (call["query"], call["key"]):
        grid = (x.shape[0], triton.cdiv(x.shape[1], heads))
        _rotate[grid](
            x, cache, cache if positions is None else positions, call["seqlen_offset"],
            x.stride(0), x.stride(1), cache.stride(0), x.shape[1],
            half=x.shape[2] // 2, num=heads, has_positions=positions is not None,
            interleaved=call["interleaved"], conjugate=call["conjugate"], num_warps=warps,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    record = Record(parser.parse_args().output)
    record.write(**describe_machine())
    for case in bench_cases():
        torch.manual_seed(0)
        call = case.make("cuda")
        torch.manual_seed(0)
        peer_call = case.make("cuda")
        apply_rotary(**call)
        rotate(peer_call, 4, 4)
        assert all(calc_diff(call[name], peer_call[name]) < MAX_DIFF for name in ("query", "key"))
        times = {
            (heads, warps): kernel_time_us(functools.partial(rotate, peer_call, heads, warps), TUNING_US)
            for heads, warps in itertools.product(HEADS, WARPS)
        }
        best = min(times, key=lambda setting: times[setting])
        us = kernel_time_us(functools.partial(apply_rotary, **call))
        peer_us = kernel_time_us(functools.partial(rotate, peer_call, *best))
        record.write(
            stage="peers", operator=case.operator, params=case.params, us=us, gbs=case.bytes / us / 1e3,
            peer="triton", peer_heads=best[0], peer_warps=best[1], peer_us=peer_us, of_peer=peer_us / us,
        )  # fmt: skip


if __name__ == "__main__":
    main()
