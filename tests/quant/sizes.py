"""Sizes of matrices and the devices that they are tested on: large ones on a GPU alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

Size = tuple[int, int]


def on_devices(sizes: Sequence[Size], large: Sequence[Size]) -> pytest.MarkDecorator:
    """Parametrises `device` and `size`: on the CPU with `sizes`, on a GPU with those and with `large`."""
    cases = [pytest.param("cpu", size, id=f"cpu-{size}") for size in sizes]
    cases += [pytest.param("cuda", size, id=f"cuda-{size}", marks=pytest.mark.gpu) for size in (*sizes, *large)]
    return pytest.mark.parametrize(("device", "size"), cases)
