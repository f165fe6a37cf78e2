"""`tilekernels diff`: what differs between two wheels, in the words of their manifests."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from ._package import LIBRARY, MANIFEST, Package, open_wheel

__all__ = ["compare", "diff_command"]

_SHOWN = 20  # lines of one kind
_FACTS = ("registers", "spill_bytes", "smem", "smem_static", "grid", "block", "cluster", "cooperative", "pdl", "args")


@click.command("diff")
@click.argument("first", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="A.whl")
@click.argument("second", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="B.whl")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def diff_command(first: Path, second: Path, as_json: bool) -> None:
    """Say what differs between two wheels: build, kernels, variants, files. Exit status 1 if anything does."""
    differences = compare(open_wheel(first), open_wheel(second))
    if as_json:
        click.echo(json.dumps(differences, indent=2))
    else:
        _print(differences)
    if any(differences.values()):
        raise click.exceptions.Exit(1)


def compare(first: Package, second: Package) -> dict[str, list[str]]:
    """Sentences by kind; all lists are empty where both wheels hold the same bytes."""
    before, after = first.manifest(), second.manifest()
    return {
        "build": _changes(_facts_of_build(before), _facts_of_build(after)),
        "kernels": _sets(_names(before["kernels"]), _names(after["kernels"])) + _parameters(before, after),
        "variants": _sets(_variants(before), _variants(after)),
        "machine code": _machine_code(before, after),
        "files": _files(first, second),
    }


def _print(differences: Mapping[str, list[str]]) -> None:
    for kind, lines in differences.items():
        if not lines:
            continue
        click.echo(f"{kind}:")
        for line in lines[:_SHOWN]:
            click.echo(f"  {line}")
        if len(lines) > _SHOWN:
            click.echo(f"  and {len(lines) - _SHOWN} more; --json shows all")
    if not any(differences.values()):
        click.echo("the same files, byte for byte")


def _facts_of_build(manifest: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("schema", "version", "profile", "archs", "validated_on")
    return {key: manifest.get(key) for key in keys} | dict(manifest.get("build", {}))


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*before, *after])
    return [
        f"{name}: {_show(before.get(name))} -> {_show(after.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def _sets(before: Iterable[str], after: Iterable[str]) -> list[str]:
    old, new = set(before), set(after)
    return [f"- {name}" for name in sorted(old - new)] + [f"+ {name}" for name in sorted(new - old)]


def _names(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(entry["name"]) for entry in entries]


def _variants(manifest: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {f"{each['kernel']}/{each['variant']} {each['arch']}": each for each in manifest["variants"]}


def _parameters(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    old, new = ({kernel["name"]: kernel for kernel in each["kernels"]} for each in (before, after))
    return [
        f"{name}: parameters {_show(_names(old[name]['params']))} -> {_show(_names(new[name]['params']))}"
        for name in sorted(old.keys() & new.keys())
        if old[name]["params"] != new[name]["params"]
    ]


def _machine_code(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Variants that both hold, compiled to other code or launched in another way."""
    hashes = [{unit["id"]: unit["sha256"] for unit in each["units"]} for each in (before, after)]
    old, new = _variants(before), _variants(after)
    lines = []
    for name in sorted(old.keys() & new.keys()):
        first, second = _facts_of_variant(old[name]), _facts_of_variant(new[name])
        if first != second:
            lines.append(f"{name}: {'; '.join(_changes(first, second))}")
        elif hashes[0][old[name]["unit"]] != hashes[1][new[name]["unit"]]:
            lines.append(f"{name}: its unit has other bytes")
    return lines


def _facts_of_variant(variant: Mapping[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"guards": variant["guards"], "flags": variant.get("flags")}
    for index, launch in enumerate(variant["launches"]):
        mark = f" of launch {index}" if len(variant["launches"]) > 1 else ""
        facts |= {f"{fact}{mark}": launch.get(fact) for fact in _FACTS}
    return facts


def _files(first: Package, second: Package) -> list[str]:
    """Files other than those that the lines above speak of."""
    old, new = ({_common(name): digest for name, digest in each.recorded.items()} for each in (first, second))
    changed = [name for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]
    sizes = {name: _sizes(name, first, second) for name in (LIBRARY, MANIFEST) if name in changed}
    return _sets(old, new) + [f"~ {name}{sizes.get(name, '')}" for name in changed]


def _common(name: str) -> str:
    """Without the version, which differs whenever anything does."""
    folder, slash, rest = name.partition("/")
    return f"tilekernels.dist-info/{rest}" if slash and folder.endswith(".dist-info") else name


def _sizes(name: str, first: Package, second: Package) -> str:
    before, after = (len(each.read(name) or b"") for each in (first, second))
    return f" ({before:,} -> {after:,} bytes)"


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
