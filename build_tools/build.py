"""build: the stages in the order data passes, for `python -m build_tools`.

    plan -> trace (worker processes) -> compile (parallel nvcc) -> manifest -> codegen, embed

Each stage takes values and returns values; this file gives them work, keeps the cache and the store, and collects what
failed. One failure does not stop the others: all are reported together at the end, and the store is then left without a
manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from . import progress
from .cache import Cache, make_key
from .compile import compile_key, find_compiled, to_files
from .errors import BuildError
from .executors import DEFAULT_PATIENCE, Executor, compiler_id, make_executor
from .failures import compile_failures, trace_failure
from .generate import generate_sources
from .manifest import is_dirty, make_manifest
from .plan import Variant, load_kernels, plan, plan_left_out, trace_key
from .profile import Profile
from .report import Report, TraceTime
from .shards import Shard, digest_of_plan, import_shards, variants_of_shard, write_shard
from .signatures import FILE as SIGNATURE_FILE
from .signatures import VERSION as SIGNATURE_VERSION
from .signatures import signature_files
from .store import MANIFEST, Store, to_json, unit_folder, variant_folder
from .toolchain import Toolchain, check_archs_known, find_toolchain
from .units import TracedVariant, Unit, make_units
from .wheel_label import hash_sources
from .workers import Outcome

TRACE_TIMEOUT = 900.0  # seconds a variant; TileLang takes 1 s on average and 6 at most in the kernels seen


@dataclasses.dataclass(frozen=True)
class Options:
    """What to build and where."""

    profile: Profile
    archs: tuple[str, ...]  # instead of the profile's; empty: the profile's
    only: tuple[str, ...]  # patterns on <family>.<kernel> or <family>.<kernel>/<variant id>; empty: everything
    jobs: int
    store: Path
    cache: Path
    root: Path  # the folder of families
    executor: str = "local"  # who works: executors.py
    patience: float = DEFAULT_PATIENCE  # seconds that a Dask cluster may be without workers


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a command: what is asked for, where it goes, what happened so far."""

    options: Options
    store: Store
    report: Report
    console: Console
    executor: Executor


# ---- the commands ---------------------------------------------------------------------------------------------------


def build(options: Options, console: Console) -> Report:
    """Everything: after it the store holds a manifest and generated sources, or the report holds failures."""
    toolchain = find_toolchain()  # first of all: nobody should trace for minutes to hear that there is no nvcc
    check_archs_known(toolchain, options.archs or options.profile.archs)
    with _started(options, console) as run:
        with _timed(run.report, "plan"):
            planned = plan_variants(options)
        with _timed(run.report, "trace"):
            traced = trace_all(planned, run)
            left_out = read_signatures(plan_left_out(planned, options.root), run)
        with _timed(run.report, "compile"):
            units = make_units((variant for _, variant in traced), options.root)
            compile_all(units, {variant.kernel: str(variant.file) for variant in planned}, toolchain, run)
        if run.report.failures:
            run.store.invalidate()
        else:
            with _timed(run.report, "generate"):
                _finish(traced, left_out, toolchain, run)
    return run.report


def build_shard(options: Options, console: Console, shard: Shard) -> Report:
    """One part of a build, left in the store for `merge`."""
    toolchain = find_toolchain()
    check_archs_known(toolchain, options.archs or options.profile.archs)
    with _started(options, console) as run:
        run.store.invalidate()
        with _timed(run.report, "plan"):
            planned = plan_variants(options)
            plan_digest = digest_of_plan(map(trace_key, planned))
            part = variants_of_shard(planned, shard)
        with _timed(run.report, "trace"):
            traced = trace_all(part, run)
        with _timed(run.report, "compile"):
            units = make_units((variant for _, variant in traced), options.root)
            compile_all(units, {variant.kernel: str(variant.file) for variant in planned}, toolchain, run)
        if not run.report.failures:
            entries = {
                "trace": {trace_key(variant): _to_files(files) for variant, files in traced},
                "compile": {
                    compile_key(result.unit, toolchain): to_files(result.compiled)
                    for result in run.report.units
                    if result.compiled is not None
                },
            }
            write_shard(options.store, shard, plan_digest, compiler_id(toolchain), entries)
    return run.report


def merge(options: Options, console: Console, folders: Sequence[Path]) -> Report:
    """The build whose parts lie in `folders`: the same store as that of a build in one piece."""
    plan_digest = digest_of_plan(map(trace_key, plan_variants(options)))
    import_shards(folders, options.cache, plan_digest, compiler_id(find_toolchain()))
    return build(options, console)


