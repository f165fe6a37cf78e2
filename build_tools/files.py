"""Writing generated files: only where the content changes, so that nothing that depends on them is built in vain."""

from __future__ import annotations

from pathlib import Path

from .store import replace_file


def write_if_changed(path: Path, text: str) -> None:
    """Write `text` to `path` unless the file already holds it."""
    content = text.encode()
    if not path.is_file() or path.read_bytes() != content:
        replace_file(path, content)


def remove_stale(folder: Path, marker: str, keep: set[str]) -> None:
    """Remove what an earlier build left: files whose first line has `marker` and whose name is not in `keep`."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in keep and marker in path.read_text(errors="replace").split("\n", 1)[0]:
            path.unlink()
