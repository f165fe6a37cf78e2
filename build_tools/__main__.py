"""`python -m build_tools list|trace|compile|build|tune|clean`: the kernel build from the command line."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from .build import (
    Options,
    Report,
    build,
    build_shard,
    compile_only,
    list_variants,
    merge,
    plan_variants,
    trace_only,
)
from .cache import default_cache_folder
from .errors import BuildError
from .executors import DEFAULT_PATIENCE
from .explain import estimate_seconds, explain_kernel
from .kernel_files import KERNELS_ROOT, REPOSITORY, load_kernels
from .plan import Variant, load_profile
from .profile import check_archs
from .progress import make_console
from .report import print_report, to_dict
from .shards import parse_shard
from .store import MANIFEST, default_store_folder, replace_file, to_json

NOTHING_HALF = "no file is half written: mend this and build again, it goes on from what is finished"
INTERRUPTED = 130  # what shells expect of a command ended by Ctrl-C


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that every command takes."""
    for option in reversed(
        [
            click.option(
                "--profile", default="default", show_default=True, help="Name in profiles/, or a path to a TOML file."
            ),
            click.option("--archs", default="", help="GPUs instead of the profile's: sm_90a,sm_100a"),
            click.option(
                "--only", multiple=True, metavar="PATTERN", help="Kernels (moe.*) or variants (moe.topk_gate/tk8*)."
            ),
            click.option(
                "--store", type=click.Path(path_type=Path), help="Where files go.  [default: build/store/<profile>]"
            ),
            click.option(
                "--kernels",
                type=click.Path(path_type=Path, exists=True, file_okay=False),
                default=KERNELS_ROOT,
                help="Folder of families.",
            ),
        ]
    ):
        command = option(command)
    return command