def trace_only(options: Options, console: Console) -> Report:
    """The first half: variants/ of the store."""
    with _started(options, console) as run, _timed(run.report, "trace"):
        trace_all(plan_variants(options), run)
    return run.report


def compile_only(options: Options, console: Console) -> Report:
    """The second half: compile what variants/ of the store holds, edits by hand included. Needs no kernel files."""
    with _started(options, console) as run, _timed(run.report, "compile"):
        variants = [
            variant
            for variant in run.store.read_variants()
            if (not options.archs or variant.arch in options.archs)
            and _selected(options.only, variant.kernel, variant.id)
        ]
        if not variants:
            raise BuildError(
                f"{run.store.folder} holds no traced variant to compile: run the trace command with the same options"
            )
        compile_all(make_units(variants, options.root), {}, find_toolchain(), run)
    return run.report


def plan_variants(options: Options) -> list[Variant]:
    """The variants of the profile that `only` selects."""
    everything = plan(options.profile, options.archs or None, options.root)
    variants = [variant for variant in everything if _selected(options.only, variant.kernel, variant.id)]
    if not variants:
        known = ", ".join(sorted({variant.kernel for variant in everything})) or "none"
        wish = f"--only {' '.join(options.only)} matches no variant" if options.only else "it selects no variant"
        raise BuildError(f"profile {options.profile.name}: {wish}; kernels: {known}")
    return variants


def list_variants(variants: Iterable[Variant]) -> list[dict[str, Any]]:
    """The plan as JSON."""
    return [
        {
            "kernel": variant.kernel,
            "variant": variant.id,
            "arch": variant.arch,
            "config": dict(variant.config),
            "file": str(variant.file),
        }
        for variant in variants
    ]


# ---- trace ----------------------------------------------------------------------------------------------------------


def trace_all(variants: Sequence[Variant], run: Run) -> list[tuple[Variant, TracedVariant]]:
    """Source and launch facts of every variant, from the cache or from TileLang in workers; sorted as planned."""
    cache = Cache(run.options.cache, "trace")
    cache.remove_abandoned()
    keys = [trace_key(variant) for variant in variants]
    files = [cache.get(key) for key in keys]
    missing = [index for index, found in enumerate(files) if found is None]
    items = [variants[index] for index in missing]
    outcomes: dict[int, Outcome] = {}
    edited: set[str] = set()
    with progress.stage(run.console, "trace", len(missing)) as advance:
        for outcome in run.executor.trace(trace_files, items, TRACE_TIMEOUT):
            index = missing[outcome.index]
            outcomes[index], files[index] = outcome, outcome.value
            if trace_key(variants[index]) != keys[index]:
                edited.add(str(variants[index].file))  # its trace does not belong to the key of the file as it was
            elif outcome.error is None:
                cache.put(keys[index], outcome.value)
            advance(variants[index].describe())
    _note_cache(cache, run.report)
    run.report.notes += [f"{file} changed while it was traced: build again" for file in sorted(edited)]
    traced: list[tuple[Variant, TracedVariant]] = []
    for index, variant in enumerate(variants):
        new, content = outcomes.get(index), files[index]
        seconds, cpu_seconds = (round(new.seconds, 3), round(new.cpu_seconds, 3)) if new else (0.0, 0.0)
        time_taken = TraceTime(variant.kernel, variant.id, variant.arch, seconds, new is None, cpu_seconds)
        run.report.traces.append(time_taken)
        if content is not None:
            traced.append((variant, _from_files(content)))
            run.store.write_variant(traced[-1][1])
        elif new is not None:
            run.report.failures.append(trace_failure(variant, new, run.store))
    return traced


def read_signatures(left_out: Sequence[Variant], run: Run) -> list[tuple[Variant, TracedVariant]]:
    """The parameters of variants that are not built, as launches that say nothing else."""
    cache = Cache(run.options.cache, "signature")
    keys = [make_key({"trace": trace_key(variant), "version": SIGNATURE_VERSION}) for variant in left_out]
    files = [cache.get(key) for key in keys]
    missing = [index for index, found in enumerate(files) if found is None]
    for outcome in run.executor.trace(signature_files, [left_out[index] for index in missing], TRACE_TIMEOUT):
        index = missing[outcome.index]
        files[index] = outcome.value
        if outcome.error is None:
            cache.put(keys[index], outcome.value)
        else:
            run.report.failures.append(trace_failure(left_out[index], outcome, run.store))
    return [
        (variant, _without_code(variant, json.loads(content[SIGNATURE_FILE])))
        for variant, content in zip(left_out, files, strict=True)
        if content is not None
    ]


