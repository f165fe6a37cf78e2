"""toolchain: which nvcc compiles, and with which headers.

Looks at `$CUDACXX`, `PATH`, `CUDA_HOME`/`CUDA_PATH` and the PyPI wheels of requirements-nvcc.txt, in this order, and
takes the first CUDA 13 compiler. The headers are those of the installed TileLang, found without importing it (that
takes seconds).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from .errors import BuildError

CUDA_MAJOR = 13  # cubins of CUDA 13 need driver >= 580; the wheels of CUDA 12 hold no nvcc
INSTALL_NVCC = (
    f"install the CUDA {CUDA_MAJOR} toolkit and set CUDACXX to its nvcc, "
    "or run: pip install -r build_tools/requirements-nvcc.txt"
)


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """A compiler that was seen to run. `build` names it to the last digit: the same build gives the same bytes."""

    nvcc: Path
    version: str  # "13.0.88"
    build: str  # "cuda_13.0.r13.0/compiler.36424714_0"
    source: str  # where it was found: CUDACXX, PATH, CUDA_HOME, CUDA_PATH or wheels
    tilelang: str  # version of the TileLang whose headers are used
    include: tuple[Path, ...]

    @property
    def include_flags(self) -> tuple[str, ...]:
        return tuple(f"-I{folder}" for folder in self.include)


def find_toolchain(environment: Mapping[str, str] = os.environ) -> Toolchain:
    """The first CUDA 13 nvcc, or a BuildError that says what was seen and what to install."""
    if shutil.which("g++", path=environment.get("PATH")) is None:
        raise BuildError("nvcc needs g++ to read headers and there is none on PATH: install g++")
    tilelang, include = find_tilelang_headers()
    seen: list[str] = []
    for source, nvcc in _candidates(environment):
        problem, version, build = _ask_version(nvcc)
        if not problem:
            return Toolchain(nvcc, version, build, source, tilelang, include)
        seen.append(f"{source}: {nvcc} {problem}")
        if source == "CUDACXX":
            break  # an explicit wish is not silently replaced by another compiler
    found = (
        "".join(f"\n  {line}" for line in seen)
        or "\n  no nvcc in $CUDACXX, PATH, CUDA_HOME, CUDA_PATH or the PyPI wheels"
    )
    raise BuildError(f"kernels need the nvcc of CUDA {CUDA_MAJOR}: {INSTALL_NVCC}{found}")


def check_archs_known(toolchain: Toolchain, archs: Iterable[str]) -> None:
    """Raise BuildError for a GPU that this nvcc cannot compile for, before anything is traced."""
    run = subprocess.run([str(toolchain.nvcc), "--list-gpu-code"], capture_output=True, text=True, check=False)
    known = re.findall(
        r"^sm_(\d+)", run.stdout, re.MULTILINE
    )  # without the letters of special forms: 90 stands for 90a
    for arch in archs if known else ():
        if re.sub(r"\D", "", arch) not in known:
            raise BuildError(
                f"nvcc {toolchain.version} ({toolchain.nvcc}) does not know {arch}; it knows sm_{', sm_'.join(known)}: "
                f"build without it (--archs), or {INSTALL_NVCC}"
            )


def find_tilelang_headers() -> tuple[str, tuple[Path, ...]]:
    """Version and include folders of the installed TileLang."""
    spec = importlib.util.find_spec("tilelang")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("TileLang is not installed here: run pip install -r build_tools/requirements.txt")
    package = Path(next(iter(spec.submodule_search_locations)))
    include = (package / "src", package / "3rdparty" / "cutlass" / "include")
    for folder, header in zip(include, ("tl_templates/cuda/common.h", "cutlass/cutlass.h"), strict=True):
        if not (folder / header).is_file():
            raise BuildError(
                f"the installed TileLang has no {folder / header}: run pip install -r build_tools/requirements.txt"
            )
    return importlib.metadata.version("tilelang"), include


def _candidates(environment: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    if environment.get("CUDACXX"):
        yield (
            "CUDACXX",
            Path(shutil.which(environment["CUDACXX"], path=environment.get("PATH")) or environment["CUDACXX"]),
        )
    on_path = shutil.which("nvcc", path=environment.get("PATH"))
    if on_path:
        yield "PATH", Path(on_path)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(variable):
            yield variable, Path(environment[variable]) / "bin" / "nvcc"
    for folder in _wheel_folders():
        if (folder / "bin" / "nvcc").is_file():
            yield "wheels", folder / "bin" / "nvcc"


def _wheel_folders() -> list[Path]:
    """site-packages/nvidia/cu13, where all CUDA 13 wheels unpack."""
    spec = importlib.util.find_spec("nvidia")
    locations = spec.submodule_search_locations if spec is not None else None
    return [Path(location) / f"cu{CUDA_MAJOR}" for location in locations or ()]


def _ask_version(nvcc: Path) -> tuple[str, str, str]:
    """(problem, version, build); an empty problem means that this nvcc will do."""
    try:
        run = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run ({error})", "", ""
    version = re.search(r"\bV(\d+\.\d+\.\d+)", run.stdout)
    build = re.search(r"^Build (\S+)", run.stdout, re.MULTILINE)
    if run.returncode != 0 or version is None or build is None:
        return f"--version ended with {run.returncode}: {(run.stderr or run.stdout).strip()[-200:]}", "", ""
    if int(version[1].split(".")[0]) != CUDA_MAJOR:
        return f"is of CUDA {version[1]}, needed is {CUDA_MAJOR}.x", "", ""
    return _missing_parts(nvcc), version[1], build[1]


def _missing_parts(nvcc: Path) -> str:
    """The PyPI wheels are installed one by one: name the part that a partial installation lacks."""
    top = nvcc.parent.parent
    if top.name != f"cu{CUDA_MAJOR}" or top.parent.name != "nvidia":
        return ""
    parts = {
        "nvidia-nvvm": "nvvm/bin/cicc",
        "nvidia-cuda-crt": "include/crt/host_config.h",
        "nvidia-cuda-cccl": "include/cccl/cuda/std/version",
        "nvidia-cuda-runtime": "include/cuda_runtime.h",
    }
    missing = [wheel for wheel, file in parts.items() if not (top / file).is_file()]
    return f"lacks the wheels {', '.join(missing)}" if missing else ""
