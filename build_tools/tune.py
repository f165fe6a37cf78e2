"""tune: a pack of candidates of one kernel, to be timed on a GPU by benchmarks/pack.py. Needs no GPU.

    python -m build_tools tune moe.topk_gate --try '_WARPS=2,4,8' --keep form=aligned,general

A candidate is the kernel's file with other values of its module's constants, one for every combination of those that
are tried; the first is the file as it is. All become kernels of one library, `gemm.matmul__0`, `gemm.matmul__1`, ...,
built as any other. The pack is that library with a table of the candidates, in one file; nothing of it is installed.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .build import Options, Report, build
from .errors import BuildError
from .kernel_files import KERNELS_ROOT, REPOSITORY, load_kernels
from .profile import Profile
from .store import MANIFEST, replace_file, to_json

PACK_SCHEMA = 1
LIBRARY = "libtilekernels.so.0"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One version of the kernel: its name in the pack and the constants that differ from the file."""

    kernel: str
    values: Mapping[str, str]


def tune(
    kernel: str,
    tried: Sequence[str],
    keep: Sequence[str],
    pack: Path,
    jobs: int,
    cache: Path,
    console: Console,
    kernels_root: Path = KERNELS_ROOT,
) -> Report:
    """Build the candidates and write the pack, unless one of them failed."""
    declared = load_kernels(kernels_root)
    if kernel not in declared:
        raise BuildError(f"no kernel {kernel}; known: {', '.join(declared)}")
    source = declared[kernel].file
    candidates = make_candidates(kernel, [parse_values(text) for text in tried])
    folder = pack.with_suffix("")
    root = _write_sources(kernels_root, source, candidates, folder)
    options = Options(
        profile=_profile(candidates, declared[kernel].axes, keep),
        archs=("sm_90a",),
        only=(),
        jobs=jobs,
        store=folder / "store",
        cache=cache,
        root=root,
    )
    report = build(options, console)
    if not report.failures:
        _write_pack(kernel, candidates, options.store, _build_library(options.store, folder), pack)
        console.print(f"{len(candidates)} candidates are in {pack}: python3 benchmarks/pack.py {pack.name}")
    return report


# ---- candidates ------------------------------------------------------------------------------------------------------


def parse_values(text: str) -> tuple[str, list[str]]:
    """`_K=32,64` -> ("_K", ["32", "64"]); values are Python expressions."""
    name, _, values = text.partition("=")
    try:
        parsed = ast.parse(f"({values},)", mode="eval").body
    except SyntaxError:
        parsed = None
    if not name.isidentifier() or not isinstance(parsed, ast.Tuple) or not parsed.elts:
        raise BuildError(
            f"--try takes NAME=VALUE,VALUE..., a constant of the kernel file and expressions, got {text!r}"
        )
    return name, [str(ast.get_source_segment(f"({values},)", element)) for element in parsed.elts]


def make_candidates(kernel: str, tried: Sequence[tuple[str, list[str]]]) -> list[Candidate]:
    """The file as it is, then every combination of the values."""
    names = [name for name, _ in tried]
    combinations = itertools.product(*(values for _, values in tried)) if tried else ()
    settings = [{}, *(dict(zip(names, combination, strict=True)) for combination in combinations)]
    return [Candidate(f"{kernel}__{number}", values) for number, values in enumerate(settings)]


def rewrite(text: str, suffix: str, values: Mapping[str, str]) -> str:
    """A kernel file with other constants, and its kernels under other names."""
    lines = text.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(len(line.encode()) for line in lines)]
    raw = text.encode()
    edits: list[tuple[int, int, str]] = []
    missing = dict(values)
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in [target.id for target in targets if isinstance(target, ast.Name) and target.id in missing]:
                value = node.value
                start = starts[value.lineno - 1] + value.col_offset
                end = starts[(value.end_lineno or 0) - 1] + (value.end_col_offset or 0)
                edits.append((start, end, missing.pop(name)))
        if isinstance(node, ast.FunctionDef) and any(map(_is_kernel, node.decorator_list)):
            at = starts[node.lineno - 1] + node.col_offset + len("def ")
            edits.append((at, at + len(node.name), node.name + suffix))
    if missing:
        raise BuildError(f"the kernel file sets no constant {', '.join(missing)} at its top level")
    for start, end, new in sorted(edits, reverse=True):
        raw = raw[:start] + new.encode() + raw[end:]
    return raw.decode()


def _is_kernel(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "kernel"


def _write_sources(kernels_root: Path, source: Path, candidates: Sequence[Candidate], folder: Path) -> Path:
    """kernels_src with one file for each candidate instead of the kernel's own."""
    root = folder / "kernels_src"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(kernels_root, root, ignore=shutil.ignore_patterns("__pycache__"))
    text, family = source.read_text(), root / source.parent.name
    (family / source.name).unlink()
    for candidate in candidates:
        suffix = candidate.kernel[candidate.kernel.rindex("__") :]
        (family / f"{source.stem}{suffix}.py").write_text(rewrite(text, suffix, candidate.values))
    return root


def _profile(candidates: Sequence[Candidate], axes: Sequence[Any], keep: Sequence[str]) -> Profile:
    """The candidates alone, narrowed as --keep says; forms that a candidate does not have are no matter."""
    kept: dict[str, tuple[Any, ...]] = {}
    for text in keep:
        name, _, values = text.partition("=")
        axis = next((axis for axis in axes if axis.name == name), None)
        if axis is None:
            raise BuildError(f"--keep takes AXIS=VALUE,VALUE...; axes: {', '.join(axis.name for axis in axes)}")
        by_text = {str(value): value for value in axis.values}
        kept[name] = tuple(by_text.get(value, value) for value in values.split(","))
    names = tuple(candidate.kernel for candidate in candidates)
    return Profile("tune", ("sm_90a",), names, (), dict.fromkeys(names, kept) if kept else {}, None)


# ---- the pack --------------------------------------------------------------------------------------------------------


def _build_library(store: Path, folder: Path) -> Path:
    tree = folder / "cmake"
    environment = os.environ | {"PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"}
    configure = ["cmake", "-S", REPOSITORY, "-B", tree, f"-DTILEKERNELS_STORE={store}", "-DTILEKERNELS_PYTHON=OFF"]
    for command in (configure, ["cmake", "--build", tree, "--parallel"]):
        result = subprocess.run(
            list(map(str, command)),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            raise BuildError(f"{' '.join(map(str, command))} ended with {result.returncode}:\n{result.stdout}")
    return next(tree.rglob(LIBRARY))


def _write_pack(kernel: str, candidates: Sequence[Candidate], store: Path, library: Path, pack: Path) -> None:
    manifest = json.loads((store / MANIFEST).read_text())
    table = {
        "schema": PACK_SCHEMA,
        "kernel": kernel,
        "candidates": [
            {"kernel": candidate.kernel, "values": dict(candidate.values), **_resources(manifest, candidate.kernel)}
            for candidate in candidates
        ],
    }
    partial = pack.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pack.json", to_json(table))
        archive.write(library, LIBRARY)
    replace_file(pack, partial.read_bytes())
    partial.unlink()


def _resources(manifest: Mapping[str, Any], kernel: str) -> dict[str, Any]:
    launches = [
        launch for variant in manifest["variants"] if variant["kernel"] == kernel for launch in variant["launches"]
    ]
    return {
        "registers": max(launch["registers"] for launch in launches),
        "spill_bytes": sum(launch["spill_bytes"] for launch in launches),
    }
