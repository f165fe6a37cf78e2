"""The files of a tilekernels package, installed or in a wheel, read without loading any of its code."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

__all__ = ["LIBRARY", "MANIFEST", "Package", "find_blobs", "find_damage", "open_installed", "open_wheel"]

MANIFEST = "tilekernels/manifest.json"
LIBRARY = "tilekernels/lib/libtilekernels.so.0"

_ELF_MAGIC = b"\x7fELF"
_CUDA_MACHINE = (190).to_bytes(2, "little")  # EM_CUDA, at byte 18 of the header


@dataclass(frozen=True)
class Package:
    """`recorded`: name -> sha256 in hex, as RECORD has it; None: no hash. `read` returns None for a missing file."""

    name: str
    recorded: Mapping[str, str | None]
    read: Callable[[str], bytes | None]

    def manifest(self) -> dict[str, Any]:
        content = self.read(MANIFEST)
        if content is None:
            raise click.ClickException(f"{self.name} holds no {MANIFEST}; is it a tilekernels wheel?")
        try:
            manifest = json.loads(content)
            if not all(isinstance(manifest[key], list) for key in ("kernels", "units", "variants", "archs")):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise click.ClickException(f"{self.name}: {MANIFEST} is damaged or of another version") from None
        return dict(manifest)


def open_wheel(path: Path) -> Package:
    """A wheel file."""
    try:
        archive = zipfile.ZipFile(path)
        names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        raise click.ClickException(f"{path} cannot be read as a wheel: {error}") from None
    records = [name for name in names if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
    if len(records) != 1:
        raise click.ClickException(f"{path} is no wheel: it must have one .dist-info/RECORD, got {len(records)}")

    def read(name: str) -> bytes | None:
        try:
            return archive.read(name)
        except (KeyError, zipfile.BadZipFile, zlib.error, EOFError):
            return None  # missing, or with a checksum of the archive that does not fit

    return Package(path.name, _parse_record(read(records[0]) or b""), read)


def open_installed() -> Package:
    """The package that this command belongs to."""
    try:
        distribution = importlib.metadata.distribution("tilekernels")
    except importlib.metadata.PackageNotFoundError:
        raise click.ClickException(
            "this copy of tilekernels was not installed from a wheel: nothing says what its files must be"
        ) from None
    root = Path(str(distribution.locate_file("")))

    def read(name: str) -> bytes | None:
        try:
            return (root / name).read_bytes()
        except OSError:
            return None

    record = distribution.read_text("RECORD") or ""
    return Package(f"tilekernels {distribution.version} in {root}", _parse_record(record.encode()), read)


def _parse_record(content: bytes) -> dict[str, str | None]:
    rows = csv.reader(io.StringIO(content.decode("utf-8", "replace")))
    recorded: dict[str, str | None] = {}
    for row in rows:
        if len(row) >= 2 and not row[0].endswith(".pyc"):
            algorithm, _, digest = row[1].partition("=")
            recorded[row[0]] = _to_hex(digest) if algorithm == "sha256" else None
    return recorded


def _to_hex(digest: str) -> str:
    return base64.urlsafe_b64decode(digest + "=" * (-len(digest) % 4)).hex()


def find_damage(package: Package) -> list[str]:
    """A sentence for each file that is missing or does not have its recorded hash."""
    found = []
    for name, wanted in package.recorded.items():
        if wanted is None:
            continue
        content = package.read(name)
        if content is None:
            found.append(f"{name} is missing or cannot be read")
        elif hashlib.sha256(content).hexdigest() != wanted:
            found.append(f"{name} is not what was installed: its sha256 differs from the recorded one")
    return found


def find_blobs(library: bytes, units: Sequence[Mapping[str, Any]]) -> list[str]:
    """Ids of units whose machine code is not in the library, byte for byte as the manifest says.

    Cubins are ELF files of their own within the library, in the order of the manifest."""
    starts = []
    at = library.find(_ELF_MAGIC, 1)
    while at >= 0:
        if library[at + 18 : at + 20] == _CUDA_MACHINE:
            starts.append(at)
        at = library.find(_ELF_MAGIC, at + 1)
    missing = []
    for unit in units:
        found = next((start for start in starts if _is_unit(library, start, unit)), None)
        if found is None:
            missing.append(str(unit["id"]))
        else:
            starts.remove(found)
    return missing


def _is_unit(library: bytes, start: int, unit: Mapping[str, Any]) -> bool:
    digest: str = unit["sha256"]
    return hashlib.sha256(library[start : start + unit["bytes"]]).hexdigest() == digest
