"""cache: what was traced and compiled before, kept by the hash of everything that decides its content.

One file an entry: a line of JSON (names, sizes, sha256), then the bytes. Entries are written to a temporary name and
renamed, so several builders and a killed one do no harm: a reader sees a whole entry or none. Each read is checked
against the hash; a damaged entry counts as missing. A cache that cannot be written still serves what it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
ABANDONED_AFTER = 24 * 3600  # seconds; a temporary file this old belongs to a builder that was killed


def default_cache_folder() -> Path:
    """`$TILEKERNELS_CACHE`, else `build/cache` of this source tree."""
    named = os.environ.get("TILEKERNELS_CACHE")
    return Path(named).expanduser() if named else Path(__file__).resolve().parent.parent / "build" / "cache"


def make_key(content: Mapping[str, Any]) -> str:
    """The hash of JSON-like content; hold no path, clock or name of a machine in it."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """Entries of one kind ("trace", "compile") below `folder`. Each is a mapping of file name to bytes."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder / f"{kind}-{FORMAT}"
        self.write_problem: str | None = None  # why entries were not stored; the build says it once

    def get(self, key: str) -> dict[str, bytes] | None:
        """The entry, or None where it is missing or damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        files = _unpack(content)
        if files is None:
            with contextlib.suppress(OSError):
                path.unlink()
        return files

    def put(self, key: str, files: Mapping[str, bytes]) -> None:
        """Store the entry if the folder can be written; the first reason why not is kept in `write_problem`."""
        path = self._path(key)
        temporary: str | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(_pack(files))
            os.chmod(temporary, 0o644)  # mkstemp gives 0600, which a shared cache cannot use
            os.replace(temporary, path)
        except OSError as problem:
            self.write_problem = self.write_problem or f"{self.folder}: {problem.strerror or problem}"
            if temporary is not None:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def remove_abandoned(self) -> None:
        """Delete temporary files of builders that were killed long ago."""
        limit = time.time() - ABANDONED_AFTER
        with contextlib.suppress(OSError):
            for file in self.folder.glob("*/.tmp-*"):
                with contextlib.suppress(OSError):
                    if file.stat().st_mtime < limit:
                        file.unlink()

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / key[2:]


def _pack(files: Mapping[str, bytes]) -> bytes:
    listed = [(name, len(files[name])) for name in sorted(files)]
    body = b"".join(files[name] for name, _ in listed)
    head = {"files": listed, "sha256": _digest(listed, body)}
    return json.dumps(head).encode() + b"\n" + body


def _unpack(content: bytes) -> dict[str, bytes] | None:
    line, newline, body = content.partition(b"\n")
    try:
        head = json.loads(line)
        listed = [(str(name), int(size)) for name, size in head["files"]]
        if not newline or head["sha256"] != _digest(listed, body):
            return None
    except (ValueError, KeyError, TypeError):
        return None
    files: dict[str, bytes] = {}
    start = 0
    for name, size in listed:
        files[name] = body[start : start + size]
        start += size
    return files


def _digest(listed: Sequence[tuple[str, int]], body: bytes) -> str:
    return hashlib.sha256(json.dumps(listed).encode() + b"\n" + body).hexdigest()
