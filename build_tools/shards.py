"""shards: one build spread over several jobs without a connection between them.

    python -m build_tools build --profile default --shard 1/3 --store build/shard1        on three machines
    python -m build_tools merge build/shard1 build/shard2 build/shard3 --profile default  on one

A shard traces and compiles its part and leaves what it made as cache entries in its store, beside shard.json. `merge`
puts the entries into the cache and builds: the store is the same, byte for byte, as that of a build in one piece.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .cache import Cache
from .errors import BuildError
from .plan import Variant
from .store import replace_file, to_json
from .units import MAX_VARIANTS

SHARD_FILE = "shard.json"
ENTRIES = "entries"  # the folder of cache entries in a shard's store
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Shard:
    """The `number`-th of `total` parts, from 1."""

    number: int
    total: int

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"


def parse_shard(text: str) -> Shard:
    found = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise BuildError(f"--shard must be i/n with 1 <= i <= n, such as 2/3, got {text!r}")
    return Shard(int(found[1]), int(found[2]))


def variants_of_shard(variants: Sequence[Variant], shard: Shard) -> list[Variant]:
    """The variants of every `total`-th compile unit: a unit is never cut, and each shard gets some of each kernel."""
    groups: dict[tuple[str, str], list[Variant]] = collections.defaultdict(list)
    for variant in sorted(variants, key=lambda variant: (variant.kernel, variant.arch, variant.id)):
        groups[variant.kernel, variant.arch].append(variant)
    pieces = [
        members[start : start + MAX_VARIANTS]
        for _, members in sorted(groups.items())
        for start in range(0, len(members), MAX_VARIANTS)
    ]
    chosen = {variant for piece in pieces[shard.number - 1 :: shard.total] for variant in piece}
    return [variant for variant in variants if variant in chosen]


def digest_of_plan(keys: Iterable[str]) -> str:
    """One hash of the trace keys of a whole plan: profile, sources and TileLang."""
    return hashlib.sha256("\n".join(sorted(keys)).encode()).hexdigest()


def write_shard(folder: Path, shard: Shard, plan_digest: str, compiler: Sequence[str], entries: dict[str, Any]) -> None:
    """Leave what a shard made: `entries` maps "trace" and "compile" to {key: files}."""
    for kind, made in entries.items():
        cache = Cache(folder / ENTRIES, kind)
        for key, files in made.items():
            cache.put(key, files)
        if cache.write_problem:
            raise BuildError(f"the shard cannot be written ({cache.write_problem})")
    content = {
        "schema": SCHEMA,
        "shard": shard.number,
        "total": shard.total,
        "plan": plan_digest,
        "compiler": list(compiler),
        "entries": {kind: sorted(made) for kind, made in entries.items()},
    }
    replace_file(folder / SHARD_FILE, to_json(content))


def import_shards(folders: Sequence[Path], cache_folder: Path, plan_digest: str, compiler: Sequence[str]) -> None:
    """Check that the folders are all shards of this very build, and put their entries into the cache."""
    found: dict[int, Path] = {}
    total = 0
    for folder in folders:
        content = _read_shard(folder)
        if content["plan"] != plan_digest:
            raise BuildError(
                f"{folder} is a shard of another build (profile, archs, kernel sources or TileLang differ): "
                "make all shards and the merge from one tree, with the same options"
            )
        if content["compiler"] != list(compiler):
            raise BuildError(f"{folder} was compiled by {content['compiler']}, this machine has {list(compiler)}")
        if total not in (0, content["total"]):
            raise BuildError(f"{folder} is one of {content['total']} shards, {found.popitem()[1]} one of {total}")
        total = content["total"]
        found[content["shard"]] = folder
    missing = [f"{number}/{total}" for number in range(1, total + 1) if number not in found]
    if missing:
        raise BuildError(f"shards are missing: {', '.join(missing)}; build them by --shard, then merge all folders")
    for folder in found.values():
        _import(folder, _read_shard(folder), cache_folder)


def _import(folder: Path, content: dict[str, Any], cache_folder: Path) -> None:
    for kind, keys in content["entries"].items():
        source, target = Cache(folder / ENTRIES, kind), Cache(cache_folder, kind)
        for key in keys:
            files = source.get(key)  # checked against its hash
            if files is None:
                raise BuildError(f"{folder} is damaged: its {kind} entry {key} is missing or not what was written")
            target.put(key, files)
        if target.write_problem:
            raise BuildError(f"the cache cannot be written ({target.write_problem}): name another by TILEKERNELS_CACHE")


def _read_shard(folder: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((folder / SHARD_FILE).read_text())
        if content["schema"] != SCHEMA:
            raise BuildError(f"{folder} was made by another version of build_tools (schema {content['schema']})")
        if not isinstance(content["total"], int) or not {"trace", "compile"} <= content["entries"].keys():
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise BuildError(f"{folder} holds no finished shard ({SHARD_FILE}): build it by --shard i/n --store") from None
    return content
