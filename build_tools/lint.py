"""Runs formatters, linters, type checker and layer rules (`make lint`); with --fix it rewrites files (`make format`).

    python -m build_tools.lint [--fix]

All checks run, also after one has failed, so that one call shows everything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from .wheel_label import ROOT

CXX_FOLDERS = ("csrc", "examples", "kernels_src", "tests", "benchmarks")
CXX_SUFFIXES = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fix", action="store_true", help="rewrite files instead of complaining")
    failed = [name for name, command in commands(parser.parse_args().fix) if not succeeds(name, command)]
    sys.exit(f"lint: failed: {', '.join(failed)}" if failed else 0)


def commands(fix: bool) -> list[tuple[str, list[str]]]:
    """(name, command) of each check."""
    tools = Path(sys.prefix) / "bin"
    ruff, clang_format = str(tools / "ruff"), str(tools / "clang-format")
    sources = cxx_sources()
    if fix:
        return [
            ("ruff check", [ruff, "check", "--fix", "--quiet", "."]),
            ("ruff format", [ruff, "format", "."]),
            ("clang-format", [clang_format, "-i", *sources]),
        ]
    return [
        ("ruff check", [ruff, "check", "--quiet", "."]),
        ("ruff format", [ruff, "format", "--check", "--quiet", "--diff", "."]),
        ("clang-format", [clang_format, "--dry-run", "-Werror", *sources]),
        ("mypy", [sys.executable, "-m", "mypy"]),
        ("layer rules", [sys.executable, "-m", "pytest", "-q", "--no-header", "tests/project/test_layers.py"]),
    ]


def cxx_sources() -> list[str]:
    """Every C, C++ and CUDA source that a person wrote; generated ones (golden files) are compared, not formatted."""
    found = [
        file.relative_to(ROOT)
        for folder in CXX_FOLDERS
        for file in sorted((ROOT / folder).rglob("*"))
        if file.suffix in CXX_SUFFIXES and "golden" not in file.parts and "fixtures" not in file.parts
    ]
    return [str(file) for file in found]


def succeeds(name: str, command: list[str]) -> bool:
    """Run one check; its output is shown only when it fails."""
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    print(f"lint: {name}: {'failed' if result.returncode else 'ok'}", flush=True)
    if result.returncode:
        print("".join(f"    {line}\n" for line in result.stdout.splitlines()), flush=True)
    return result.returncode == 0


if __name__ == "__main__":
    main()
