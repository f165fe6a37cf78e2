"""`tilekernels bench`: how fast every operator is on this GPU, against what, and how close to the limit.

The work is in tilekernels.bench; torch is loaded when the command runs, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ._tables import make_console, make_table

if TYPE_CHECKING:
    from ..bench.cases import Call
    from ..bench.measure import Options

__all__ = ["bench_command"]

_PEERS = ("torch", "compile", "triton")
_LONG_US = 20  # from which on two timings of a call have to agree
_NAME_WIDTH = 44
_PIPE_WIDTH, _PEER_WIDTH = 160, 20  # of what no terminal folds; each peer is a column more
_NO_GPU = (
    "no CUDA GPU here, so that nothing is measured ({why}). On a GPU these {count} calls would be timed, each beside "
    "what the card can do with as many bytes:"
)


def _split(context: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in (value or "").split(",") if name.strip())
    for name in names:
        if name not in _PEERS:
            raise click.BadParameter(f"must be some of {','.join(_PEERS)}, got {name!r}")
    return names


@click.command("bench")
@click.option("--op", "operators", multiple=True, metavar="FAMILY.OP", help="An operator, or a pattern: 'quant.*'.")
@click.option("--tokens", multiple=True, type=int, help="Only calls with as many tokens (rows).")
@click.option("--hidden", multiple=True, type=int, help="Only calls of this hidden size (columns).")
@click.option("--dtype", "dtypes", multiple=True, help="Only calls that read or write it: bf16, e4m3, ...")
@click.option("--largest", "largest_only", is_flag=True, help="Only the largest call of each operator.")
@click.option("--compare", callback=_split, metavar="LIST", help="Peers to time: torch,compile,triton.")
@click.option("--peers", "peer_folder", type=click.Path(path_type=Path), help="Folder of peers [benchmarks/peers].")
@click.option(
    "--baseline",
    "baselines",
    multiple=True,
    type=click.Path(path_type=Path),
    help="JSON lines of an earlier run, or of the JIT original: adds a column, marks rows that fall behind.",
)
@click.option("--cross-check", is_flag=True, help="Also time by CUDA events and by a replayed graph.")
@click.option("--twice", is_flag=True, help="Time every call a second time and say how far the two are apart.")
@click.option("--time-limit", type=float, metavar="SECONDS", help="Begin no further call after so long.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="File to append rows to, as JSON lines.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), help="Picture to draw (needs matplotlib).")
@click.option("--host", is_flag=True, help="What calls cost the CPU, first and later ones, instead of GPU time.")
def bench_command(
    operators: tuple[str, ...],
    tokens: tuple[int, ...],
    hidden: tuple[int, ...],
    dtypes: tuple[str, ...],
    largest_only: bool,
    compare: tuple[str, ...],
    peer_folder: Path | None,
    baselines: tuple[Path, ...],
    cross_check: bool,
    twice: bool,
    time_limit: float | None,
    json_file: Path | None,
    plot_file: Path | None,
    host: bool,
) -> None:
    """Time the operators of this install on this GPU, beside what the card can do.

    Kernel time by CUPTI with a cold L2, median of the calls; bytes as the operators count them, each input read once
    and each output written once. "of limit": the time of a plain copy of as many bytes over the operator's, of a plain
    kernel with the same read and written bytes where most are written (p), of torch's matmul for gemm (m).

    \b
    tilekernels bench --op 'quant.per_token_cast*' --hidden 7168 --compare torch,compile,triton
    """
    from ..bench.cases import Choice, choose_calls, find_calls
    from ..bench.measure import Options
    from ..bench.plot import check_can_plot

    calls = choose_calls(find_calls(), Choice(operators, tokens, hidden, dtypes, largest_only))
    if plot_file is not None:
        check_can_plot()
    reason = _why_no_gpu()
    if reason:
        _print_plan(calls, reason)
        raise click.exceptions.Exit(1)
    if host:
        _run_host(calls, json_file)
    else:
        options = Options(compare, peer_folder, cross_check, twice, time_limit)
        rows = _run(calls, options, baselines, json_file)
        if plot_file is not None:
            from ..bench.plot import draw_rows

            draw_rows(rows, plot_file)
            click.echo(f"{plot_file}: {len(rows)} calls by bytes moved")


def _run(
    calls: Sequence[Call], options: Options, baselines: Sequence[Path], json_file: Path | None
) -> list[dict[str, Any]]:
    from dataclasses import replace

    from ..bench.baseline import add_baseline, read_baseline
    from ..bench.limits import measure_limits
    from ..bench.measure import measure
    from ..bench.peers import find_peer_folder
    from ..bench.record import Record, describe_machine

    baseline = read_baseline(baselines) if baselines else None
    if options.peers:
        options = replace(options, peer_folder=find_peer_folder(options.peer_folder))
        if options.peer_folder is None:
            click.echo("no benchmarks/peers here: Triton and torch's fused operators are left out", err=True)
    record = Record(json_file)
    machine = describe_machine()
    limits = measure_limits()
    machine |= {"copy_gbs": limits.copy.gbs(), "fill_gbs": limits.fill.gbs()}
    record.write(**machine)
    click.echo(
        "{gpu}: copies {copy_gbs:.0f} GB/s, fills {fill_gbs:.0f} GB/s; torch {torch}, tilekernels {tilekernels}".format(
            **machine
        )
    )
    rows = []
    with _progress() as progress:
        task = progress.add_task("", total=len(calls))
        for call, row in zip(calls, measure(calls, limits, options), strict=False):
            progress.update(task, advance=1, description=call.case.operator)
            if baseline is not None:
                add_baseline(row, baseline)
            record.write(**row)
            rows.append(row)
    _print_rows(rows)
    _print_summary(rows, len(calls) - len(rows))
    return rows


def _progress() -> Progress:
    """A bar on standard error, so that the table can be piped; nothing where that is no terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=not sys.stderr.isatty())


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    timed = [row for row in rows if "us" in row]
    peers = list(dict.fromkeys(name for row in timed for name in row.get("peers", {})))
    extra = [name for name in ("again_us", "event_us", "graph_us") if any(name in row for row in timed)]
    has_baseline = any("baseline_us" in row for row in timed)
    titles = {"again_us": "again us", "event_us": "events us", "graph_us": "graph us"}
    table = make_table(
        *("call", "us", "+-", "GB/s", "of limit"),
        *(titles[name] for name in extra),
        *(f"{name} us" for name in peers),
        *(["baseline us"] if has_baseline else []),
    )
    table.columns[0].min_width = _NAME_WIDTH
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for row in timed:
        cells = [_name(row), f"{row['us']:.2f}", f"{row['spread']:.1%}", _speed(row), _of_limit(row)]
        cells += [_us(row.get(name)) for name in extra]
        cells += [_beside(row.get("peers", {}).get(name), row["us"]) for name in peers]
        if has_baseline:
            mark = " behind" if row.get("behind") else ""
            cells.append(_beside(row.get("baseline_us"), row["us"]) + mark)
        table.add_row(*cells)
    console = make_console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH + _PEER_WIDTH * len(peers)
    console.print(table)
    for name in peers:
        for row in timed:
            if isinstance(row.get("peers", {}).get(name), str):
                console.print(f"{_name(row)}: {name} could not be timed: {row['peers'][name]}")
    for row in rows:
        if "failure" in row:
            console.print(f"{_name(row)}: {row['failure']}")


