"""The wheel under test: TILEKERNELS_WHEEL, else what `make test` built, else what `make wheel` built."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Path of the wheel under test."""
    if os.environ.get("TILEKERNELS_WHEEL"):
        return Path(os.environ["TILEKERNELS_WHEEL"])
    for folder in ("build/smoke", "dist"):
        found = sorted((ROOT / folder).glob("tilekernels-*.whl"), key=lambda file: file.stat().st_mtime)
        if found:
            return found[-1]
    pytest.fail("no wheel in build/smoke or dist: run `make test` or `make wheel`, or set TILEKERNELS_WHEEL")


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's content in a folder that can be put on sys.path: it needs no installer."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
