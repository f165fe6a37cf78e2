"""manifest: everything that later stages and the run time know of the kernels, as one sorted table.

The same kernels, flags and compiler give the same bytes: no clock, no path, no machine. docs/internals.md describes the
fields.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernels_src.declare import Axis, Kernel

from .compile import UnitResult
from .errors import BuildError
from .plan import Variant
from .store import unit_folder
from .toolchain import Toolchain
from .units import BASE_FLAGS, TracedVariant

SCHEMA = 1
VERSION_FILE = Path(__file__).resolve().parent.parent / "python" / "tilekernels" / "_version.py"
# Architectures whose kernels have run on hardware, and on which; the others print "compiled, not run"
VALIDATED_ON = {"sm_90a": "H200"}
# What `pytest -m gpu --record` wrote there. A kernel without a passed test file of its name has not run
RUNS = {"sm_90a": VERSION_FILE.parents[2] / "benchmarks" / "results" / "h200" / "tests.jsonl"}


def make_manifest(
    *,
    profile: str,
    kernels: Mapping[str, Kernel],
    variants: Sequence[tuple[Variant, TracedVariant]],
    left_out: Sequence[tuple[Variant, TracedVariant]] = (),
    results: Sequence[UnitResult],
    toolchain: Toolchain,
    source_hash: str,
    dirty: bool = False,
) -> dict[str, Any]:
    """The manifest of traced `variants`, which `results` hold as cubins. `left_out`: what the profile did not want of
    their kernels, for the parameters alone."""
    ordered = sorted(variants, key=lambda pair: (pair[0].kernel, pair[0].arch, pair[0].position))
    archs = sorted({planned.arch for planned, _ in ordered})
    names = sorted({planned.kernel for planned, _ in ordered})
    units = _units(results)
    compiled = {variant.place: result for result in results for variant in result.unit.variants}
    usage = {result.unit.id: result.compiled.usage for result in results if result.compiled}
    return {
        "schema": SCHEMA,
        "version": read_version(),
        "profile": profile,
        "archs": archs,
        "build": {
            "tilelang": toolchain.tilelang,
            "nvcc": toolchain.version,
            "nvcc_source": toolchain.source,
            "nvcc_flags": list(BASE_FLAGS),
            "source_hash": source_hash,
            "dirty": dirty,
        },
        "kernels": [_kernel(kernels[name], _all_in_order(name, ordered, left_out)) for name in names],
        "units": units,
        "variants": [_variant(traced, compiled[traced.place].unit.id, usage) for _, traced in ordered],
        "validated_on": {arch: VALIDATED_ON[arch] for arch in archs if arch in VALIDATED_ON},
        "not_run": {
            arch: find_not_run([kernels[name] for name in names], RUNS[arch]) for arch in archs if arch in RUNS
        },
    }


def find_not_run(kernels: Iterable[Kernel], record: Path) -> list[str]:
    """Names of the kernels whose test file did not pass in any recorded run."""
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    passed = {line["file"] for line in lines if line["passed"] and not line["failed"] and not line["error"]}
    return [each.name for each in kernels if f"tests/{each.family}/test_{each.file.stem}.py" not in passed]


def is_dirty(root: Path) -> bool:
    """Whether git knows of changes below `root` that were not committed. Without git a tree is what it is."""
    command = ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=all", "--", "."]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return run.returncode == 0 and bool(run.stdout.strip())


def read_version(file: Path = VERSION_FILE) -> str:
    """The project's version, from its one place."""
    found = re.search(r'^__version__ = "([^"]+)"$', file.read_text(), re.MULTILINE)
    if found is None:
        raise BuildError(f'{file} must hold a line __version__ = "X.Y.Z"')
    return found[1]


