"""Makes docs/performance.md, with its plots, from the committed rows of benchmarks/results/h200.

    python benchmarks/report.py [--results benchmarks/results/h200] [--output docs/performance.md]

kernels.jsonl: every call. peers.jsonl: some beside others that do the same. host_calls.jsonl: what calls cost the CPU.
counters.jsonl: what ncu counted. All are made by `tilekernels bench` and benchmarks/counters.py; reasons.toml says why
calls lie under the bar. Needs the package's Python files and matplotlib, no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilekernels.bench.plot import draw_distances, draw_rows
from tilekernels.bench.record import newest_rows, read_lines, row_key

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
REASONS = ROOT / "benchmarks" / "reasons.toml"

BAR = 0.92  # of the limit
LONG_US = 20.0  # from which on a call is more than launch and latency
WIDE, MANY_TOKENS = 7168, 4096  # the size that models are built of
COMPUTE_BOUND = ("gemm.matmul", "moe.fused_topk_gating")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Results:
    """The committed lines, by what they are."""

    machine: Row
    rows: Sequence[Row]
    peers: Sequence[Row]
    host: Sequence[Row]
    counters: Mapping[tuple[str, str], Row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "h200")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance.md")
    arguments = parser.parse_args()
    results = read_results(arguments.results)
    reasons = tomllib.loads(REASONS.read_text())["reason"]
    plots = arguments.output.parent / arguments.output.stem
    draw_rows(results.rows, plots / "bandwidth.png")
    draw_distances(long_rows(memory_bound(results.rows)), plots / "distance.png")
    arguments.output.write_text(render(results, reasons, plots.name))
    for row in under_the_bar(results.rows):
        if find_reason(row, reasons) is None:
            print(f"no reason in {REASONS.name}: {row['operator']} {show(row['params'])} {row['of_limit']:.0%}")


def read_results(folder: Path) -> Results:
    lines = read_lines(folder / "kernels.jsonl")
    machine = [line for line in lines if line["stage"] == "machine"][-1]
    rows = [with_limit(row) for row in newest_rows(lines) if "us" in row]
    extra = {name: folder / f"{name}.jsonl" for name in ("peers", "host_calls", "counters")}
    found = {name: read_lines(file) if file.is_file() else [] for name, file in extra.items()}
    peers = join_peers(found["peers"])
    # Of a call of several kernels the longest counts
    longest = sorted((line for line in found["counters"] if "us" in line), key=lambda line: line["us"])
    counters = {row_key(line): line for line in longest}
    return Results(machine, rows, peers, found["host_calls"], counters)


def join_peers(lines: Iterable[Row]) -> list[Row]:
    """One row a call, with the peers of all its rows: some take so long that they are timed by themselves."""
    joined: dict[tuple[str, str], dict[str, Any]] = {}
    for row in lines:
        if row.get("stage") == "kernels" and row.get("peers"):
            others = joined.get(row_key(row), {}).get("peers", {})
            joined[row_key(row)] = {**row, "peers": {**others, **row["peers"]}}
    return list(joined.values())


def with_limit(row: Row) -> Row:
    """Older rows have a copy's time alone."""
    return {"limit": "copy", "limit_us": row["copy_us"], "of_limit": row["of_copy"], **row}


# ---- which rows ------------------------------------------------------------------------------------------------------


def memory_bound(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["operator"] not in COMPUTE_BOUND]


def long_rows(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if row["us"] >= LONG_US]


def is_wide(row: Row) -> bool:
    """Whether a call is about 8192 tokens x 7168, or what comes closest to it for its operator."""
    params = row["params"]
    sizes = {params.get("hidden"), params.get("num_cols"), *params.get("shape", [])[-1:]}
    tokens = params.get("num_tokens") or params.get("num_rows") or next(iter(params.get("shape", [])), 0)
    return WIDE in sizes and tokens >= MANY_TOKENS


def under_the_bar(rows: Sequence[Row]) -> list[Row]:
    """Long memory-bound calls of that size under the bar, the farthest first; of an operator without, its largest."""
    candidates = long_rows(memory_bound(rows))
    has_wide = {row["operator"] for row in candidates if is_wide(row)}
    largest = {row["operator"]: row for row in sorted(candidates, key=lambda row: row["bytes"])}
    chosen = [row for row in candidates if is_wide(row)]
    chosen += [row for name, row in largest.items() if name not in has_wide]
    return sorted((row for row in chosen if row["of_limit"] < BAR), key=lambda row: row["of_limit"])


