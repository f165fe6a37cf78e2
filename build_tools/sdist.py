"""Source distributions, in two forms (`make sdist`, `make sdist-traced`).

    python -m build_tools.sdist --dist dist                                from source: needs TileLang and nvcc
    python -m build_tools.sdist --dist dist --traced build/store/default   with the cubins: needs a C++ compiler

The traced one carries the label in its own name and version, because installers refuse an sdist whose wheel adds one.
It holds what is packed into a wheel and the finished store: `pip install` of it takes a minute, offline too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .packing import backend_environment
from .wheel import PACKED
from .wheel_label import EMBEDDED_STORE, ROOT, label_of_store

BACKEND = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
STORE_PARTS = ("manifest.json", "gen", "units")  # what CMake reads; of units only the cubins
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "unit.cu", "ptxas.txt", ".made-from.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=Path("dist"))
    parser.add_argument("--traced", type=Path, metavar="STORE", help="a finished kernel store to put in")
    arguments = parser.parse_args()
    try:
        dist = arguments.dist.resolve()
        print(make_traced_sdist(arguments.traced.resolve(), dist) if arguments.traced else make_sdist(ROOT, dist))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")


def make_traced_sdist(store: Path, dist: Path) -> Path:
    """The run-time sources and the finished store, named with its label."""
    label = label_of_store(store)  # refuses a store of other sources
    with tempfile.TemporaryDirectory(prefix="tilekernels-sdist-") as name:
        tree = Path(name)
        for part in PACKED:
            _copy(ROOT / part, tree / part)
        for part in STORE_PARTS:
            _copy(store / part, tree / EMBEDDED_STORE / part)
        made = make_sdist(tree, dist)
    if label not in made.name:
        raise ValueError(f"{made.name} should carry the label {label}")
    return made


def make_sdist(tree: Path, dist: Path) -> Path:
    """The backend's sdist of a source tree; the same bytes for the same files."""
    dist.mkdir(parents=True, exist_ok=True)
    environment = backend_environment(Path(sys.prefix) / "bin")
    for name in ("TILEKERNELS_STORE", "TILEKERNELS_PROFILE"):
        environment.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-c", BACKEND, str(dist)],
        cwd=tree, env=environment, umask=0o022, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if run.returncode:
        raise ValueError(f"the backend ended with {run.returncode}:\n{run.stdout}{run.stderr}")
    return dist / run.stdout.splitlines()[-1]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=_LEFT_OUT)
    elif source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    for path in [target, *target.rglob("*")] if target.exists() else []:
        os.chmod(path, 0o755 if path.is_dir() else 0o644)


if __name__ == "__main__":
    main()
