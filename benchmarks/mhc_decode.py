"""A serving process meets hyper-connections: single calls of every size, and a decode step of 61 layers; JSON lines.

    python benchmarks/mhc_decode.py [--output benchmarks/results/mhc_decode.jsonl]

A fresh process preloads, then times the first and a later call of each forward operator at token counts that it has
never seen, from the call until the GPU is done: none may stall. It must write no file and start no process. Then it
runs the step eagerly and as a CUDA graph. Needs a GPU that nobody else uses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import Record, describe_machine

TOKEN_COUNTS = (1, 7, 128, 4097)
MULT, HIDDEN, NUM_LAYERS = 4, 7168, 61
WORST_CALL_BAR_US = 1000.0
STEPS = 50  # of the timed decode step; the median counts

# What Python reports before it writes a file or starts a process (sys.addaudithook)
PROCESS_EVENTS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen")
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file to append the lines to")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    record = Record(arguments.output)
    record.write(**describe_machine())
    for line in run_fresh_process():
        record.write(**line)


def run_fresh_process() -> list[dict[str, Any]]:
    """The lines of a process whose home, temporary and working folders are empty; what it leaves there counts."""
    with tempfile.TemporaryDirectory() as folder:
        places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"), folder)
        # Python's own files of compiled modules are left out; relative paths would be looked up in the new folder
        places["PYTHONDONTWRITEBYTECODE"] = "1"
        if "PYTHONPATH" in os.environ:
            paths = os.environ["PYTHONPATH"].split(os.pathsep)
            places["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths if path)
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        done = subprocess.run(command, cwd=folder, env={**os.environ, **places}, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"mhc_decode: the serving process failed:\n{done.stderr}")
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        left = sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())
    for line in lines:
        if line["what"] == "side effects":
            line["files_left"] = left
            line["met"] = not (left or line["files_written"] or line["processes_started"])
    return lines


# ---- the serving process ---------------------------------------------------------------------------------------------


def serve() -> None:
    import torch

    import tilekernels

    torch.cuda.init()
    written, started = watch_side_effects()
    # torch's allocator has its memory, and torch's own kernels that this file uses are loaded
    torch.empty(4 << 30, dtype=torch.uint8, device="cuda").fill_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    tilekernels.preload()
    preload_ms = (time.perf_counter() - start) * 1e3
    calls = {num_tokens: make_calls(num_tokens) for num_tokens in TOKEN_COUNTS}
    torch.cuda.synchronize()
    times = {
        (name, num_tokens, turn): time_call(call)
        for turn in ("first", "second")
        for num_tokens in TOKEN_COUNTS
        for name, call in calls[num_tokens].items()
    }
    worst = max(times, key=lambda key: times[key])
    show("worst single call", num_calls=len(times), us=times[worst], call=worst, preload_ms=preload_ms,
         bar=WORST_CALL_BAR_US, met=times[worst] <= WORST_CALL_BAR_US)  # fmt: skip
    for num_tokens in TOKEN_COUNTS:
        first = {name: us for (name, count, turn), us in times.items() if (count, turn) == (num_tokens, "first")}
        show("first calls", num_tokens=num_tokens, us=first)
    for num_tokens in TOKEN_COUNTS[:-1]:
        show("decode step", num_tokens=num_tokens, num_layers=NUM_LAYERS, hidden=HIDDEN, **time_step(num_tokens))
    show("side effects", files_written=written, processes_started=started)


def show(what: str, **fields: Any) -> None:
    print(json.dumps({"stage": "mhc_decode", "what": what, **fields}), flush=True)


def watch_side_effects() -> tuple[list[str], list[str]]:
    """(files opened for writing, processes started) from now on, as Python sees them."""
    written: list[str] = []
    started: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITE_FLAGS:
            written.append(str(arguments[0]))
        elif event in PROCESS_EVENTS:
            started.append(event)

    sys.addaudithook(hook)
    return written, started


def time_call(call: Callable[[], object]) -> float:
    import torch

    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


def make_calls(num_tokens: int) -> dict[str, Callable[[], object]]:
    """Every forward operator of a decode step, with outputs in place."""
    import torch

    from tilekernels import mhc
    from tilekernels.mhc._splits import choose_num_splits

    def fp32(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device="cuda")

    def bf16(*shape: int) -> torch.Tensor:
        return fp32(*shape).bfloat16()

    n, m, columns, channels = num_tokens, MULT, MULT * (MULT + 2), MULT * HIDDEN
    splits = choose_num_splits(n, channels)
    residual, layer = bf16(n, m, HIDDEN), bf16(n, HIDDEN)
    fn, scale, base = fp32(columns, channels) / channels, fp32(3), fp32(columns)
    out_mul, sqrsum, mixes = fp32(splits, n, columns), fp32(splits, n), fp32(n, columns)
    sums = fp32(n, 1, columns), fp32(n, 1)
    pre, post, comb = fp32(n, m), fp32(n, m), fp32(n, m * m)
    matrices = comb.view(n, m, m)
    out = torch.empty_like(residual)
    parts = out_mul.unsqueeze(2), sqrsum.unsqueeze(2)
    fused = out_mul, sqrsum, scale, base, residual, post, comb, layer, 1e-6, 1e-6, 1e-6, 1.0, 10, splits
    return {
        "expand": lambda: mhc.expand_to_mhc_fwd(layer, out),
        "norm_fn_partials": lambda: mhc.mhc_pre_norm_fn_partials(residual, fn, out_mul, sqrsum),
        "reduce_partials": lambda: mhc.mhc_reduce_partials_and_rmsnorm_fwd(
            *parts, *sums, mixes, channels, 1e-6, splits
        ),
        "split_mixes": lambda: mhc.mhc_pre_split_mixes_fwd(mixes, scale, base, pre, post, comb, 1.0, 1e-6),
        "sinkhorn": lambda: mhc.mhc_sinkhorn_fwd(matrices, matrices, 10, 1e-6),
        "apply_mix": lambda: mhc.mhc_pre_apply_mix_fwd(residual, pre, layer),
        "big_fuse": lambda: mhc.mhc_pre_big_fuse_fwd(*fused),
        "post": lambda: mhc.mhc_post_fwd(layer, residual, post.unsqueeze(-1), matrices, out),
        "head_mix": lambda: mhc.mhc_head_compute_mix_fwd(pre, scale[:1], base[:m], pre, 1e-6),
    }


def time_step(num_tokens: int) -> dict[str, Any]:
    """A step of 61 layers whose layers do nothing: eager and replayed, in microseconds, and whether they agree."""
    import statistics

    import torch

    from tilekernels.modeling.mhc import expand_from_embedding, mhc_head, mhc_pre
    from tilekernels.modeling.mhc.functional import mhc_post

    columns, channels = MULT * (MULT + 2), MULT * HIDDEN
    fns = [torch.randn((columns, channels), device="cuda") / channels**0.5 for _ in range(NUM_LAYERS)]
    scale, base = torch.rand(3, device="cuda"), torch.randn(columns, device="cuda")
    embedding = torch.randn((num_tokens, HIDDEN), device="cuda").bfloat16()

    def step() -> torch.Tensor:
        residual = expand_from_embedding(embedding, MULT)
        for fn in fns:
            layer_input, mixes = mhc_pre(residual, fn, scale, base)
            residual = mhc_post(layer_input, residual, *mixes)
        return mhc_head(residual, fns[0], scale[:1], base[:MULT])

    with torch.no_grad():
        expected = step()
        eager = statistics.median(time_call(step) for _ in range(STEPS))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        replay = statistics.median(time_call(graph.replay) for _ in range(STEPS))
    return {"eager_us": eager, "graph_us": replay, "same_bits": torch.equal(result, expected)}


if __name__ == "__main__":
    main()
