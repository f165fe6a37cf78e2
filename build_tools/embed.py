"""embed: the compiled cubins as one table of the library.

    python -m build_tools.embed build/store/default      reads manifest.json and units/, writes gen/

`blobs.S` has one `.incbin` a unit, `blobs.cpp` the table `tk::kBlobs`. Paths in `blobs.S` are relative to the store,
which the build passes as an include folder, so that the same kernels give the same bytes wherever the store lies; the
sha256 beside each path makes the file change when its cubin does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import EmbedError
from .files import write_if_changed

Unit = Mapping[str, Any]


def embed(manifest: Mapping[str, Any], store: Path, out: Path) -> None:
    """Write `blobs.S` and `blobs.cpp` for the units of `manifest`, whose files lie under `store`, into `out`."""
    units: Sequence[Unit] = manifest["units"]
    for unit in units:
        _check_file(unit, store)
    out.mkdir(parents=True, exist_ok=True)
    write_if_changed(out / "blobs.S", _assembly(units))
    write_if_changed(out / "blobs.cpp", _table(units))


def _check_file(unit: Unit, store: Path) -> None:
    file = store / unit["file"]
    if not file.is_file():
        raise EmbedError(f"embed: {unit['id']}: {file} is missing; build the store again")
    content = file.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if len(content) != unit["bytes"] or digest != unit["sha256"]:
        raise EmbedError(
            f"embed: {unit['id']}: {file} must have {unit['bytes']} bytes and sha256 {unit['sha256']}, "
            f"as the manifest says, got {len(content)} bytes and {digest}; build the store again"
        )


def _assembly(units: Sequence[Unit]) -> str:
    lines = [
        "/* The cubins of this library, from manifest.json; made by build_tools/embed.py, do not edit. */",
        "    .section .rodata",
    ]
    for index, unit in enumerate(units):
        symbol = f"tk_blob_{index}"
        lines += [
            "",
            f"/* {unit['id']}: sha256 {unit['sha256']} */",
            "    .balign 16",
            f"    .globl {symbol}",
            f"    .hidden {symbol}",
            f"    .type {symbol}, @object",
            f"{symbol}:",
            f'    .incbin "{unit["file"]}"',
            f"    .size {symbol}, {unit['bytes']}",
        ]
    # without this note the linker makes the stack of the whole process executable
    lines += ["", '    .section .note.GNU-stack, "", @progbits']
    return "\n".join(lines) + "\n"


def _table(units: Sequence[Unit]) -> str:
    declarations = [f"extern const unsigned char tk_blob_{index}[];" for index in range(len(units))]
    rows = [
        f'    {{"{unit["id"]}", "{unit["arch"]}", tk_blob_{index}, {unit["bytes"]}}},'
        for index, unit in enumerate(units)
    ] or ["    {nullptr, nullptr, nullptr, 0},  // C++ knows no empty array; kNumBlobs is 0"]
    lines = [
        "// The cubins of this library, from manifest.json; made by build_tools/embed.py, do not edit.",
        '#include "registry.h"',
        "",
        'extern "C" {',
        *declarations,
        "}",
        "",
        "namespace tk {",
        "",
        "extern const Blob kBlobs[] = {",
        *rows,
        "};",
        f"extern const int32_t kNumBlobs = {len(units)};",
        "",
        "}  // namespace tk",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write blobs.S and blobs.cpp of a store from its manifest.json.")
    parser.add_argument("store", type=Path)
    store = parser.parse_args().store
    embed(json.loads((store / "manifest.json").read_text()), store, store / "gen")


if __name__ == "__main__":
    main()
