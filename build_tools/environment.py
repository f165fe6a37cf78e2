"""Makes a virtual environment and keeps it equal to requirement files.

    python3 -m build_tools.environment .venv build_tools/requirements.txt requirements-wheel.txt

Runs on a bare Python >= 3.10 (standard library alone). A requirement file is installed when its content differs from
what was installed last; a call with nothing to do takes no time and prints nothing. An environment that another Python
made is made anew.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import venv
from pathlib import Path

MINIMUM = (3, 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the environment")
    parser.add_argument("requirements", type=Path, nargs="*", help="requirement files to install")
    arguments = parser.parse_args()
    try:
        update_environment(arguments.folder, arguments.requirements)
    except EnvironmentFailed as error:
        sys.exit(f"error: {error}")


class EnvironmentFailed(Exception):
    """The environment could not be made; the text says what to type."""


def update_environment(folder: Path, requirements: list[Path]) -> None:
    """Make the environment if it is missing or of another Python, then install the requirement files that changed."""
    if sys.version_info < MINIMUM:
        raise EnvironmentFailed(f"Python >= 3.10 is needed, got {sys.version.split()[0]}: make wheel PYTHON=python3.11")
    if _read(folder / "made-by") != _interpreter():
        make_environment(folder)
    stale = [file for file in requirements if _read(_stamp(folder, file)) != _digest(file)]
    if stale:
        install(folder, [argument for file in stale for argument in ("-r", str(file))])
        for file in stale:
            _stamp(folder, file).write_text(_digest(file))


def make_environment(folder: Path) -> None:
    """A fresh environment of the running Python; whatever was in the folder is removed."""
    print(f"environment {folder}: making it with Python {sys.version.split()[0]}", flush=True)
    try:
        venv.create(folder, clear=True, with_pip=True, symlinks=True)
    except (subprocess.CalledProcessError, ImportError) as error:
        raise EnvironmentFailed(
            f"{sys.executable} cannot make virtual environments ({error}); on Debian: apt-get install python3-venv"
        ) from error
    (folder / "made-by").write_text(_interpreter())


def install(folder: Path, arguments: list[str]) -> None:
    """`pip install` in the environment; its output is shown only when it fails."""
    print(f"environment {folder}: pip install {' '.join(arguments)}", flush=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if result.returncode:
        raise EnvironmentFailed(f"pip ended with {result.returncode}: {' '.join(command)}\n{result.stdout}")


def _interpreter() -> str:
    return f"{sys.version}\n{sys.base_prefix}\n"


def _stamp(folder: Path, requirement_file: Path) -> Path:
    return folder / ("installed-" + str(requirement_file).replace("/", "-"))


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


if __name__ == "__main__":
    main()
