"""Counters of ncu for calls that lie far from the limit: what keeps them there; JSON lines.

    python benchmarks/counters.py --op mhc.mhc_post_bwd --hidden 7168 [--id in=bf16] [--output FILE]
    python benchmarks/counters.py --under benchmarks/results/h200/kernels.jsonl --output FILE

Each chosen call (the options of `tilekernels bench`) runs once under ncu, which needs leave to read counters. Of a call
that launches several kernels each is a line. Percentages are of what the hardware could do at best.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import Record
from report import under_the_bar, with_limit

from tilekernels.bench.cases import Call, Choice, choose_calls, find_calls
from tilekernels.bench.record import newest_rows, read_lines, row_key

# Name in a line -> ncu's metric
METRICS = {
    "us": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "dram_pct": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_pct": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "issue_pct": "sm__inst_executed.avg.pct_of_peak_sustained_elapsed",
    "alu_pct": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "xu_pct": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "warps_pct": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "waves": "launch__waves_per_multiprocessor",
    "stall_memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "stall_barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "stall_shared": "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
}

CALLS_OF_A_RUN = 3  # ncu prints when a process has ended, and a process takes seconds to start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", default=[], help="as of tilekernels bench")
    parser.add_argument("--tokens", action="append", type=int, default=[])
    parser.add_argument("--hidden", action="append", type=int, default=[])
    parser.add_argument("--dtype", action="append", default=[])
    parser.add_argument("--largest", action="store_true")
    parser.add_argument("--id", action="append", default=[], help="only calls whose id contains it")
    parser.add_argument("--under", type=Path, help="rows, of which each operator's call that is farthest under the bar")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS", help="begin no ncu after so long")
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    parser.add_argument("--under-ncu", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.under_ncu:
        ids = json.loads(arguments.under_ncu)
        by_id = {call.case.id: call for call in find_calls()}
        run_once([by_id[name] for name in ids])
        return
    choice = Choice(
        tuple(arguments.op), tuple(arguments.tokens), tuple(arguments.hidden), tuple(arguments.dtype), arguments.largest
    )
    calls = choose_calls(find_calls(), choice)
    calls = [call for call in calls if not arguments.id or any(text in call.case.id for text in arguments.id)]
    if arguments.under:
        calls = choose_farthest(calls, arguments.under)
    record = Record(arguments.output)
    start = time.monotonic()
    for first in range(0, len(calls), CALLS_OF_A_RUN):
        if time.monotonic() - start > arguments.time_limit:
            print(f"{len(calls) - first} calls were not begun within the time limit", file=sys.stderr)
            break
        chunk = calls[first : first + CALLS_OF_A_RUN]
        for row in parse(run_under_ncu([call.case.id for call in chunk])):
            call = chunk[row.pop("call")]
            record.write(stage="counters", operator=call.case.operator, params=call.case.params, **row)


def choose_farthest(calls: Sequence[Call], file: Path) -> list[Call]:
    """Of the calls that the report lists under the bar, one for each operator, the farthest first."""
    by_key = {row_key({"operator": call.case.operator, "params": call.case.params}): call for call in calls}
    rows = under_the_bar([with_limit(row) for row in newest_rows(read_lines(file)) if "us" in row])
    farthest: dict[str, Call] = {}
    for row in rows:
        if row_key(row) in by_key:
            farthest.setdefault(row["operator"], by_key[row_key(row)])
    return list(farthest.values())


def run_once(calls: Sequence[Call]) -> None:
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


def run_under_ncu(ids: Sequence[str]) -> str:
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("counters: ncu is not on the path; it comes with the CUDA toolkit and with Nsight Compute")
    command = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--cache-control", "all"]
    command += ["--nvtx", "--nvtx-include", "regex:call[0-9]*/", "--metrics", ",".join(METRICS.values())]
    command += [sys.executable, __file__, "--under-ncu", json.dumps(list(ids))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
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
        if isinstance(row.get("us"), float):
            row["us"] /= 1e3  # ncu's base unit of time is the nanosecond
        rows.append(row)
    return rows


def to_number(text: str) -> float | str:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return text


if __name__ == "__main__":
    main()
