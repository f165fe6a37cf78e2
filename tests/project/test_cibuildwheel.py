"""The settings for cibuildwheel: valid by its own schema, and the builds they ask for. Running it takes a container."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cibuildwheel", reason="cibuildwheel needs Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("cp310", "cp311", "cp312", "cp313", "cp314", "cp315", "cp314t", "cp315t")


def settings() -> dict[str, Any]:
    tomllib: Any = importlib.import_module("tomllib")
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"])


def test_settings_are_valid() -> None:
    jsonschema: Any = pytest.importorskip("jsonschema")
    cibuildwheel: Any = importlib.import_module("cibuildwheel")
    schema = Path(cibuildwheel.__file__).parent / "resources" / "cibuildwheel.schema.json"
    jsonschema.validate(settings(), json.loads(schema.read_text()))


def test_every_python_and_processor_is_built() -> None:
    command = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(printed) == sorted(
        f"{python}-manylinux_{machine}" for python in PYTHONS for machine in ("x86_64", "aarch64")
    )


def test_files_of_the_settings_exist() -> None:
    words = " ".join(settings()["linux"]["repair-wheel-command"]).split()
    named = [word.removeprefix("{project}/") for word in words if word.startswith("{project}/")]
    assert named
    assert all((ROOT / name).is_file() for name in named)