def _working(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that run the stages."""
    command = click.option(
        "--executor", default="local", show_default=True, metavar="WHERE", help="local, dask, or dask://host:port."
    )(command)
    command = click.option(
        "--patience", type=click.FloatRange(0), default=DEFAULT_PATIENCE, show_default=True,
        help="Seconds that a Dask cluster may be without workers.",
    )(command)  # fmt: skip
    command = click.option(
        "--report", "report_file", type=click.Path(path_type=Path), help="Write what was done as JSON."
    )(command)
    return click.option(
        "--jobs", type=click.IntRange(1), default=_processors, help="Parallel workers.  [default: processors]"
    )(command)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Trace TileLang kernels, compile them, and write the store that the C++ library is made from.

    The cache is build/cache, or the folder that TILEKERNELS_CACHE names.
    """


@main.command("list")
@_common
@click.option("--json", "as_json", is_flag=True, help="Every variant, for machines.")
@click.option("--explain", metavar="OP", help="Which line gave each axis of a kernel its values.")
@click.option("--jobs", type=click.IntRange(1), default=_processors, help="Workers that the estimate is for.")
def list_command(as_json: bool, explain: str | None, jobs: int, **common: Any) -> None:
    """Show the variants of a profile, their number and about how long they take. Needs neither TileLang nor nvcc."""
    with _errors():
        options = _options(**common, jobs=jobs)
        if explain is not None:
            click.echo("\n".join(_explain(options, explain)))
            return
        variants = plan_variants(options)
        if as_json:
            click.echo(json.dumps(list_variants(variants), indent=1))
        else:
            make_console().print(_list_table(variants, jobs))


def _explain(options: Options, pattern: str) -> Iterator[str]:
    kernels = load_kernels(options.root)
    chosen = [kernel for name, kernel in kernels.items() if fnmatch.fnmatchcase(name, pattern)]
    if not chosen:
        raise BuildError(f"--explain {pattern} matches no kernel; kernels: {', '.join(kernels)}")
    variants = plan_variants(options)
    for kernel in chosen:
        of_kernel = [variant for variant in variants if variant.kernel == kernel.name]
        yield from explain_kernel(kernel, options.profile, of_kernel, options.archs)


@main.command("trace")
@_common
@_working
def trace_command(report_file: Path | None, **options: Any) -> None:
    """Lower the kernels by TileLang: kernel.cu and launch.json of each variant."""
    _run(trace_only, report_file, options)


@main.command("compile")
@_common
@_working
def compile_command(report_file: Path | None, **options: Any) -> None:
    """Compile the variants that were traced into the store, edits by hand included."""
    _run(compile_only, report_file, options)


@main.command("build")
@_common
@_working
@click.option("--shard", metavar="I/N", help="Only the I-th of N parts, for `merge`.")
def build_command(report_file: Path | None, shard: str | None, **options: Any) -> None:
    """Everything, from the kernel files to manifest.json and gen/."""
    with _errors():
        part = parse_shard(shard) if shard else None
    _run(functools.partial(build_shard, shard=part) if part else build, report_file, options)


@main.command("merge")
@click.argument("shards", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@_common
@_working
def merge_command(shards: tuple[Path, ...], report_file: Path | None, **options: Any) -> None:
    """Put the stores of `build --shard` together; give it the options that the shards had."""
    _run(functools.partial(merge, folders=shards), report_file, options)


@main.command("tune")
@click.argument("kernel")
@click.option("--try", "tried", multiple=True, metavar="NAME=VALUE,...", help="Values of a constant of its file.")
@click.option("--keep", multiple=True, metavar="AXIS=VALUE,...", help="Build these values of an axis only.")
@click.option("--pack", type=click.Path(path_type=Path), help="The file.  [default: build/tune/<kernel>.pack]")
@click.option("--jobs", type=click.IntRange(1), default=_processors, help="Parallel workers.  [default: processors]")
def tune_command(kernel: str, tried: tuple[str, ...], keep: tuple[str, ...], pack: Path | None, jobs: int) -> None:
    """Build candidates of a kernel with other constants into one file, for benchmarks/pack.py on a GPU."""
    from .tune import tune

    console = make_console()
    with _errors():
        file = (pack or REPOSITORY / "build" / "tune" / f"{kernel}.pack").resolve()
        report = tune(kernel, tried, keep, file, jobs, default_cache_folder(), console)
        if report.failures:
            print_report(report, console)
            sys.exit(1)


@main.command("clean")
@click.option("--profile", default="default", show_default=True, help="Whose store.")
@click.option("--store", type=click.Path(path_type=Path), help="The store.  [default: build/store/<profile>]")
@click.option("--cache", "with_cache", is_flag=True, help="The cache as well.")
def clean_command(profile: str, store: Path | None, with_cache: bool) -> None:
    """Remove a store and, if asked, the cache."""
    with _errors():
        folder = store or default_store_folder(Path(profile).stem)
        _remove(folder, (MANIFEST, "variants", "units", "gen", "failed", ".lock"))
        if with_cache:
            cache = default_cache_folder()
            _remove(cache, [entry.name for kind in ("trace-*", "compile-*") for entry in cache.glob(kind)])


def _remove(folder: Path, names: Any) -> None:
    """Remove what the build writes, nothing else that a mistyped folder may hold."""
    for name in names:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
    click.echo(f"removed {folder}")


def _options(
    profile: str,
    archs: str,
    only: tuple[str, ...],
    store: Path | None,
    kernels: Path,
    jobs: int = 1,
    executor: str = "local",
    patience: float = DEFAULT_PATIENCE,
) -> Options:
    chosen = tuple(part for part in archs.replace(",", " ").split() if part)
    check_archs(chosen)
    loaded = load_profile(profile)
    return Options(
        profile=loaded,
        archs=chosen,
        only=only,
        jobs=jobs,
        store=(store or default_store_folder(loaded.name)).resolve(),
        cache=default_cache_folder(),
        root=kernels.resolve(),
        executor=executor,
        patience=patience,
    )


def _run(command: Callable[[Options, Any], Report], report_file: Path | None, options: dict[str, Any]) -> None:
    console = make_console()
    with _errors():
        report = command(_options(**options), console)
        print_report(report, console)
        if report_file is not None:
            replace_file(report_file.resolve(), to_json(to_dict(report)))
        if report.failures:
            sys.exit(1)


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Errors for people are printed without a traceback."""
    try:
        yield
    except BuildError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except OSError as error:
        click.echo(
            f"error: {error.filename or 'a file of the build'}: {error.strerror or error}; {NOTHING_HALF}", err=True
        )
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("\nstopped; what was finished is in the cache, the next build goes on from there", err=True)
        sys.exit(INTERRUPTED)


def _list_table(variants: list[Variant], jobs: int) -> Table:
    archs = sorted({variant.arch for variant in variants})
    table = Table(show_footer=True)
    kernels = sorted({variant.kernel for variant in variants})
    table.add_column("kernel", footer="all", no_wrap=True, min_width=max(map(len, kernels)))
    for arch in archs:
        table.add_column(arch, justify="right", footer=str(sum(variant.arch == arch for variant in variants)))
    seconds = estimate_seconds(variants)
    total = sum(seconds.values()) / jobs
    table.add_column("about s", justify="right", footer=f"{total:.0f}")
    table.add_column("axes", footer=f"about {total / 60:.1f} min by {jobs} workers, nothing cached")
    for kernel in kernels:
        of_kernel = [variant for variant in variants if variant.kernel == kernel]
        counts = [str(sum(variant.arch == arch for variant in of_kernel)) for arch in archs]
        values: dict[str, dict[Any, None]] = {}
        for variant in of_kernel:
            for axis, value in variant.config:
                values.setdefault(axis, {}).setdefault(value)
        axes = "  ".join(f"{axis}: {', '.join(map(str, found))}" for axis, found in values.items())
        table.add_row(kernel, *counts, f"{seconds[kernel] / jobs:.0f}", axes)
    return table


if __name__ == "__main__":
    main()
