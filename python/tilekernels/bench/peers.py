"""Who else does the same work: our references eagerly and under torch.compile, torch's own operators, Triton kernels.

Files of the folder `benchmarks/peers` of a source tree are named as the operator's file and hold
`make_peers(operator: str, kwargs: dict) -> dict[str, Callable[[], object]]`: peers by name, each fit for these inputs.
A name with "triton" needs Triton, one with "torch." is an operator of torch.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..errors import ArgumentError
from ..testing.bench import event_time_us
from .cases import Call

__all__ = ["KINDS", "fastest", "find_peer_folder", "make_peers"]

KINDS = ("torch", "compile", "triton")

_TRIES = 5
_FOLDER = Path("benchmarks") / "peers"


def find_peer_folder(given: Path | None = None) -> Path | None:
    """The folder of peers: the given one, or that of the source tree which holds the working folder."""
    if given is not None:
        if not given.is_dir():
            raise ArgumentError(f"bench: peers must be a folder, got {given}")
        return given
    here = Path.cwd()
    return next((each / _FOLDER for each in (here, *here.parents) if (each / _FOLDER).is_dir()), None)


def make_peers(
    call: Call, kwargs: Mapping[str, Any], kinds: tuple[str, ...], folder: Path | None
) -> dict[str, Callable[[], object]]:
    """Calls by name that do what `call` does, of the kinds asked for."""
    peers: dict[str, Callable[[], object]] = {}
    if "torch" in kinds:
        peers["torch"] = functools.partial(call.reference, **kwargs)
    if "compile" in kinds:
        torch.compiler.reset()
        peers["compile"] = functools.partial(torch.compile(call.reference, dynamic=False), **kwargs)
    for name, peer in _from_folder(call, kwargs, folder).items():
        if ("triton" if "triton" in name else "torch") in kinds:
            peers[name] = peer
    return peers


def _from_folder(call: Call, kwargs: Mapping[str, Any], folder: Path | None) -> dict[str, Callable[[], object]]:
    name = call.operator.__module__.rpartition(".")[2]
    if folder is None or not (folder / f"{name}.py").is_file():
        return {}
    module = _load(folder / f"{name}.py")
    return {} if module is None else dict(module.make_peers(call.case.operator, dict(kwargs)))


@functools.cache
def _load(file: Path) -> ModuleType | None:
    """The peer file, or None where Triton is not installed."""
    spec = importlib.util.spec_from_file_location(f"tilekernels_peers_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ArgumentError(f"bench: {file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        return None
    return module


def fastest(candidates: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """The one of several settings of a peer that takes the least time; a setting that does not run is passed over."""
    times: list[tuple[float, Callable[[], object]]] = []
    failure: Exception | None = None
    for candidate in candidates:
        try:
            candidate()
            times.append((event_time_us(candidate, _TRIES), candidate))
        except Exception as error:  # too many registers, too much shared memory
            failure = error
    if not times:
        raise RuntimeError("bench: no setting of the peer runs") from failure
    return min(times, key=lambda pair: pair[0])[1]
