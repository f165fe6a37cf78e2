"""From a declared matrix to a wheel: builds the kernels, packs them, and tries the wheel (`make wheel`, `make test`).

    python -m build_tools.wheel --profile default --archs sm_90a --check build/check-venv

Runs in the build environment (build_tools/environment.py). Each step is skipped when nothing that it reads has changed,
known by content, not by time: kernels by the kernel cache, the wheel by a digest of the store and of the run-time
sources, the check by the wheel.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .check_wheel import check_wheel
from .environment import EnvironmentFailed, install
from .errors import BuildError
from .packing import Interpreter, backend_environment, pack
from .store import default_store_folder
from .toolchain import find_toolchain
from .wheel_label import ROOT, label_of_store, project_version

# What is packed, beside the kernel store. A folder stands for all files in it.
PACKED = (
    "CMakeLists.txt", "cmake", "csrc", "python", "pyproject.toml", "requirements-wheel.txt",
    "build_tools/packing.py", "build_tools/archive.py", "build_tools/sbom.py", "build_tools/wheel_label.py",
    "README.md", "LICENSE", "NOTICE", "licenses",
)  # fmt: skip
# Variables that decide bytes of the wheel.
ASKED = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "CMAKE_ARGS", "SOURCE_DATE_EPOCH")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="default", help="profiles/<name>.toml")
    parser.add_argument("--archs", default="sm_90a", help="comma-separated GPU architectures")
    parser.add_argument("--dist", type=Path, default=Path("dist"), help="folder for the wheel")
    parser.add_argument("--check", type=Path, help="install the wheel into this fresh environment and try it")
    parser.add_argument("--install", action="store_true", help="install the wheel into the environment that runs this")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    try:
        ensure_nvcc()
        store = build_kernels(arguments.profile, arguments.archs)
        wheel, changed = build_wheel(store, arguments.dist)
        if arguments.install:
            changed |= install_wheel(wheel)
        if arguments.check:
            changed |= check_wheel(wheel, arguments.check)
    except (BuildError, EnvironmentFailed, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: ended with {error.returncode}: {' '.join(map(str, error.cmd))}")
    size = wheel.stat().st_size / 1e6
    print(f"wheel: {wheel} ({size:.1f} MB)" + ("" if changed else ": nothing to be done, everything is up to date"))


def ensure_nvcc() -> None:
    """Find the nvcc of CUDA 13; where there is none, install its PyPI wheels into this environment."""
    if os.environ.get("CUDACXX"):
        return  # a wish: if it will not do, the build says so
    try:
        find_toolchain()
    except BuildError:
        install(Path(sys.prefix), ["-r", "build_tools/requirements-nvcc.txt"])


def build_kernels(profile: str, archs: str) -> Path:
    """Run `python -m build_tools build`, which does what the kernel cache does not hold, and return the store."""
    command = [sys.executable, "-m", "build_tools", "build", "--profile", profile, "--archs", archs]
    subprocess.run(command, check=True)
    return default_store_folder(Path(profile).stem).resolve()


def build_wheel(store: Path, dist: Path) -> tuple[Path, bool]:
    """Pack the store into a wheel in `dist`; return its path, and False where the one there is still right."""
    record_file = ROOT / "build" / "wheels" / f"{store.name}-{sys.implementation.cache_tag}.json"
    digest = input_digest(store)
    record = json.loads(record_file.read_text()) if record_file.exists() else {}
    wheel = dist / record.get("wheel", "missing")
    if record.get("inputs") == digest and wheel.is_file() and file_digest(wheel) == record["sha256"]:
        return wheel, False
    print(f"wheel: packing {project_version()}+{label_of_store(store)}", flush=True)
    wheel = pack(store, dist, Interpreter.running())
    record_file.parent.mkdir(parents=True, exist_ok=True)
    record_file.write_text(json.dumps({"inputs": digest, "wheel": wheel.name, "sha256": file_digest(wheel)}, indent=2))
    return wheel, True


def install_wheel(wheel: Path) -> bool:
    """Install the wheel into the running environment unless it is there already; its dependencies are pinned there."""
    stamp = Path(sys.prefix) / "installed-wheel"
    digest = file_digest(wheel)
    if stamp.exists() and stamp.read_text() == digest and importlib.util.find_spec("tilekernels"):
        return False
    install(Path(sys.prefix), ["--no-deps", "--force-reinstall", str(wheel)])
    stamp.write_text(digest)
    return True


def input_digest(store: Path) -> str:
    """Everything that decides the wheel: store, packed sources, Python, compiler, what the environment asks for."""
    total = hashlib.sha256()
    for file in sorted({*_files(store / "manifest.json"), *_files(store / "gen"), *_packed_files()}):
        total.update(f"{file}\0{file_digest(file)}\n".encode())
    environment = backend_environment(Path(sys.prefix) / "bin")
    version = subprocess.run([environment["CXX"], "--version"], capture_output=True, text=True, check=False).stdout
    asked = [environment.get(name) for name in ASKED]
    total.update(json.dumps([sys.version, sysconfig.get_platform(), version, asked]).encode())
    return total.hexdigest()


def file_digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _packed_files() -> Iterator[Path]:
    for name in PACKED:
        yield from _files(ROOT / name)


def _files(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for file in path.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file


if __name__ == "__main__":
    main()