def _print_summary(rows: Sequence[Mapping[str, Any]], num_left: int) -> None:
    behind = [row for row in rows if row.get("behind")]
    if any("baseline_us" in row for row in rows):
        click.echo(f"{len(behind)} of {sum('baseline_us' in row for row in rows)} calls fall behind the baseline")
    twice = [row for row in rows if row.get("us", 0) >= _LONG_US and "again_us" in row]
    if twice:
        most, name = max((abs(row["again_us"] / row["us"] - 1), _name(row)) for row in twice)
        click.echo(f"timed twice: {len(twice)} calls of {_LONG_US} us and more, at most {most:.1%} apart ({name})")
    if num_left:
        click.echo(f"{num_left} calls were not begun within the time limit")


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['operator']} {' '.join(f'{name}={_value(value)}' for name, value in row['params'].items())}"


def _value(value: Any) -> str:
    is_shape = isinstance(value, list | tuple) and all(isinstance(size, int) for size in value)
    return "x".join(map(str, value)) if is_shape else str(value).replace(" ", "")


def _speed(row: Mapping[str, Any]) -> str:
    return f"{row['tflops']:.0f} TF/s" if "tflops" in row else f"{row['gbs']:.0f}"


def _of_limit(row: Mapping[str, Any]) -> str:
    mark = {"copy": "", "torch.matmul": " m"}.get(row["limit"], " p")
    return f"{row['of_limit']:.0%}{mark}"


def _us(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-"


def _beside(value: Any, us: float) -> str:
    """Another's time and how many times ours it is."""
    return f"{value:.2f} ({value / us:.2f}x)" if isinstance(value, float) else "-"


def _run_host(calls: Iterable[Call], json_file: Path | None) -> None:
    from ..bench.host import measure_host
    from ..bench.record import Record

    record = Record(json_file)
    table = make_table("call", "us a call", "with out", "below Python", "first, cold", "preloaded")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in measure_host(list(calls)):
        record.write(**row)
        if row["stage"] == "import":
            click.echo(f"import tilekernels and every family, beyond import torch: {row['ms']:.1f} ms")
            continue
        columns = ("call_us", "out_us", "entry_us", "cold_us", "preloaded_us")
        table.add_row(_name(row), *(_us(row.get(name)) for name in columns))
    make_console().print(table)


def _why_no_gpu() -> str:
    import torch

    if torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} " + ("is built without CUDA" if torch.version.cuda is None else "finds none")


def _print_plan(calls: Sequence[Call], reason: str) -> None:
    click.echo(_NO_GPU.format(why=reason, count=len(calls)))
    table = make_table("call", "MB")
    table.columns[1].justify = "right"
    for call in calls:
        row = {"operator": call.case.operator, "params": call.case.params}
        table.add_row(_name(row), f"{call.case.bytes / 1e6:.2f}")
    make_console().print(table)