def find_reason(row: Row, reasons: Sequence[Row]) -> Row | None:
    """The entry for the operator whose parameters are all the row's; that with the most of them."""
    fits = [
        reason
        for reason in reasons
        if row["operator"] in reason["operators"]
        and all(row["params"].get(name) == value for name, value in reason.get("params", {}).items())
    ]
    return max(fits, key=lambda reason: len(reason.get("params", {})), default=None)


# ---- the paper -------------------------------------------------------------------------------------------------------


def render(results: Results, reasons: Sequence[Row], plots: str) -> str:
    machine = results.machine
    num_operators = len({row["operator"] for row in results.rows})
    parts = [
        "# Performance",
        f"Made by `benchmarks/report.py` from the rows in `benchmarks/results/h200`: {machine['gpu']}, "
        f"{machine['date'][:10]}, torch {machine['torch']}. {num_operators} operators, {len(results.rows)} calls. "
        f"Copies of 2 GiB run at {machine['copy_gbs']:.0f} GB/s"
        + (f", fills at {machine['fill_gbs']:.0f} GB/s." if "fill_gbs" in machine else "."),
        HOW,
        *render_twice(results.rows),
        f"![Bandwidth of every call]({plots}/bandwidth.png)",
        f"![Distance from the limit]({plots}/distance.png)",
        "## Under 92 % of the limit at 8192 tokens x 7168",
        UNDER,
        *render_reasons(results, reasons),
        "## Calls of 20 us and more, the farthest from the limit first",
        render_rows(long_rows(memory_bound(results.rows))),
        "## Matrix products",
        PRODUCTS,
        render_rows([row for row in results.rows if row["operator"] in COMPUTE_BOUND]),
    ]
    if results.peers:
        parts += ["## Beside others", PEERS, render_peers(results.peers)]
    behind = sorted((row for row in results.rows if "of_baseline" in row), key=lambda row: row["of_baseline"])
    if behind:
        parts += ["## Beside the JIT original", JIT.format(summarize_jit(behind)), render_jit(behind)]
    if results.host:
        parts += ["## What a call costs the CPU", HOST, render_host(results.host)]
    small = [row for row in memory_bound(results.rows) if row["us"] < LONG_US]
    parts += ["## Calls under 20 us", SMALL, render_rows(small)]
    return "\n\n".join(parts) + "\n"


HOW = """\
Times are GPU times by CUPTI with a cold L2, medians of 10 to 50 calls. Bytes are those that have to be moved: each
input read once, each output written once. The limit is the time of a plain copy of as many bytes, by the same timer in
the same run; where a call writes more than it reads, of a plain kernel that reads and writes as many (plain); for
matrix products, of torch's matmul. 100 % is as fast as that. The same on another machine:

```sh
tilekernels bench --json rows.jsonl     # --op 'quant.*' for some; --compare torch,compile,triton for others beside them
```"""
UNDER = """\
Each with what was found and what was tried; with `ncu`'s counters for the farthest call of a group where they were
taken. Of an operator that has no call of that size its largest is meant. The same operators at other sizes are in the
table below."""
PRODUCTS = """\
Limited by tensor cores, not by memory: `gemm.matmul` against torch's matmul of the same matrices, at the clock
that is kept under load. `fused_topk_gating` holds a matrix product too; its share of a copy says little."""
PEERS = """\
One call of an operator, in microseconds, and how many times ours that is. torch: our reference, eagerly. compile:
the same under torch.compile. triton: kernels of `benchmarks/peers`, the fastest of several settings."""
JIT = """\
Times of the TileLang original, compiled at run time, on another H200; more than 1.00 is slower than ours. {}"""
HOST = """\
The smallest call of each operator, in microseconds until it returns: outputs allocated, outputs given, the share of
`tilekernels._C` (tensors read, checks, launch), and its first call in a process, with kernels not loaded and loaded by
`tilekernels.preload()`."""
SMALL = """Mostly launch and latency: an empty kernel takes 1 to 1.5 us, and a copy of 1 MiB 2 us."""
TWICE = """Timed twice, the {} calls of 20 us and more were at most {:.1%} apart."""


def render_twice(rows: Sequence[Row]) -> list[str]:
    apart = [abs(row["again_us"] / row["us"] - 1) for row in long_rows(rows) if "again_us" in row]
    return [TWICE.format(len(apart), max(apart))] if apart else []


