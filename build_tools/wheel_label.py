"""The version of a wheel: the project's version plus a label of what was compiled in, `0.1.0+cu130.sm90a`.

scikit-build-core loads this file by path (`[[tool.dynamic-metadata]]` in pyproject.toml) and calls `dynamic_metadata`,
so it imports the standard library alone. The label is read from the manifest of the kernel store that is being packed
(environment variable TILEKERNELS_STORE); without a store the version has no label. Where TILEKERNELS_PROFILE names a
profile instead, its kernels are compiled first: that is how the sources are installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VERSION_FILE = ROOT / "python" / "tilekernels" / "_version.py"
SOURCES = ROOT / "kernels_src"  # not in a traced sdist, whose store lies beside the sources it was packed with
EMBEDDED_STORE = "store"  # where a traced sdist has its kernel store (build_tools/sdist.py)
SOURCE_SUFFIXES = (".py", ".cuh", ".h", ".hpp")

SUMMARY = "TileLang kernels compiled ahead of time: torch operators and a C library that compile nothing at run time"

# What PEP 440 keeps unchanged: `sm_90a` would become `sm.90a`, and only file names would lose upper case.
LABEL = re.compile(r"cu[0-9]+(\.sm[0-9]+[a-z]?)+")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
    """The hook of scikit-build-core: the fields of [project] that are computed."""
    if settings:
        raise ValueError(f"wheel_label takes no settings in pyproject.toml, got {sorted(settings)}")
    return {"version": wheel_version(), "description": describe()}


def wheel_version() -> str:
    """The version in full, label included."""
    label = find_label()
    return f"{project_version()}+{label}" if label else project_version()


def project_version() -> str:
    """`__version__` in python/tilekernels/_version.py, read as text: importing the package would need torch."""
    found = re.search(r'^__version__\s*(?::[^=]*)?=\s*"([^"]+)"', VERSION_FILE.read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f'{VERSION_FILE}: no line __version__ = "X.Y.Z"')
    return found[1]


def describe() -> str:
    """One line for METADATA: what the package is and, where kernels are packed, for which GPUs and by which profile."""
    store = find_store()
    if store is None:
        return SUMMARY
    manifest = json.loads((store / "manifest.json").read_text())
    cuda = ".".join(manifest["build"]["nvcc"].split(".")[:2])
    return f"{SUMMARY} ({', '.join(manifest['archs'])}; CUDA {cuda}; profile {manifest['profile']})"


def find_store() -> Path | None:
    """The store named by TILEKERNELS_STORE, else the one in a traced sdist, else that of TILEKERNELS_PROFILE, built
    here and now. CMakeLists.txt looks in the same order."""
    store, profile = os.environ.get("TILEKERNELS_STORE", ""), os.environ.get("TILEKERNELS_PROFILE", "")
    if not store and (ROOT / EMBEDDED_STORE).is_dir():
        store = EMBEDDED_STORE
    if not store and profile:
        return build_store(profile)
    return ROOT / store if store else None


def build_store(profile: str) -> Path:
    """Compile the kernels of a profile, which takes TileLang and nvcc; nothing is done where they are up to date."""
    for module in ("tilelang", "rich"):
        if importlib.util.find_spec(module) is None:
            raise ModuleNotFoundError(
                f"TILEKERNELS_PROFILE={profile} has the kernels compiled, which needs TileLang, and {sys.executable} "
                f"has no {module}: pip install torch -r build_tools/requirements.txt -r requirements-wheel.txt (both "
                "lie in the source distribution), then give pip --no-build-isolation"
            )
    command = [sys.executable, "-m", "build_tools", "build", "--profile", profile]
    built = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if built.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {built.returncode}:\n{built.stdout}")
    return ROOT / "build" / "store" / Path(profile).stem


def find_label() -> str:
    """The label of the store that is packed, "" where there is none."""
    store = find_store()
    return label_of_store(store) if store else ""


def label_of_store(store: Path) -> str:
    """The label of a finished kernel store: CUDA version and archs, `cu130.sm90a`."""
    manifest_file = store / "manifest.json"
    if not manifest_file.is_file():
        raise FileNotFoundError(
            f"TILEKERNELS_STORE={store} holds no manifest.json; build the kernels first: python -m build_tools build"
        )
    manifest = json.loads(manifest_file.read_text())
    check_sources(store, manifest)
    return make_label(manifest["build"]["nvcc"], manifest["archs"])


def check_sources(store: Path, manifest: Mapping[str, Any]) -> None:
    """Raise where the kernels of a store come from other sources than those beside this file."""
    if SOURCES.is_dir() and manifest["build"].get("source_hash") != hash_sources(SOURCES):
        raise ValueError(
            f"{store} was made from other kernel sources than {SOURCES} holds now, so that code and checks would not "
            f"belong together; build it again: python -m build_tools build --profile {manifest.get('profile')} "
            f"--archs {','.join(manifest['archs'])} --store {store}"
        )


def hash_sources(root: Path) -> str:
    """One hash over the kernel sources, for telling which state of them a library was made from."""
    digest = hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.suffix in SOURCE_SUFFIXES and path.is_file()):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def make_label(nvcc_version: str, archs: Sequence[str]) -> str:
    """`13.0.88`, [`sm_90a`, `sm_80`] -> `cu130.sm80.sm90a`; archs in order of their number."""
    major, minor = nvcc_version.split(".")[:2]
    ordered = sorted(archs, key=lambda arch: (int(re.sub(r"\D", "", arch)), arch))
    return check_label(".".join([f"cu{major}{minor}", *(arch.replace("_", "") for arch in ordered)]))


def check_label(label: str) -> str:
    """Return the label if installers will print it unchanged; raise otherwise."""
    if not LABEL.fullmatch(label):
        raise ValueError(f"wheel label must look like cu130.sm90a or cu130.sm80.sm90a, got {label!r}")
    return label
