"""codegen: everything that the library and its users read of the kernels, made from the manifest alone.

    python -m build_tools.codegen build/store/default      reads manifest.json of a store and writes its folder gen/

One `<family>_<kernel>.cpp` a kernel and `registry.cpp` (the tables of csrc/src/registry.h), `ops.h` (the typed C
entries), `_C.pyi` (the stub of the Python module), `operators.md` (a table for people). The texts are in templates/;
what is worked out for them is in codegen_model.py (names), codegen_bind.py (checks), codegen_launch.py (launches),
codegen_workspace.py (scratch), codegen_tables.py (initialisers) and codegen_docs.py (header, stub and table).
The same manifest gives the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jinja2

from . import codegen_docs, codegen_tables, codegen_text, codegen_workspace
from .codegen_bind import Binding
from .codegen_launch import launch_body, tensor_map_desc
from .codegen_model import Kernel, Variant, read_kernels
from .codegen_workspace import Workspace, workspaces
from .files import remove_stale, write_if_changed

T = TypeVar("T")

_MARKER = "made by build_tools/codegen.py"


def generate(manifest: Mapping[str, Any], out: Path) -> None:
    """Write the files of `manifest` into the folder `out`; files of kernels that are gone are removed."""
    out.mkdir(parents=True, exist_ok=True)
    files = render(manifest)
    for name, text in files.items():
        write_if_changed(out / name, text)
    remove_stale(out, _MARKER, set(files))


def render(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Name and text of each generated file."""
    kernels = read_kernels(manifest)
    environment = _environment()
    archs = list(manifest["archs"])
    files = {
        f"{kernel.identifier}.cpp": environment.get_template("kernel.cpp.jinja").render(
            marker=_MARKER, kernel=kernel, functions=_functions(kernel, archs)
        )
        for kernel in kernels
    }
    common: dict[str, Any] = {"marker": _MARKER, "kernels": kernels, "archs": archs, "manifest": manifest}
    # cubins of one CUDA major version load on every driver of that version
    cuda_version = int(manifest["build"]["nvcc"].split(".")[0]) * 1000
    files["registry.cpp"] = environment.get_template("registry.cpp.jinja").render(**common, cuda_version=cuda_version)
    files["ops.h"] = environment.get_template("ops.h.jinja").render(**common)
    files["_C.pyi"] = environment.get_template("_C.pyi.jinja").render(**common)
    files["operators.md"] = environment.get_template("operators.md.jinja").render(**common)
    return files


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals.update(
        tables=codegen_tables, docs=codegen_docs, workspace_params=codegen_workspace.workspace_params
    )
    environment.filters.update(quoted=codegen_text.quoted, describe_axis=codegen_docs.describe_axis)
    return environment


# ---- the functions and tables of one kernel ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Key:
    first: int
    num: int
    signature: int


@dataclasses.dataclass(frozen=True)
class _Row:
    """A variant in the table of its kernel, with the numbers of its functions; guard -1: none."""

    variant: Variant
    arch: int
    guard: int
    launch: int


@dataclasses.dataclass
class _Functions:
    """What the variants of a kernel share: equal texts are one function."""

    binds: dict[str, int] = dataclasses.field(default_factory=dict)
    signatures: dict[tuple[int, tuple[Workspace, ...]], int] = dataclasses.field(default_factory=dict)
    guards: dict[str, int] = dataclasses.field(default_factory=dict)
    launches: dict[str, int] = dataclasses.field(default_factory=dict)
    maps: dict[str, int] = dataclasses.field(default_factory=dict)
    keys: list[_Key] = dataclasses.field(default_factory=list)
    rows: list[_Row] = dataclasses.field(default_factory=list)


def _functions(kernel: Kernel, archs: list[str]) -> _Functions:
    functions = _Functions()
    for key in range(kernel.num_keys):
        variants = sorted(kernel.of_key(key), key=lambda variant: (archs.index(variant.arch), variant.form))
        if not variants:
            functions.keys.append(_Key(0, 0, 0))
            continue
        binding = Binding(kernel, key)
        signature = _number(functions.binds, binding.bind_body()), tuple(workspaces(binding))
        functions.keys.append(_Key(len(functions.rows), len(variants), _number(functions.signatures, signature)))
        for variant in variants:
            guard = binding.guard_body(variant)
            maps = [f"kMap{_number(functions.maps, tensor_map_desc(tma))}" for tma in variant.tma]
            functions.rows.append(
                _Row(
                    variant=variant,
                    arch=archs.index(variant.arch),
                    guard=_number(functions.guards, guard) if guard else -1,
                    launch=_number(functions.launches, launch_body(kernel, variant, maps)),
                )
            )
    return functions


def _number(found: dict[T, int], item: T) -> int:
    """The number of `item` among the different items so far."""
    return found.setdefault(item, len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the folder gen/ of a store from its manifest.json.")
    parser.add_argument("store", type=Path)
    store = parser.parse_args().store
    generate(json.loads((store / "manifest.json").read_text()), store / "gen")


if __name__ == "__main__":
    main()
