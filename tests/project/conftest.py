"""The wheel under test: TILEKERNELS_WHEEL, else what `make test` built, else what `make wheel` built."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheels import find_store, find_wheel, unpack


@pytest.fixture(scope="session")
def wheel() -> Path:
    """Path of the wheel under test."""
    return find_wheel()


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its content, importable."""
    return unpack(wheel, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def store(wheel: Path) -> Path:
    """The kernel store that it was packed from."""
    return find_store(wheel)
