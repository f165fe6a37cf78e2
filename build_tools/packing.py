"""packing: a finished kernel store -> a wheel, for one Python and one target.

The native target takes this machine's g++. The others take zig, whose C library is old enough for manylinux_2_28 and
which compiles for the other processor as well; auditwheel then checks and tags the wheel. Both end in archive.py, so
that the same store gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .archive import rewrite_wheel
from .errors import BuildError
from .sbom import SBOM_NAME, add_zig_runtime
from .wheel_label import ROOT

GLIBC = "2.28"  # of Debian 10, Ubuntu 18.10, RHEL 8
MACHINES = ("x86_64", "aarch64")
PARTS = (("C", "cc"), ("CXX", "c++"), ("ASM", "cc"))  # CMake's languages and zig's commands
ZIG_CACHE = ROOT / "build" / "zig"  # zig's own C++ library, compiled once: minutes


@dataclasses.dataclass(frozen=True)
class Interpreter:
    """A Python that wheels are packed for, with the requirements of requirements-wheel.txt installed."""

    executable: Path
    tag: str  # "cp311"
    suffix: str  # of extension modules: ".cpython-311-x86_64-linux-gnu.so"

    @staticmethod
    def running() -> Interpreter:
        return Interpreter(
            Path(sys.executable), tag_of(sys.implementation.cache_tag), sysconfig.get_config_var("EXT_SUFFIX")
        )


def tag_of(cache_tag: str) -> str:
    """`cpython-311` -> `cp311`."""
    return cache_tag.replace("cpython-", "cp")


@dataclasses.dataclass(frozen=True)
class Target:
    """What the compiled files run on. `machine` None: this machine, by its own compiler."""

    machine: str | None = None

    @property
    def name(self) -> str:
        return "native" if self.machine is None else f"manylinux_{GLIBC.replace('.', '_')}_{self.machine}"

    @property
    def is_cross(self) -> bool:
        return self.machine not in (None, platform.machine())


NATIVE = Target()


def pack(store: Path, dist: Path, python: Interpreter, target: Target = NATIVE) -> Path:
    """Make the wheel in `dist`. `pip wheel` without isolation: the pinned scikit-build-core of the interpreter's
    environment."""
    dist.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=dist, prefix=".new-") as name:
        folder = Path(name)
        wheel = _run_backend(store, folder, python, target)
        added: dict[str, bytes] = {}
        platform_tag = ""
        if target.machine is not None:
            wheel = _repair(wheel, folder / "repaired", target)
            added[f"sboms/{SBOM_NAME}"] = add_zig_runtime((store / "gen" / SBOM_NAME).read_bytes(), zig_version())
            platform_tag = target.name  # older than which nothing is promised, whatever auditwheel finds possible
        wheel = rewrite_wheel(wheel, added, platform_tag)
        return Path(shutil.move(wheel, dist / wheel.name))


def _run_backend(store: Path, folder: Path, python: Interpreter, target: Target) -> Path:
    settings = {"build-dir": f"build/cmake/{store.name}-{target.name}-{{wheel_tag}}"}
    environment = backend_environment(python.executable.parent) | {"TILEKERNELS_STORE": str(store)}
    if target.machine is not None:
        environment |= zig_environment(target)
    if target.is_cross:
        environment["_PYTHON_HOST_PLATFORM"] = f"linux-{target.machine}"
        settings["cmake.define.PYTHON_MODULE_EXTENSION"] = python.suffix.replace(
            platform.machine(), str(target.machine)
        )
    command = [
        *(str(python.executable), "-m", "pip", "--disable-pip-version-check", "wheel", str(ROOT)),
        *("--wheel-dir", str(folder), "--no-deps", "--no-build-isolation"),
        *(word for name, value in settings.items() for word in ("--config-settings", f"{name}={value}")),
    ]
    run_tool("packing the wheel", command, environment)
    (built,) = folder.glob("*.whl")
    return built


def _repair(wheel: Path, folder: Path, target: Target) -> Path:
    """auditwheel refuses what an older system would lack, and writes the platform into the tag."""
    # asked for by name it knows the running processor's tags alone; of the other the tag is written by rewrite_wheel
    plat = [] if target.is_cross else ["--plat", target.name]
    command = [sys.executable, "-m", "auditwheel", "repair", "--only-plat", *plat, "--wheel-dir", str(folder)]
    run_tool("auditwheel", [*command, str(wheel)], backend_environment(Path(sys.executable).parent))
    (repaired,) = folder.glob("*.whl")
    return repaired


def backend_environment(tools: Path) -> dict[str, str]:
    """The environment in which a wheel is packed: the tools of an environment first, the GNU compilers by default.

    Without CC and CXX scikit-build-core takes the compiler that built Python, which this machine need not have.
    """
    path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    return {"CC": "gcc", "CXX": "g++"} | os.environ | {"PATH": path}


def run_tool(what: str, command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The output of a program that has to succeed. umask: permissions of packed files are part of a wheel's bytes."""
    result = subprocess.run(
        list(command), cwd=ROOT, env=dict(environment), umask=0o022, capture_output=True, text=True, check=False
    )
    if result.returncode:
        output = "".join(f"    {line}\n" for line in (result.stdout + result.stderr).splitlines())
        raise BuildError(f"{what} ended with {result.returncode}: {' '.join(command)}\n{output}")
    return result.stdout