def _units(results: Iterable[UnitResult]) -> list[dict[str, Any]]:
    units = []
    for result in sorted(results, key=lambda result: (result.unit.kernel, result.unit.arch, result.unit.number)):
        unit = result.unit
        if result.compiled is None:
            raise BuildError(f"{unit.id} did not compile: it cannot be part of a manifest")
        units.append(
            {
                "id": unit.id,
                "file": f"{unit_folder(unit.kernel, unit.arch, unit.number)}/unit.cubin",
                "sha256": hashlib.sha256(result.compiled.cubin).hexdigest(),
                "bytes": len(result.compiled.cubin),
                "arch": unit.arch,
                "flags": list(unit.extra_flags),
            }
        )
    return units


def _all_in_order(
    name: str, built: Iterable[tuple[Variant, TracedVariant]], left_out: Iterable[tuple[Variant, TracedVariant]]
) -> list[TracedVariant]:
    """Built or not, by place in the grid: the order of parameters must not depend on the profile."""
    of_kernel = [pair for pair in (*built, *left_out) if pair[0].kernel == name]
    return [traced for _, traced in sorted(of_kernel, key=lambda pair: (pair[0].position, pair[0].arch))]


def _kernel(kernel: Kernel, everything: Sequence[TracedVariant]) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "doc": kernel.doc,
        "axes": [_axis(axis) for axis in kernel.axes],
        "raw": list(kernel.raw),
        "accepts": {name: list(dtypes) for name, dtypes in kernel.accepts.items()},
        "derived": dict(kernel.derived),
        "params": union_of_params(kernel.name, everything),
    }


def _axis(axis: Axis) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": axis.name, "kind": axis.kind}
    if axis.of is not None:
        entry["of"] = axis.of
    entry["values"] = list(axis.values)
    if axis.dtypes:
        entry["dtypes"] = list(axis.dtypes)
    return entry


def _variant(traced: TracedVariant, unit: str, usage: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    launches = []
    for launch in traced.launch["launches"]:
        used = usage[unit][launch["symbol"]]
        launches.append(
            {**launch, "registers": used.registers, "spill_bytes": used.spill_bytes, "smem_static": used.smem_static}
        )
    return {**traced.launch, "launches": launches, "unit": unit}


# ---- the parameters of a kernel -------------------------------------------------------------------------------------


def union_of_params(kernel: str, variants: Sequence[TracedVariant]) -> list[dict[str, Any]]:
    """Every parameter that some variant has, in an order that agrees with each variant's own."""
    union: dict[str, dict[str, Any]] = {}
    count: dict[str, int] = {}
    for variant in variants:
        for param in variant.launch["params"]:
            name = param["name"]
            entry = union.setdefault(
                name,
                {
                    "name": name,
                    "kind": param["kind"],
                    "dtypes": [],
                    "written": False,
                    "nullable": False,
                    "optional": False,
                },
            )
            if entry["kind"] != param["kind"]:
                raise BuildError(
                    f"{kernel}: parameter {name} is a {param['kind']} in {variant.id} and a {entry['kind']} elsewhere"
                )
            if param["dtype"] not in entry["dtypes"]:
                entry["dtypes"].append(param["dtype"])
            entry["written"] |= param.get("written", False)
            entry["nullable"] |= param.get("nullable", False)
            count[name] = count.get(name, 0) + 1
    for name, entry in union.items():
        entry["optional"] = count[name] < len(variants)
    return [union[name] for name in _common_order(kernel, variants)]


def _common_order(kernel: str, variants: Sequence[TracedVariant]) -> list[str]:
    """Names in an order of which every variant's is a part; among several the one nearest to first appearance."""
    orders = {tuple(param["name"] for param in variant.launch["params"]): variant.id for variant in variants}
    before: dict[str, set[str]] = {}  # name: names that stand directly in front of it somewhere
    for order in orders:
        for previous, name in zip((None, *order), order, strict=False):
            before.setdefault(name, set()).update({previous} if previous is not None else ())
    result: list[str] = []
    while before:
        ready = next((name for name, earlier in before.items() if not earlier - set(result)), None)
        if ready is None:
            listed = "".join(f"\n  {variant_id}: {', '.join(order)}" for order, variant_id in orders.items())
            raise BuildError(
                f"{kernel}: its variants take their parameters in different orders; give them one order{listed}"
            )
        result.append(ready)
        del before[ready]
    return result
