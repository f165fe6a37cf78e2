"""Builds libtilekernels of the kernels in this folder, which no wheel holds: one for each way of launching.

python -m tests.csrc.launch_kinds.library      prints the library's path, for run_on_gpu.py on a machine with a GPU
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
BUILD = ROOT / "build" / "tests" / "launch_kinds"
PROFILE = HERE / "profile.toml"


def build_library() -> Path:
    """Trace and compile the kernels, then link them; seconds where nothing has changed."""
    store, tree = BUILD / "store", BUILD / "cmake"
    common = ["--kernels", HERE / "kernels", "--profile", PROFILE, "--store", store, "--jobs", "2"]
    _run(sys.executable, "-m", "build_tools", "build", *common)
    _run("cmake", "-S", ROOT, "-B", tree, f"-DTILEKERNELS_STORE={store}", "-DTILEKERNELS_PYTHON=OFF")
    _run("cmake", "--build", tree, "--parallel", "2")
    return next(tree.rglob("libtilekernels.so.0"))


def _run(*command: str | Path) -> None:
    environment = os.environ | {"PATH": f"{sys.prefix}/bin{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}"


if __name__ == "__main__":
    print(build_library())
