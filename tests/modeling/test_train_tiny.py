"""examples/python/train_tiny.py: the operators train as plain torch does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "train_tiny.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("device", "num_steps"), [("cpu", 4), pytest.param("cuda", 100, marks=pytest.mark.gpu)], ids=["cpu", "cuda"]
)
def test_losses_are_those_of_plain_torch(example: ModuleType, device: str, num_steps: int) -> None:
    ours, plain = (example.train(layers, num_steps, device) for layers in (example.OperatorLayers, example.PlainLayers))
    for found, wanted in zip(ours, plain, strict=True):
        assert found == pytest.approx(wanted, rel=example.TOLERANCE)
    if num_steps == 100:
        assert sum(ours[-10:]) < sum(ours[:10])
