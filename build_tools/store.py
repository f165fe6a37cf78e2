"""store: the folder where a build leaves its files, all of them for people to open.

    manifest.json                                                   written last: a store that has one is complete
    variants/<family>/<kernel>/<arch>/<variant id>/kernel.cu, launch.json
    units/<family>/<kernel>/<arch>/<number>/unit.cu, unit.cubin, ptxas.txt
    gen/                                                            C++ made by codegen and embed
    failed/<family>/<kernel>/<arch>/<variant id>/                   what the last build could not trace or compile

Files are written to a temporary name and renamed, and only where their content changes, so that CMake rebuilds what it
must. The first change takes the manifest away: a build that is killed half-way does not look finished.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import BuildError
from .units import TracedVariant, Unit

MANIFEST = "manifest.json"


def default_store_folder(profile: str) -> Path:
    """`build/store/<profile>` of this source tree."""
    return Path(__file__).resolve().parent.parent / "build" / "store" / profile


def variant_folder(kernel: str, arch: str, variant_id: str) -> str:
    return f"variants/{kernel.replace('.', '/')}/{arch}/{variant_id}"


def unit_folder(kernel: str, arch: str, number: int) -> str:
    return f"units/{kernel.replace('.', '/')}/{arch}/{number}"


def failed_folder(kernel: str, arch: str, variant_id: str) -> str:
    return f"failed/{kernel.replace('.', '/')}/{arch}/{variant_id}"


def to_json(content: Any) -> bytes:
    """The one way in which the build writes JSON: the same content gives the same bytes."""
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


class Store:
    """A store folder that this process writes. `changed` says whether any file was."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changed = False

    def write(self, name: str, content: bytes) -> None:
        """Write one file unless it already has this content."""
        path = self.folder / name
        if _read(path) == content:
            return
        if name != MANIFEST:
            self.invalidate()
        self.changed = True
        replace_file(path, content)

    def invalidate(self) -> None:
        """Take the manifest away, before the first change."""
        (self.folder / MANIFEST).unlink(missing_ok=True)

    def write_variant(self, variant: TracedVariant) -> None:
        folder = variant_folder(variant.kernel, variant.arch, variant.id)
        self.write(f"{folder}/kernel.cu", variant.source.encode())
        self.write(f"{folder}/launch.json", to_json(variant.launch))

    def write_unit(self, unit: Unit, cubin: bytes, ptxas: str) -> None:
        folder = unit_folder(unit.kernel, unit.arch, unit.number)
        self.write(f"{folder}/unit.cu", unit.source.encode())
        self.write(f"{folder}/ptxas.txt", ptxas.encode())
        self.write(f"{folder}/unit.cubin", cubin)

    def read_variants(self) -> list[TracedVariant]:
        """Every variant that was traced into this store."""
        found = []
        for launch_file in sorted((self.folder / "variants").glob("*/*/*/*/launch.json")):
            try:
                launch = json.loads(launch_file.read_text())
                found.append(TracedVariant((launch_file.parent / "kernel.cu").read_text(), launch))
            except (OSError, ValueError) as error:
                raise BuildError(
                    f"{launch_file.parent} cannot be read ({error}): run python -m build_tools trace"
                ) from None
        return found

    def remove_failed(self) -> None:
        shutil.rmtree(self.folder / "failed", ignore_errors=True)

    def prune(self, kind: str, keep: Iterable[str], depth: int = 4) -> None:
        """Remove folders of `kind` ("variants", "units") that this build did not make."""
        wanted = {self.folder / name for name in keep}
        for folder in sorted((self.folder / kind).glob("/".join("*" * depth))):
            if folder not in wanted:
                self.invalidate()
                self.changed = True
                shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
        for folder in sorted((self.folder / kind).glob("**/"), key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                folder.rmdir()  # goes only where nothing is left in it

    @contextlib.contextmanager
    def locked(self, say: Callable[[str], None]) -> Iterator[None]:
        """One build at a time writes a store. The lock ends with its process, so a killed build leaves none behind."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / ".lock").open("w")
        except OSError as error:
            raise BuildError(
                f"the store {self.folder} cannot be written ({error.strerror}): choose another by --store"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another build writes {self.folder}: waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def replace_file(path: Path, content: bytes) -> None:
    """Write to a temporary name in the same folder, then rename: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
