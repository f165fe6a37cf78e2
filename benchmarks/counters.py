"""Counters of ncu for calls that lie far from the limit: what keeps them there; JSON lines.

    python benchmarks/counters.py --op mhc.mhc_post_bwd --hidden 7168 [--id in=bf16] [--output FILE]

Each chosen call (the options of `tilekernels bench`) runs once under ncu, which needs leave to read counters. Of a call
that launches several kernels each is a line. Percentages are of what the hardware could do at best.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import Record

from tilekernels.bench.cases import Choice, choose_calls, find_calls

# Name in a line -> ncu's metric
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "l1_pct": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "sm__inst_executed.avg.pct_of_peak_sustained_elapsed",
    "alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma_pct": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "xu_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "warps_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "waves": "launch__waves_per_multiprocessor",
    "local_bytes": "smsp__inst_executed_op_local.sum",
    "stall_memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "stall_barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "stall_shared": "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "stall_math": "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
    "stall_lsu": "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", default=[], help="as of tilekernels bench")
    parser.add_argument("--tokens", action="append", type=int, default=[])
    parser.add_argument("--hidden", action="append", type=int, default=[])
    parser.add_argument("--dtype", action="append", default=[])
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--id", action="append", default=[], help="only calls whose id contains it")
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    parser.add_argument("--under-ncu", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    choice = Choice(
        tuple(arguments.op), tuple(arguments.tokens), tuple(arguments.hidden), tuple(arguments.dtype), arguments.largest
    )
    calls = choose_calls(find_calls(), choice)
    calls = [call for call in calls if not arguments.id or any(text in call.case.id for text in arguments.id)]
    if arguments.under_ncu:
        run_once(calls)
        return
    record = Record(arguments.output)
    for row in parse(run_under_ncu(sys.argv[1:])):
        call = calls[row.pop("call")]
        record.write(stage="counters", operator=call.case.operator, params=call.case.params, **row)


def run_once(calls: Sequence[Any]) -> None:
    """Each call once, named by its number; inputs are made and kernels loaded before ncu looks."""
    import torch

    for number, call in enumerate(calls):
        torch.manual_seed(0)
        kwargs = call.case.make("cuda")
        call.operator(**kwargs)
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push(f"call{number}")
        call.operator(**kwargs)
        torch.cuda.nvtx.range_pop()
        torch.cuda.synchronize()


def run_under_ncu(arguments: Sequence[str]) -> str:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("counters: ncu is not on the path; it comes with the CUDA toolkit and with Nsight Compute")
    command = [ncu, "--csv", "--page", "raw", "--nvtx", "--nvtx-include", "regex:call[0-9]*/"]
    command += ["--print-units", "base", "--metrics", ",".join(METRICS.values()), "--cache-control", "all"]
    done = subprocess.run(
        [*command, sys.executable, __file__, *arguments, "--under-ncu"], capture_output=True, text=True, check=False
    )
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise SystemExit("counters: this user may not read the GPU's counters (ERR_NVGPUCTRPERM)")
    if done.returncode:
        raise SystemExit(f"counters: ncu ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def parse(text: str) -> list[dict[str, Any]]:
    """A row for each kernel: the number of its call, its name, and the metrics that this GPU has."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    names = {metric: name for name, metric in METRICS.items()}
    rows = []
    for entry in list(csv.DictReader(io.StringIO("\n".join(lines))))[1:]:  # the first holds the units
        ranges = " ".join(value for key, value in entry.items() if "Push/Pop_Range" in key)
        number = re.search(r"call(\d+)", ranges)
        if number is None:
            continue
        row: dict[str, Any] = {"call": int(number[1]), "kernel": entry["Kernel Name"].split("(")[0]}
        for metric, value in entry.items():
            if metric in names and value:
                row[names[metric]] = to_number(value)
        rows.append(row)
    return rows


def to_number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


if __name__ == "__main__":
    main()