def _without_code(variant: Variant, params: list[dict[str, Any]]) -> TracedVariant:
    return TracedVariant(
        "", {"kernel": variant.kernel, "variant": variant.id, "arch": variant.arch, "params": params, "launches": []}
    )


def trace_files(variant: Variant) -> dict[str, bytes]:
    """Runs in a worker: TileLang is imported here and nowhere else in a build."""
    from .trace import trace

    traced = trace(variant)
    return {"kernel.cu": traced.source.encode(), "launch.json": to_json(traced.launch)}


def _to_files(traced: TracedVariant) -> dict[str, bytes]:
    return {"kernel.cu": traced.source.encode(), "launch.json": to_json(traced.launch)}


def _from_files(files: Mapping[str, bytes]) -> TracedVariant:
    return TracedVariant(files["kernel.cu"].decode(), json.loads(files["launch.json"]))


# ---- compile --------------------------------------------------------------------------------------------------------


def compile_all(units: Sequence[Unit], files: Mapping[str, str], toolchain: Toolchain, run: Run) -> None:
    """Compile the units and add the results to the report. `files` maps kernels to their files, for messages."""
    cache = Cache(run.options.cache, "compile")
    cache.remove_abandoned()
    found = {unit.id: find_compiled(unit, toolchain, cache) for unit in units}
    missing = [unit for unit in units if found[unit.id] is None]
    missing.sort(key=lambda unit: (-len(unit.source), unit.id))  # so that no large one is left alone at the end
    results = [result for result in found.values() if result is not None]
    with (
        progress.stage(run.console, "compile", len(missing)) as advance,
        contextlib.closing(run.executor.compile(missing, toolchain, cache, run.options.root)) as compiled,
    ):
        for result in compiled:
            results.append(result)
            advance(result.unit.id)
    _note_cache(cache, run.report)
    run.report.units = sorted(results, key=lambda result: (result.unit.kernel, result.unit.arch, result.unit.number))
    for result in run.report.units:
        if result.compiled is not None:
            run.store.write_unit(result.unit, result.compiled.cubin, result.compiled.ptxas)
        for bad in result.bad:
            run.report.failures += compile_failures(bad, files, run.store)


# ---- manifest, codegen, embed ---------------------------------------------------------------------------------------


def _finish(
    traced: Sequence[tuple[Variant, TracedVariant]],
    left_out: Sequence[tuple[Variant, TracedVariant]],
    toolchain: Toolchain,
    run: Run,
) -> None:
    """Remove what belongs to earlier builds, generate the sources, and write the manifest last."""
    store, units = run.store, [result.unit for result in run.report.units]
    store.prune("variants", [variant_folder(variant.kernel, variant.arch, variant.id) for _, variant in traced])
    store.prune("units", [unit_folder(unit.kernel, unit.arch, unit.number) for unit in units])
    manifest = make_manifest(
        profile=run.options.profile.name,
        kernels=load_kernels(run.options.root),
        variants=traced,
        left_out=left_out,
        results=run.report.units,
        toolchain=toolchain,
        source_hash=hash_sources(run.options.root),
        dirty=is_dirty(run.options.root),
    )
    generate_sources(manifest, store)
    store.write(MANIFEST, to_json(manifest))


# ---- small things ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(options: Options, console: Console) -> Iterator[Run]:
    """The store locked for this run, and rid of the failures of the last one."""
    store = Store(options.store)
    report = Report(options.profile.name, options.archs or options.profile.archs, options.store)
    cpu_before = _cpu_seconds()
    with store.locked(console.print):
        store.remove_failed()
        executor = make_executor(options.executor, options.jobs, options.patience)
        try:
            yield Run(options, store, report, console, executor)
        finally:
            executor.close()
        report.changed = store.changed
        report.cpu_seconds = _cpu_seconds() - cpu_before


def _cpu_seconds() -> float:
    """User and system time of this process and of those that it waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@contextlib.contextmanager
def _timed(report: Report, name: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        report.seconds[name] = time.monotonic() - start


def _selected(only: Iterable[str], kernel: str, variant_id: str) -> bool:
    patterns = tuple(only)
    names = (kernel, f"{kernel}/{variant_id}")
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _note_cache(cache: Cache, report: Report) -> None:
    if cache.write_problem:
        report.notes.append(
            f"the cache could not be written, the next build does this work again ({cache.write_problem})"
        )
