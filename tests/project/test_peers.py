"""The peers that `tilekernels bench --compare` times do what our operators do: a faster wrong answer is no peer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from tilekernels.bench import peers
from tilekernels.bench.cases import Call, find_calls
from tilekernels.testing import calc_diff

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
FILES = sorted(file.stem for file in FOLDER.glob("*.py"))

# Squared and halved, as calc_diff counts. Peers round once where we do, but sum and divide in other orders: a value in
# hundreds then falls on the other side of a boundary of e4m3, which is 6 % apart.
MAX_DIFF = 1e-4
MUCH_MEMORY = 300e6  # bytes of a call: a larger one shows nothing more

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Triton's imports


def calls_of(file: str) -> list[Call]:
    calls = [call for call in find_calls() if call.operator.__module__.endswith(f".{file}")]
    return [call for call in calls if call.case.bytes < MUCH_MEMORY]


def test_every_peer_file_is_named_as_an_operator_file() -> None:
    assert [file for file in FILES if not calls_of(file)] == []


@pytest.fixture
def _first_setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Peers try no settings out: the first of each runs."""
    peers._load.cache_clear()
    monkeypatch.setattr(peers, "fastest", lambda candidates: candidates[0])
    yield
    peers._load.cache_clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("_first_setting")
@pytest.mark.parametrize("file", FILES)
def test_peers_do_what_the_operator_does(file: str) -> None:
    pytest.importorskip("triton")
    found = []
    for call in calls_of(file):
        torch.manual_seed(0)
        kwargs = call.case.make("cuda")
        for name, peer in peers.make_peers(call, kwargs, ("triton",), FOLDER).items():
            found.append(name)
            actual, expected = peer(), call.operator(**kwargs)
            check_same(expected if expected is not None else written(kwargs), actual, call.case.id)
    assert found or not (FOLDER / f"{file}.py").read_text().count("triton.jit")


def written(kwargs: dict[str, Any]) -> Any:
    """What an operator that returns nothing has written into."""
    return [kwargs[name] for name in ("o", "x_grad", "query", "key") if name in kwargs]


def check_same(expected: Any, actual: Any, name: str) -> None:
    """Values of every tensor; scales packed in integers have to be equal."""
    pairs = zip(_pytree.tree_leaves(expected), _pytree.tree_leaves(actual), strict=True)
    for x, y in pairs:
        y = y.view(x.dtype).reshape(x.shape)
        if x.is_floating_point():
            assert calc_diff(x.float(), y.float()) < MAX_DIFF, name
        else:
            assert torch.equal(x, y), name
