"""executors: who traces and compiles: processes of this machine, or the workers of a Dask cluster (`--executor`).

    local               worker processes here (workers.py), nvcc in threads
    dask                a Dask cluster started here, with as many workers as --jobs
    dask://host:port    the cluster of that scheduler; its workers have this source tree, TileLang and nvcc

A worker gets names and returns bytes, and refuses work where its sources or its compiler are others than here, so that
every executor gives the same store. A lost worker's work is done again; a task that kills its workers is a reported
failure; a cluster that has no workers for a while ends the build with a sentence. What was done is in the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Protocol

from .cache import Cache
from .compile import (
    Compiled,
    CompileError,
    UnitResult,
    allow_compilers,
    compile_source,
    compile_unit,
    put_compiled,
    stop_compilers,
    symbols_of,
)
from .errors import BuildError
from .kernel_files import KERNELS_ROOT, REPOSITORY
from .plan import Variant, trace_key
from .toolchain import Toolchain, find_toolchain
from .units import Unit
from .workers import Outcome, attempt, run_in_workers

DEFAULT_PATIENCE = 60.0  # seconds without any Dask worker
LOCAL_PATIENCE = 5.0  # of a cluster started here: a worker that dies while it starts is not started again by Dask
MAX_RESTARTS = 10
POLL = 0.05  # seconds between looks at the tasks of a cluster
ALLOWED_FAILURES = 3  # workers that one task may lose, as Dask counts

TraceFiles = Callable[[Variant], dict[str, bytes]]


Results = Generator[UnitResult, None, None]


class Executor(Protocol):
    """Outcomes come in any order; `index` and `unit` say of what."""

    def trace(self, function: TraceFiles, variants: Sequence[Variant], timeout: float) -> Iterator[Outcome]: ...

    def compile(self, units: Sequence[Unit], toolchain: Toolchain, cache: Cache, root: Path) -> Results: ...

    def close(self) -> None: ...


def make_executor(wish: str, jobs: int, patience: float = DEFAULT_PATIENCE) -> Executor:
    """The executor that `--executor` names. A cluster is reached when there is work for it."""
    if wish == "local":
        return Local(jobs)
    if wish == "dask":
        return Dask(None, jobs, patience)
    if wish.startswith("dask://") and wish.count(":") == 2:
        return Dask(f"tcp://{wish.removeprefix('dask://')}", jobs, patience)
    raise BuildError(f"--executor must be local, dask or dask://host:port, got {wish!r}")


# ---- this machine ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Local:
    jobs: int

    def trace(self, function: TraceFiles, variants: Sequence[Variant], timeout: float) -> Iterator[Outcome]:
        return run_in_workers(function, variants, self.jobs, timeout)

    def compile(self, units: Sequence[Unit], toolchain: Toolchain, cache: Cache, root: Path) -> Results:
        allow_compilers()
        pool = ThreadPoolExecutor(max_workers=self.jobs)
        try:
            futures = [pool.submit(compile_unit, unit, toolchain, cache, root) for unit in units]
            for future in as_completed(futures):
                yield future.result()
        except BaseException:
            stop_compilers()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def close(self) -> None:
        """Its workers end with their work."""


# ---- a Dask cluster --------------------------------------------------------------------------------------------------


class Dask:
    """`address` None: a cluster of `jobs` workers on this machine, started by the first work and ended by close."""

    def __init__(self, address: str | None, jobs: int, patience: float) -> None:
        self.address, self.jobs, self.patience = address, jobs, patience
        self._cluster: Any = None
        self._client: Any = None

    def trace(self, function: TraceFiles, variants: Sequence[Variant], timeout: float) -> Iterator[Outcome]:
        tasks = [(variant, trace_key(variant), _name_of(function)) for variant in variants]
        for index, answer, seconds in self._run(trace_remotely, tasks, timeout):
            if isinstance(answer, str):
                yield Outcome(index, None, answer, False, "", seconds)
            else:
                value, error, worded = answer
                yield Outcome(index, value, error, worded, "", seconds)

    def compile(self, units: Sequence[Unit], toolchain: Toolchain, cache: Cache, root: Path) -> Results:
        allow_compilers()
        tasks = [(unit.source, symbols_of(unit.variants), unit.flags, compiler_id(toolchain)) for unit in units]
        for index, answer, seconds in self._run(compile_remotely, tasks, COMPILE_TIMEOUT):
            if isinstance(answer, Compiled):
                put_compiled(units[index], answer, toolchain, cache)
                yield UnitResult(units[index], answer, (), seconds, cached=False)
            elif isinstance(answer, str):
                raise BuildError(f"{units[index].id}: {answer}")
            else:  # nvcc refused it: compile here, where the variants at fault are found
                yield compile_unit(units[index], toolchain, cache, root)

    def _run(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], timeout: float
    ) -> Iterator[tuple[int, Any, float]]:
        """(index, answer, seconds) of each task; the answer is a text where no worker gave one."""
        if not tasks:
            return
        client = self._connect()

        def submit(indices: Iterable[int]) -> dict[Any, int]:
            return {client.submit(timed, function, tasks[index], pure=False): index for index in indices}

        waiting = submit(range(len(tasks)))
        start = last_seen = time.monotonic()
        restarts = 0
        try:
            while waiting:
                for future in [future for future in waiting if future.done()]:
                    yield waiting.pop(future), *_answer(future)
                now = time.monotonic()
                if self._has_workers(client):
                    last_seen = now
                elif self.address is None and now - last_seen > LOCAL_PATIENCE and restarts < MAX_RESTARTS:
                    restarts += 1
                    self.close()
                    client = self._connect()
                    waiting = submit(waiting.values())
                elif now - last_seen > self.patience:
                    raise BuildError(
                        f"the Dask cluster {client.scheduler.address} had no worker for {self.patience:.0f} s, "
                        f"{len(waiting)} of {len(tasks)} tasks are left; start workers (dask worker ADDRESS), then "
                        "build again: what is finished is in the cache"
                    )
                if now - start > timeout * (1 + len(tasks) / max(1, self.jobs)):
                    raise BuildError(f"{len(waiting)} tasks of the Dask cluster did not end in {now - start:.0f} s")
                time.sleep(POLL)
        finally:
            with contextlib.suppress(Exception):  # the cluster may be what failed
                client.cancel(list(waiting))

    def _connect(self) -> Any:
        if self._client is not None:
            return self._client
        try:
            import dask
            import distributed
        except ImportError:
            raise BuildError("--executor dask needs Dask: pip install -r requirements-dask.txt") from None
        dask.config.set({"distributed.scheduler.allowed-failures": ALLOWED_FAILURES})
        try:
            if self.address is None:
                self._cluster = distributed.LocalCluster(
                    n_workers=self.jobs, threads_per_worker=1, dashboard_address=":0", silence_logs=50,
                    env={"PYTHONPATH": str(REPOSITORY)},
                )  # fmt: skip
            self._client = distributed.Client(
                self._cluster or self.address, timeout=self.patience, set_as_default=False
            )
        except (OSError, TimeoutError) as error:
            raise BuildError(f"no Dask scheduler answers at {self.address}: {error}") from None
        return self._client

    def _has_workers(self, client: Any) -> bool:
        try:
            return bool(client.scheduler_info(n_workers=-1)["workers"])
        except Exception as error:  # whatever a connection that breaks raises
            raise BuildError(f"the Dask scheduler {self.address} does not answer any more: {error}") from None

    def close(self) -> None:
        for part in (self._client, self._cluster):
            if part is not None:
                with contextlib.suppress(Exception):
                    part.close()
        self._client = self._cluster = None


COMPILE_TIMEOUT = 1800.0


def _answer(future: Any) -> tuple[Any, float]:
    """The value and its seconds, or words about a task that ended without a value."""
    if future.status == "finished":
        value, seconds = future.result()
        return value, seconds
    error = future.exception() if future.status == "error" else None
    if type(error).__name__ == "KilledWorker":
        return f"the worker process died, as did {ALLOWED_FAILURES} before it", 0.0
    return f"the Dask cluster gave it up ({future.status}{f': {error}' if error else ''})", 0.0


def _name_of(function: Callable[..., Any]) -> tuple[str, str]:
    return function.__module__, function.__qualname__


# ---- what runs in a Dask worker --------------------------------------------------------------------------------------

_one_at_a_time = threading.Lock()  # a worker may have threads; TileLang and the kernel registry are of one thread


def timed(function: Callable[[Any], Any], task: Any) -> tuple[Any, float]:
    """The answer, and how long it took."""
    start = time.monotonic()
    answer = function(task)
    return answer, time.monotonic() - start


def trace_remotely(task: tuple[Variant, str, tuple[str, str]]) -> tuple[dict[str, bytes] | None, str | None, bool]:
    """(files, error, worded) of a variant, from this machine's own copy of the sources."""
    import importlib

    variant, key, (module, name) = task
    with _one_at_a_time:
        if not variant.file.is_file():  # another place of the same tree
            file = KERNELS_ROOT / variant.file.relative_to(variant.root)
            variant = dataclasses.replace(variant, file=file, root=KERNELS_ROOT)
        if not variant.file.is_file() or trace_key(variant) != key:
            return (
                None,
                f"a Dask worker has other kernel sources or another TileLang than this machine: {variant.file}",
                True,
            )
        return attempt(getattr(importlib.import_module(module), name), variant)


def compile_remotely(task: tuple[str, list[str], tuple[str, ...], tuple[str, str]]) -> Compiled | str | None:
    """The cubin, or None where nvcc refuses the source, or words where this machine must not compile it."""
    source, symbols, flags, wanted = task
    try:
        toolchain = find_toolchain()
    except BuildError as error:
        return f"a Dask worker cannot compile: {error}"
    if compiler_id(toolchain) != wanted:
        return (
            f"a Dask worker has nvcc and TileLang {compiler_id(toolchain)}, this machine {wanted}: make them the same"
        )
    allow_compilers()
    try:
        return compile_source(source, symbols, flags, toolchain)
    except CompileError:
        return None


def compiler_id(toolchain: Toolchain) -> tuple[str, str]:
    """What decides bytes of a cubin beside source and flags."""
    return toolchain.build, toolchain.tilelang
