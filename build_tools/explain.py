"""explain: why a build holds what it holds, and about how long it takes, before anything is compiled.

`list --explain OP` says of each axis which values are built and which line asked for that; `list` estimates times from
the builds recorded in benchmarks/results/build/builds.jsonl.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from kernels_src.declare import Axis, AxisValue, Kernel

from .kernel_files import REPOSITORY
from .plan import Variant
from .profile import Profile

RECORD = REPOSITORY / "benchmarks" / "results" / "build" / "builds.jsonl"


# ---- where each axis value came from ---------------------------------------------------------------------------------


def explain_kernel(
    kernel: Kernel, profile: Profile, variants: Sequence[Variant], archs: Sequence[str]
) -> Iterator[str]:
    """Lines about one kernel; `variants` are those of it that are planned, `archs` what the command line asked for."""
    line = getattr(kernel.function, "__code__").co_firstlineno  # noqa: B009 - a Callable has no __code__ for mypy
    declared = f"{_short(kernel.file)}:{line}"
    yield f"{kernel.name}: {len(variants)} variants, declared in {declared}"
    selected = _explain_selection(kernel, profile)
    if not profile.selects(kernel.name):
        yield f"  not built: {selected}"
        return
    yield f"  built: {selected}"
    yield f"  archs: {_explain_archs(kernel, profile, variants, archs, declared)}"
    for axis in kernel.axes:
        yield f"  {axis.name}: {_explain_axis(axis, kernel, profile, variants, declared)}"
    planned = {variant.config for variant in variants}
    everything = 1
    for axis in kernel.axes:
        everything *= len(axis.values)
    allowed = list(kernel.configs())
    if kernel.where is not None:
        yield f"  where: the conditions in {declared} allow {len(allowed)} of {everything} combinations"
    if len(planned) < len(allowed):
        yield f"  {len(planned)} of {len(allowed)} combinations are built"


def _explain_selection(kernel: Kernel, profile: Profile) -> str:
    for key, patterns in (("exclude", profile.exclude), ("include", profile.include)):
        pattern = profile.find_pattern(kernel.name, patterns)
        if pattern == "*" and key == "include" and not profile.place(key, "operators"):
            return f"{_profile_name(profile)} includes everything"
        if pattern is not None:
            return f"{key} {pattern!r} in {profile.place(key, 'operators') or _profile_name(profile)}"
    return f"no include of {profile.place('include', 'operators') or _profile_name(profile)} matches it"


def _explain_archs(
    kernel: Kernel, profile: Profile, variants: Sequence[Variant], archs: Sequence[str], declared: str
) -> str:
    built = sorted({variant.arch for variant in variants})
    asked = "--archs" if archs else profile.place("archs") or _profile_name(profile)
    missing = sorted(set(archs or profile.archs) - set(kernel.archs))
    left_out = f"; {', '.join(missing)}: not among the archs in {declared}" if missing else ""
    return f"{', '.join(built) or 'none'} from {asked}{left_out}"


def _explain_axis(axis: Axis, kernel: Kernel, profile: Profile, variants: Sequence[Variant], declared: str) -> str:
    built = {dict(variant.config)[axis.name] for variant in variants}
    kept = [value for value in axis.values if value in built]
    narrowed = profile.narrowed.get(kernel.name, {}).get(axis.name)
    if narrowed is not None:
        place = profile.place(axis.name, kernel.name) or _profile_name(profile)
        source = f"from {place}, of {_values(axis.values)} in {declared}"
    elif axis.kind == "forms" and profile.is_general(kernel):
        place = profile.place("forms") or _profile_name(profile)
        source = f"general forms and the last of each combination, by {place}, of {_values(axis.values)} in {declared}"
    elif len(kept) < len(axis.values):
        source = f"what is left of {_values(axis.values)} in {declared}"
    else:
        source = f"all that {declared} declares"
    kinds = {
        "dtype_of": f", by the dtype of {axis.of}",
        "itemsize_of": f", by the element size of {axis.of}",
        "forms": ", machine forms tried in this order",
    }
    return f"{_values(kept)}{kinds.get(axis.kind, '')}: {source}"


def _values(values: Iterable[AxisValue]) -> str:
    return ", ".join(map(str, values)) or "none"


def _short(file: Path) -> str:
    return str(file.relative_to(REPOSITORY) if REPOSITORY in file.parents else file)


def _profile_name(profile: Profile) -> str:
    return _short(profile.file) if profile.file else f"profile {profile.name}"


# ---- how long it takes -----------------------------------------------------------------------------------------------


def estimate_seconds(variants: Iterable[Variant], record: Path = RECORD) -> dict[str, float]:
    """{kernel: seconds of work}, from what its variants took in recorded builds; one of no record has the mean."""
    seconds: collections.Counter[str] = collections.Counter()
    recorded: collections.Counter[str] = collections.Counter()
    for line in record.read_text().splitlines() if record.is_file() else []:
        entry = json.loads(line)
        if entry.get("stage") == "build.operator":
            seconds[entry["kernel"]] += entry["trace_seconds"] + entry["compile_seconds"]
            recorded[entry["kernel"]] += entry["variants"]
    mean = sum(seconds.values()) / sum(recorded.values()) if recorded else 0.0
    counts = collections.Counter(variant.kernel for variant in variants)
    return {
        kernel: count * (seconds[kernel] / recorded[kernel] if recorded[kernel] else mean)
        for kernel, count in counts.items()
    }
