"""Tries a wheel as its user would: a fresh environment without TileLang and nvcc, the command, an example on the CPU.

    python -m build_tools.check_wheel dist/tilekernels-*.whl build/check-venv

Part of `make wheel`. A wheel that passed is not tried again.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

from .environment import EnvironmentFailed, install, update_environment
from .wheel_label import ROOT

EXAMPLE = ROOT / "examples" / "python" / "quickstart.py"
# Pins for the wheel's own dependencies (torch, click, rich); as constraints they install nothing else.
CONSTRAINTS = ("requirements-torch.txt", "build_tools/requirements.txt")

# torch warns about a missing NumPy, which neither the wheel nor the example needs
NO_NUMPY = "ignore:Failed to initialize NumPy:UserWarning"

# Fails where something of the build side can be imported.
FOREIGN = """
import importlib.util, sys
found = [name for name in ("tilelang", "tvm", "build_tools", "kernels_src") if importlib.util.find_spec(name)]
sys.exit(f"the environment must not have {found}" if found else 0)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path, help="the environment")
    arguments = parser.parse_args()
    try:
        check_wheel(arguments.wheel, arguments.folder)
    except EnvironmentFailed as error:
        sys.exit(f"error: {error}")


def check_wheel(wheel: Path, folder: Path) -> bool:
    """Install the wheel into its own environment, list what it holds, run the example; False where it passed before."""
    stamp = folder / "checked-wheel"
    digest = hashlib.sha256(wheel.read_bytes() + EXAMPLE.read_bytes()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return False
    # The folder only ever gets wheels and what they require; torch stays in it, because installing it takes a minute.
    update_environment(folder, [ROOT / "requirements-torch.txt"])
    install(folder, [str(wheel), *(argument for name in CONSTRAINTS for argument in ("-c", str(ROOT / name)))])
    install(folder, ["--no-deps", "--force-reinstall", str(wheel)])  # where this version was there before
    if any(folder.rglob("nvcc")):
        raise EnvironmentFailed(f"{folder} must not have nvcc, found {next(folder.rglob('nvcc'))}")
    example = ["python", "-I", "-W", NO_NUMPY, str(EXAMPLE)]
    pip_check = ["python", "-I", "-m", "pip", "--disable-pip-version-check", "check"]
    for command in (
        ["python", "-I", "-c", FOREIGN],
        pip_check,
        ["tilekernels", "verify"],
        ["tilekernels", "list"],
        example,
    ):
        run_isolated(folder, command)
    stamp.write_text(digest)
    return True


def run_isolated(folder: Path, command: list[str]) -> None:
    """Run a program of the environment with nothing else on PATH and no variable of this process."""
    program = (folder / "bin" / command[0]).absolute()
    shown = f"{command[0]} {Path(command[-1]).name}"
    if "-c" not in command:
        print(f"\n$ {shown}", flush=True)
    environment = {"PATH": str(program.parent), "LANG": "C.UTF-8", "COLUMNS": "120"}
    result = subprocess.run([str(program), *command[1:]], env=environment, cwd=folder, check=False)
    if result.returncode:
        what = "the look for foreign packages" if "-c" in command else shown
        raise EnvironmentFailed(f"the wheel does not pass its check: {what} ended with {result.returncode} in {folder}")


if __name__ == "__main__":
    main()
