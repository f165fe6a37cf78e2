"""One row for each call: time, bytes, bandwidth, distance from the limit, and the peers' times; all in one run."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

from .._manifest import find_kernel, load_manifest
from ..testing.bench import event_time_us, graph_time_us, time_kernels
from .cases import Call
from .limits import Limits, make_plain_call
from .peers import make_peers

__all__ = ["Options", "count_written", "find_limit_kind", "measure"]

_PEER_US = 1_000.0  # of measured calls of a peer: half a percent more or less changes no verdict
_MATMULS = ("gemm.matmul",)
# Tensor cores draw so much power that the clock goes down after some tens of milliseconds: 9 % longer for 1.4 ms calls.
_MATMUL_WARMUP_US = 100_000.0


@dataclass(frozen=True)
class Options:
    """How to measure."""

    peers: tuple[str, ...] = ()  # of peers.KINDS
    peer_folder: Path | None = None
    cross_check: bool = False  # by events and a replayed graph
    twice: bool = False
    time_limit: float | None = None  # seconds, after which no further call is begun


def measure(calls: Sequence[Call], limits: Limits, options: Options) -> Iterator[dict[str, Any]]:
    """A row for each call, as soon as it is measured. A call that fails gives a row with `failure` and no time."""
    start = time.monotonic()
    for call in calls:
        if options.time_limit is not None and time.monotonic() - start > options.time_limit:
            return
        row: dict[str, Any] = {"stage": "kernels", "operator": call.case.operator, "params": call.case.params}
        try:
            row |= _measure_call(call, limits, options)
        except Exception as failure:  # one call must not take the others' rows with it
            row["failure"] = _describe(failure)
        yield row


def _measure_call(call: Call, limits: Limits, options: Options) -> dict[str, Any]:
    torch.manual_seed(0)
    kwargs = call.case.make("cuda")
    run = functools.partial(call.operator, **kwargs)
    num_bytes = call.case.bytes
    written = min(count_written(call.case.operator, kwargs, run()), num_bytes)
    limit = _make_limit(call, kwargs, written)
    warmup_us = _MATMUL_WARMUP_US if call.case.operator in _MATMULS else 0.0
    timings = time_kernels([run] if limit is None else [run, limit], warmup_us=warmup_us)
    row: dict[str, Any] = {"us": timings[0].us, "mean_us": timings[0].mean_us, "spread": timings[0].spread}
    row |= {"repeats": timings[0].repeats, "num_kernels": timings[0].num_kernels}
    row |= {"bytes": num_bytes, "written": written, "gbs": num_bytes / row["us"] / 1e3}
    row |= _describe_limit(call, limits, row["us"], written, timings[1].us if limit else None)
    if options.twice:
        row["again_us"] = time_kernels([run], warmup_us=warmup_us)[0].us
    if options.cross_check:
        row |= {"event_us": event_time_us(run), "graph_us": _try(functools.partial(graph_time_us, run))}
    if options.peers:
        row["peers"] = _measure_peers(call, kwargs, options)
    return row


def count_written(operator: str, kwargs: Mapping[str, Any], result: Any) -> int:
    """Bytes that a call wrote: new tensors among its results, and arguments that its kernel is declared to write."""
    given = _tensors(kwargs)
    written = _tensors([value for name, value in kwargs.items() if _is_written(operator, name)])
    new = {key: x for key, x in _tensors(result).items() if key not in given}
    return sum(x.numel() * x.element_size() for x in (written | new).values())


def _tensors(tree: Any) -> dict[int, torch.Tensor]:
    leaves = _pytree.tree_leaves(tree)
    return {x.data_ptr(): x for x in leaves if isinstance(x, torch.Tensor) and x.numel()}


def _is_written(operator: str, argument: str) -> bool:
    """Of a list of tensors the kernel has one parameter for each: residual_list is residual_0, residual_1, ..."""
    kernel = find_kernel(load_manifest(), operator)
    names = [param["name"] for param in kernel["params"] if param.get("written")] if kernel else []
    lists = {re.sub(r"_\d+$", "", name) for name in names} - set(names)
    return argument in names or any(argument.startswith(name) for name in lists)


def find_limit_kind(operator: str, num_bytes: int, written: int) -> str:
    """What a call is measured against: torch's matmul, a plain kernel where it mostly writes, or a copy."""
    if operator in _MATMULS:
        return "torch.matmul"
    return "plain kernel" if 2 * written > num_bytes else "copy"


def _make_limit(call: Call, kwargs: dict[str, Any], written: int) -> Callable[[], object] | None:
    """The call to time beside the operator, or None where the curve of copies tells."""
    kind = find_limit_kind(call.case.operator, call.case.bytes, written)
    if kind == "torch.matmul":
        return functools.partial(torch.matmul, kwargs["a"], kwargs["b"].t())
    return make_plain_call(call.case.bytes - written, written) if kind == "plain kernel" else None


def _describe_limit(call: Call, limits: Limits, us: float, written: int, measured_us: float | None) -> dict[str, Any]:
    num_bytes = call.case.bytes
    copy_us = limits.copy.at(num_bytes)
    kind = find_limit_kind(call.case.operator, num_bytes, written)
    if measured_us is None:
        limit_us = copy_us
        if kind == "plain kernel":
            kind, limit_us = "copy and fill", limits.copy_and_fill_us(num_bytes - written, written)
    else:
        limit_us = measured_us
    row = {"copy_us": copy_us, "of_copy": copy_us / us, "limit": kind, "limit_us": limit_us, "of_limit": limit_us / us}
    if call.case.operator in _MATMULS:
        row["tflops"] = 2 * call.case.params["m"] * call.case.params["n"] * call.case.params["k"] / us / 1e6
    return row


def _measure_peers(call: Call, kwargs: dict[str, Any], options: Options) -> dict[str, Any]:
    """Microseconds by peer, or the reason why there is none."""
    try:
        peers = make_peers(call, kwargs, options.peers, options.peer_folder)
    except Exception as failure:  # a peer that cannot be made leaves the operator's own time
        return dict.fromkeys(options.peers, _describe(failure))
    return {name: _try(functools.partial(_time_peer, peer)) for name, peer in peers.items()}


def _time_peer(peer: Callable[[], object]) -> float:
    return time_kernels([peer], _PEER_US)[0].us


def _try(work: Callable[[], float]) -> Any:
    try:
        return work()
    except Exception as failure:
        return _describe(failure)


def _describe(failure: Exception) -> str:
    first_line = next(iter(str(failure).splitlines()), "")
    return f"{type(failure).__name__}: {first_line}"[:200]