# ---- zig -------------------------------------------------------------------------------------------------------------


def find_zig() -> Path:
    """The compiler of the Python package `ziglang` of this environment."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or spec.origin is None:
        raise BuildError("wheels for old systems need zig: pip install -r requirements-release.txt")
    return Path(spec.origin).parent / "zig"


def zig_version() -> str:
    return run_tool("zig", [str(find_zig()), "version"], os.environ).strip()


def zig_environment(target: Target) -> dict[str, str]:
    """What makes CMake compile by zig, and where zig keeps its own libraries."""
    cache = str(ZIG_CACHE)
    return {
        "CMAKE_TOOLCHAIN_FILE": str(_write_toolchain(target)),
        "ZIG_GLOBAL_CACHE_DIR": cache,
        "ZIG_LOCAL_CACHE_DIR": cache,
    }


def _write_toolchain(target: Target) -> Path:
    zig = find_zig()
    lines = []
    if target.is_cross:
        lines += ["set(CMAKE_SYSTEM_NAME Linux)", f"set(CMAKE_SYSTEM_PROCESSOR {target.machine})"]
    # The pyconfig.h of Debian's Python names the real one by its folder in /usr/include. All else is found before that.
    late = "" if target.is_cross else ";-idirafter;/usr/include"
    for language, command in PARTS:
        target_name = f"{target.machine}-linux-gnu.{GLIBC}"
        lines.append(f'set(CMAKE_{language}_COMPILER "{zig};{command};-target;{target_name}{late}")')
    # pybind11 tries link-time optimisation, which nothing here uses and for which zig would compile its library again
    lines += [f'set({name} OFF CACHE INTERNAL "")' for name in ("HAS_FLTO_THIN", "HAS_FLTO_AUTO", "HAS_FLTO")]
    file = ROOT / "build" / "toolchains" / f"{target.name}.cmake"
    text = "\n".join(lines) + "\n"
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return file


# ---- which Pythons there are -----------------------------------------------------------------------------------------

OLDEST, NEWEST = (3, 10), (3, 15)
_ASK = """
import json, os, sys, sysconfig
header = os.path.join(sysconfig.get_path("include"), "Python.h")
tag = sys.implementation.cache_tag + getattr(sys, "abiflags", "")
print(json.dumps([list(sys.version_info[:3]), tag, sysconfig.get_config_var("EXT_SUFFIX"), os.path.isfile(header)]))
"""


def find_pythons() -> list[Path]:
    """An executable of each CPython from OLDEST to NEWEST that has headers, the latest of its minor version: those on
    PATH and those of pyenv."""
    minors = range(OLDEST[1], NEWEST[1] + 1)
    names = [f"python3.{minor}{threads}" for minor in minors for threads in ("", "t")]
    found = [Path(path) for path in map(shutil.which, names) if path]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found += sorted(pyenv.glob("versions/*/bin/python3"))
    best: dict[str, tuple[list[int], Path]] = {}
    for executable in [Path(sys.executable), *found]:
        answer = ask_python(executable)
        if answer is None:
            continue
        version, tag = answer
        if OLDEST <= tuple(version[:2]) <= NEWEST and (tag not in best or best[tag][0] < version):
            best[tag] = (version, executable)
    return [executable for _, executable in sorted(best.values())]


def ask_python(executable: Path) -> tuple[list[int], str] | None:
    """(version, tag) of a CPython that runs and has headers, else None; pyenv leaves programs that only print help."""
    try:
        run = subprocess.run([executable, "-I", "-c", _ASK], capture_output=True, text=True, timeout=60, check=False)
        version, tag, _, has_header = json.loads(run.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return (version, tag) if has_header and tag.startswith("cpython-") else None


def prepare_python(executable: Path) -> Interpreter:
    """The interpreter in an environment of its own under build/pythons, with the requirements for packing."""
    answer = ask_python(executable)
    if answer is None:
        raise BuildError(f"{executable} is no CPython >= 3.{OLDEST[1]} with headers (python3-dev)")
    folder = ROOT / "build" / "pythons" / tag_of(answer[1])
    command = [str(executable), "-m", "build_tools.environment", str(folder), "requirements-wheel.txt"]
    run_tool("making an environment", command, os.environ)
    python = folder / "bin" / "python"
    run = subprocess.run([str(python), "-I", "-c", _ASK], capture_output=True, text=True, check=True)
    _, tag, suffix, _ = json.loads(run.stdout)
    return Interpreter(python, tag_of(tag), suffix)
