"""generate: runs codegen, embed and sbom for a manifest, or nothing where gen/ of the store already is what they write.

A stamp beside the generated files names the manifest and the generators they come from, and the files' hashes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import BuildError
from .store import Store, replace_file, to_json

STAMP = ".made-from.json"


def generate_sources(manifest: Mapping[str, Any], store: Store) -> None:
    """Make gen/ what codegen, embed and sbom write for this manifest."""
    out = store.folder / "gen"
    key = _key(manifest)
    if _is_current(out, key):
        return
    from .codegen import generate  # templates and their library are loaded only when there is something to generate
    from .embed import EmbedError, embed
    from .sbom import SBOM_NAME, make_sbom

    store.invalidate()
    out.mkdir(parents=True, exist_ok=True)
    (out / STAMP).unlink(missing_ok=True)
    generate(manifest, out)
    try:
        embed(manifest, store.folder, out)
    except EmbedError as error:
        raise BuildError(str(error)) from error
    replace_file(out / SBOM_NAME, make_sbom(manifest))
    store.write(f"gen/{STAMP}", to_json({"key": key, "files": _hashes(out)}))


def _key(manifest: Mapping[str, Any]) -> str:
    """The manifest, the date of the SBOM and the generators: all of build_tools, which is simpler than knowing who
    imports whom."""
    digest = hashlib.sha256(to_json(manifest))
    digest.update(os.environ.get("SOURCE_DATE_EPOCH", "").encode())
    for name, content_hash in _hashes(Path(__file__).resolve().parent).items():
        digest.update(f"{name} {content_hash}\n".encode())
    return digest.hexdigest()


def _is_current(out: Path, key: str) -> bool:
    try:
        stamp = json.loads((out / STAMP).read_text())
        return bool(stamp["key"] == key and stamp["files"] == _hashes(out))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.name != STAMP
    }