def render_reasons(results: Results, reasons: Sequence[Row]) -> list[str]:
    groups: dict[str, list[Row]] = {}
    texts: dict[str, Row | None] = {}
    for row in under_the_bar(results.rows):
        reason = find_reason(row, reasons)
        title = ", ".join(reason["operators"]) + json.dumps(reason.get("params", {})) if reason else row["operator"]
        groups.setdefault(title, []).append(row)
        texts[title] = reason
    parts = []
    for title, rows in groups.items():
        reason = texts[title]
        names = ", ".join(dict.fromkeys(f"`{row['operator']}`" for row in rows))
        lines = [f"* {names}: " + ("" if reason else "not looked into yet.")]
        if reason:
            why, tried = (" ".join(reason[key].split()) for key in ("reason", "tried"))
            lines[0] += f"{why} Tried: {tried}"
        lines += [f"  * {row['of_limit']:.0%}, {row['us']:.1f} us: {show(row['params'])}" for row in rows]
        counted = next((results.counters[row_key(row)] for row in rows if row_key(row) in results.counters), None)
        if counted:
            lines.append(f"  * ncu: {show_counters(counted)}")
        parts.append("\n".join(lines))
    return parts or ["None."]


def show_counters(line: Row) -> str:
    named = {
        "dram_pct": "memory {:.0f} %",
        "l2_pct": "L2 {:.0f} %",
        "issue_pct": "issue slots {:.0f} %",
        "alu_pct": "ALU {:.0f} %",
        "xu_pct": "XU {:.0f} %",
        "warps_pct": "warps {:.0f} %",
        "registers": "{:.0f} registers",
        "stall_memory": "{:.1f} warps wait for memory",
        "stall_barrier": "{:.1f} at barriers",
        "stall_shared": "{:.1f} for shared memory",
    }
    texts = [text.format(line[name]) for name, text in named.items() if isinstance(line.get(name), float)]
    return ", ".join(texts)


def render_rows(rows: Sequence[Row]) -> str:
    lines = ["| operator | call | us | GB/s | of limit | JIT original us |", "|---|---|---:|---:|---:|---:|"]
    for row in sorted(rows, key=lambda row: row["of_limit"]):
        mark = {"copy": "", "torch.matmul": " of torch"}.get(row["limit"], " of plain")
        speed = f"{row['tflops']:.0f} TF/s" if "tflops" in row else f"{row['gbs']:.0f}"
        jit = f"{row['baseline_us']:.1f}" if "baseline_us" in row else ""
        cells = (row["operator"], show(row["params"]), f"{row['us']:.2f}", speed, f"{row['of_limit']:.0%}{mark}", jit)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render_peers(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    lines = [f"| operator | call | us | {' | '.join(names)} |", f"|---|---|---:|{'---:|' * len(names)}"]
    for row in rows:
        times = [row["peers"].get(name) for name in names]
        texts = [f"{us:.1f} ({us / row['us']:.2f}x)" if isinstance(us, float) else "" for us in times]
        lines.append(f"| {row['operator']} | {show(row['params'])} | {row['us']:.2f} | {' | '.join(texts)} |")
    return "\n".join(lines)


def summarize_jit(rows: Sequence[Row]) -> str:
    behind = [row for row in rows if row.get("behind")]
    return f"Of {len(rows)} calls that both time, {len(behind)} are slower here by more than 3 % and 0.4 us."


def render_jit(rows: Sequence[Row]) -> str:
    lines = ["| operator | call | us | JIT original us | times ours |", "|---|---|---:|---:|---:|"]
    for row in rows:
        cells = (row["operator"], show(row["params"]), f"{row['us']:.2f}", f"{row['baseline_us']:.2f}")
        lines.append(f"| {' | '.join(cells)} | {row['of_baseline']:.2f}{' behind' if row.get('behind') else ''} |")
    return "\n".join(lines)


def render_host(lines: Sequence[Row]) -> str:
    imports = [line["ms"] for line in lines if line["stage"] == "import"]
    text = [f"Importing every family takes {imports[-1]:.0f} ms beyond `import torch`.", ""] if imports else []
    titles = "| operator | a call | with out | below Python | first, cold | first, preloaded |"
    text += [titles, "|---|---:|---:|---:|---:|---:|"]
    newest = {line["operator"]: line for line in lines if line["stage"] == "host_calls"}
    for name, line in sorted(newest.items()):
        times = [line.get(key) for key in ("call_us", "out_us", "entry_us", "cold_us", "preloaded_us")]
        text.append(f"| {name} | {' | '.join(f'{us:.1f}' if us is not None else '' for us in times)} |")
    return "\n".join(text)


def show(params: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={show_value(value)}" for name, value in params.items())


def show_value(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(each, int) for each in value):
        return "x".join(map(str, value))
    return str(value).replace(" ", "").replace("|", "/")


if __name__ == "__main__":
    main()
