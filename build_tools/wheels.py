"""Wheels for release: every Python found here, x86-64 and aarch64, all manylinux_2_28 (`make wheels`).

    python -m build_tools.wheels --profile default --archs sm_90a --dist dist

The kernels are built once; each wheel takes the finished store. No container is needed: zig is the compiler
(packing.py). Each wheel is looked at by auditwheel and twine, and its extension is loaded by its own Python; of one for
another processor the ELF headers are looked at. Ends with SHA256SUMS of the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from .archive import ArchiveError
from .errors import BuildError
from .packing import (
    GLIBC,
    MACHINES,
    Interpreter,
    Target,
    backend_environment,
    find_pythons,
    pack,
    prepare_python,
    run_tool,
    zig_version,
)
from .wheel import build_kernels, ensure_nvcc, file_digest, input_digest
from .wheel_label import ROOT

SUMS = "SHA256SUMS"

# Run by the wheel's own Python with the unpacked wheel as its only argument. Needs neither torch nor a GPU.
LOAD = """
import sys
sys.path.insert(0, sys.argv[1])
from tilekernels import _C
python, kernels, archs = sys.version.split()[0], len(_C.kernels()), ", ".join(_C.archs())
print(f"_C {_C.version()} loads in Python {python}: {kernels} kernels for {archs}")
"""


@dataclasses.dataclass(frozen=True)
class Made:
    """One wheel and what the checks said of it."""

    wheel: Path
    verdicts: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="default", help="profiles/<name>.toml, or a path")
    parser.add_argument("--archs", default="sm_90a", help="comma-separated GPU architectures")
    parser.add_argument("--store", type=Path, help="a finished kernel store instead: no kernel is built")
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="folder for the wheels")
    parser.add_argument("--machines", default=",".join(MACHINES), help="processors")
    parser.add_argument("--pythons", default="", help="comma-separated interpreters instead of those found")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    try:
        store = arguments.store or make_store(arguments.profile, arguments.archs)
        machines = check_machines(arguments.machines.split(","))
        pythons = [Path(name) for name in arguments.pythons.split(",") if name] or find_pythons()
        for made in make_wheels(store.resolve(), arguments.dist, pythons, machines):
            print(f"{made.wheel.name} ({made.wheel.stat().st_size / 1e6:.2f} MB)", flush=True)
            print("".join(f"    {line}\n" for line in made.verdicts), end="", flush=True)
        print(f"{write_sums(arguments.dist)} lists the files of {arguments.dist}")
    except (BuildError, ArchiveError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: ended with {error.returncode}: {' '.join(map(str, error.cmd))}")


def make_store(profile: str, archs: str) -> Path:
    ensure_nvcc()
    return build_kernels(profile, archs)


def check_machines(names: Iterable[str]) -> list[str]:
    machines = list(names)
    for name in machines:
        if name not in MACHINES:
            raise BuildError(f"unknown processor {name!r}; allowed: {', '.join(MACHINES)}")
    return machines


def make_wheels(store: Path, dist: Path, pythons: Iterable[Path], machines: Iterable[str]) -> Iterable[Made]:
    """The wheels of all Pythons and processors, each packed where anything changed, then looked at."""
    for executable in pythons:
        python = prepare_python(executable)
        for machine in machines:
            target = Target(machine)
            wheel = up_to_date(store, dist, python, target) or pack_and_record(store, dist, python, target)
            yield Made(wheel, tuple(examine(wheel, python, target)))


def _record_file(store: Path, python: Interpreter, target: Target) -> Path:
    return ROOT / "build" / "wheels" / f"{store.name}-{python.tag}-{target.name}.json"


def _digest(store: Path, python: Interpreter, target: Target) -> str:
    return json.dumps([input_digest(store), str(python.executable), python.suffix, target.name, zig_version()])


def up_to_date(store: Path, dist: Path, python: Interpreter, target: Target) -> Path | None:
    """The wheel in `dist` if nothing that decides it has changed."""
    file = _record_file(store, python, target)
    record = json.loads(file.read_text()) if file.is_file() else {}
    wheel = dist / record.get("wheel", "missing")
    same = record.get("inputs") == _digest(store, python, target) and wheel.is_file()
    return wheel if same and file_digest(wheel) == record["sha256"] else None


def pack_and_record(store: Path, dist: Path, python: Interpreter, target: Target) -> Path:
    wheel = pack(store, dist, python, target)
    file = _record_file(store, python, target)
    file.parent.mkdir(parents=True, exist_ok=True)
    record = {"inputs": _digest(store, python, target), "wheel": wheel.name, "sha256": file_digest(wheel)}
    file.write_text(json.dumps(record, indent=2))
    return wheel


# ---- what the checks say ---------------------------------------------------------------------------------------------


def examine(wheel: Path, python: Interpreter, target: Target) -> Iterable[str]:
    """One sentence of each check; BuildError where one fails."""
    tools = backend_environment(Path(sys.executable).parent)
    shown = run_tool("auditwheel", [sys.executable, "-m", "auditwheel", "show", str(wheel)], tools)
    found = re.search(r'platform tag:\s+"manylinux_2_(\d+)_(\w+)"', " ".join(shown.split()))
    if found is None or found[2] != target.machine or int(found[1]) > int(GLIBC.split(".")[1]):
        raise BuildError(f"auditwheel does not find {wheel.name} consistent with {target.name}:\n{shown}")
    yield f"auditwheel: consistent with manylinux_2_{found[1]}_{found[2]}, tagged {target.name}"
    checked = run_tool("twine", [sys.executable, "-m", "twine", "--no-color", "check", "--strict", str(wheel)], tools)
    yield f"twine: {checked.split(': ')[-1].strip()}"
    with tempfile.TemporaryDirectory(prefix="tilekernels-load-") as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        yield load(Path(folder), python, target)


def load(unpacked: Path, python: Interpreter, target: Target) -> str:
    """Load the extension by its Python; of another processor look at the files."""
    if not target.is_cross:
        return run_tool("loading", [str(python.executable), "-I", "-c", LOAD, str(unpacked)], os.environ).strip()
    (extension,) = unpacked.glob("tilekernels/_C.*.so")
    if f"-{target.machine}-" not in extension.name:
        raise BuildError(f"{extension.name} is not named for {target.machine}")
    for file in (extension, unpacked / "tilekernels" / "lib" / "libtilekernels.so.0"):
        check_elf(file, str(target.machine))
    return f"_C and the library are ELF files of {target.machine}, not loaded on this {platform.machine()}"


ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def check_elf(file: Path, machine: str) -> None:
    """e_machine of the ELF header, at byte 18."""
    head = file.read_bytes()[:20]
    found = int.from_bytes(head[18:20], "little")
    if head[:4] != b"\x7fELF" or found != ELF_MACHINES[machine]:
        raise BuildError(f"{file.name} must be an ELF file of {machine}, got machine number {found}")


def write_sums(dist: Path) -> Path:
    """SHA256SUMS of the packages in a folder, as `sha256sum --check` reads it."""
    files = sorted(file for file in dist.iterdir() if file.suffix in (".whl", ".gz"))
    sums = dist / SUMS
    sums.write_text("".join(f"{file_digest(file)}  {file.name}\n" for file in files))
    return sums


if __name__ == "__main__":
    main()
