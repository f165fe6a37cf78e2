"""`tilekernels list`: the kernels of this build, their axes, and the GPU architectures that each was compiled for."""

import collections
import json
from collections.abc import Mapping
from typing import Any

import click

from .._manifest import Manifest, caller_axes, load_manifest
from ._tables import make_console, make_table

__all__ = ["list_command", "summarize"]


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def list_command(as_json: bool) -> None:
    """Show the kernels that this install holds."""
    summary = summarize(load_manifest())
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        _print_table(summary)


def summarize(manifest: Manifest) -> dict[str, Any]:
    """What `list --json` prints: archs with the GPU they ran on (null: compiled, not run), and kernels with their
    parameters, axes and number of variants per arch."""
    counts = collections.Counter((variant["kernel"], variant["arch"]) for variant in manifest["variants"])
    validated_on, not_run = manifest["validated_on"], manifest.get("not_run", {})
    return {
        "version": manifest["version"],
        "profile": manifest["profile"],
        "build": {name: manifest["build"].get(name) for name in ("tilelang", "nvcc")},
        "archs": [
            {"name": arch, "validated_on": validated_on.get(arch), "not_run": not_run.get(arch, [])}
            for arch in manifest["archs"]
        ],
        "kernels": [
            {
                "name": kernel["name"],
                "doc": kernel["doc"],
                "params": [param["name"] for param in kernel["params"]],
                "axes": {axis["name"]: axis["values"] for axis in caller_axes(kernel)},
                "variants": {
                    arch: counts[kernel["name"], arch] for arch in manifest["archs"] if counts[kernel["name"], arch]
                },
            }
            for kernel in manifest["kernels"]
        ],
    }


def _print_table(summary: Mapping[str, Any]) -> None:
    console = make_console()
    table = make_table("kernel", "axes", "variants")
    for kernel in summary["kernels"]:
        axes = "  ".join(f"{name}={'|'.join(map(str, values))}" for name, values in kernel["axes"].items())
        variants = "  ".join(f"{arch}: {count}" for arch, count in kernel["variants"].items())
        table.add_row(kernel["name"], axes, variants)
    console.print(table)
    for arch in summary["archs"]:
        state = f"ran on {arch['validated_on']}" if arch["validated_on"] else "compiled, not run"
        if arch["validated_on"] and arch["not_run"]:
            state += f"; compiled, not run: {', '.join(arch['not_run'])}"
        console.print(f"{arch['name']}: {state}")
    build = summary["build"]
    num_variants = sum(sum(kernel["variants"].values()) for kernel in summary["kernels"])
    console.print(
        f"{len(summary['kernels'])} kernels, {num_variants} variants; version {summary['version']}, profile "
        f"{summary['profile']}, compiled with TileLang {build['tilelang']} and nvcc {build['nvcc']}"
    )
