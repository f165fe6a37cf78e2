"""workers: run one function over many items in fresh processes, and live on when one of them dies.

Python's process pool fails every waiting task once a worker is killed, without saying which task did it. TileLang is a
compiler in C++ that can crash or run out of memory, so here each worker holds exactly one item. A dead worker's item is
done again, in case that something else killed it; one that kills ATTEMPTS workers is a failure with their last words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .errors import BuildError

ATTEMPTS = 3  # workers that one item may cost
EXIT_TIMEOUT = 10.0  # seconds for an idle worker to end by itself

_context = multiprocessing.get_context("spawn")  # fork would copy a process that has threads


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of `items[index]`: a value or the text of an error. `output` is what the worker printed."""

    index: int
    value: Any
    error: str | None
    worded: bool  # the error is a BuildError: its text needs neither traceback nor output to be understood
    output: str
    seconds: float
    died: bool = False  # the worker did, of something else than the time limit
    cpu_seconds: float = 0.0  # of the worker, which on a busy machine says more; 0 where nobody counted


def run_in_workers(
    function: Callable[[Any], Any], items: Sequence[Any], jobs: int, timeout: float
) -> Iterator[Outcome]:
    """Outcomes as they come. `function` is importable, items and values picklable; `timeout` is seconds an item."""
    waiting = deque(range(len(items)))
    deaths = [0] * len(items)
    workers: list[_Worker] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(_Worker(function))
                workers[-1].give(waiting.popleft(), items)
            for worker in _ready(workers, timeout):
                outcome, alive = worker.take(timeout)
                if alive and waiting:
                    worker.give(waiting.popleft(), items)
                else:
                    worker.end()
                    workers.remove(worker)
                deaths[outcome.index] += outcome.died
                if outcome.died and deaths[outcome.index] < ATTEMPTS:
                    waiting.append(outcome.index)
                else:
                    yield outcome
    finally:
        for worker in workers:
            worker.end()


def _ready(workers: Sequence[_Worker], timeout: float) -> list[_Worker]:
    """Workers that have an answer, have died or have run out of time; waits for the first."""
    deadline = min(worker.started for worker in workers) + timeout
    ends = [end for worker in workers for end in (worker.connection, worker.process.sentinel)]
    signalled = multiprocessing.connection.wait(ends, max(0.0, deadline - time.monotonic()))
    now = time.monotonic()
    return [
        worker
        for worker in workers
        if worker.connection in signalled or worker.process.sentinel in signalled or now - worker.started >= timeout
    ]


class _Worker:
    """A process that answers one item at a time."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        descriptor, self._log_name = tempfile.mkstemp(prefix="tilekernels-worker-")
        os.close(descriptor)
        self.connection, other_end = _context.Pipe()
        self.process = _context.Process(target=_serve, args=(other_end, function, self._log_name), daemon=True)
        # Ctrl-C is the parent's to handle: a new process inherits that the signal is blocked, from its first moment
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        other_end.close()
        self.index = -1
        self.started = 0.0
        self.idle = True

    def give(self, index: int, items: Sequence[Any]) -> None:
        self.index, self.started, self.idle = index, time.monotonic(), False
        with contextlib.suppress(OSError):  # a worker that died meanwhile is noticed by take
            self.connection.send(items[index])

    def take(self, timeout: float) -> tuple[Outcome, bool]:
        """The outcome of the item in work, and whether the worker can take another."""
        seconds = time.monotonic() - self.started
        try:
            if self.connection.poll():
                value, error, worded, output, cpu_seconds = self.connection.recv()
                self.idle = True
                outcome = Outcome(self.index, value, error, worded, output, seconds, cpu_seconds=cpu_seconds)
                return outcome, True
        except (EOFError, OSError):
            pass
        died = not self.process.is_alive() or seconds < timeout
        if not died:
            words = f"the worker process was stopped after {timeout:.0f} s"
        else:
            self.process.join(10)
            words = f"the worker process died ({_exit_words(self.process.exitcode)}), as did {ATTEMPTS - 1} before it"
        output = Path(self._log_name).read_text(errors="replace")
        return Outcome(self.index, None, words, False, output, seconds, died), False

    def end(self) -> None:
        self.connection.close()
        if self.idle:
            self.process.join(EXIT_TIMEOUT)  # it sees the closed pipe; a killed one would leave semaphores behind
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        with contextlib.suppress(OSError):
            os.unlink(self._log_name)


def _exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"


def _serve(connection: Connection, function: Callable[[Any], Any], log_name: str) -> None:
    """The worker's main loop. Its output goes to a file, from where the parent can read it even after a crash."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(log_name, os.O_RDWR | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while True:
            item = connection.recv()
            os.ftruncate(log, 0)
            os.lseek(log, 0, os.SEEK_SET)
            start = time.process_time()
            value, error, worded = attempt(function, item)
            cpu_seconds = time.process_time() - start
            sys.stdout.flush()
            sys.stderr.flush()
            connection.send((value, error, worded, Path(log_name).read_text(errors="replace"), cpu_seconds))


def _end_with_parent() -> None:
    """A builder that is killed cannot end its workers, which may be minutes from noticing it by themselves."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def attempt(function: Callable[[Any], Any], item: Any) -> tuple[Any, str | None, bool]:
    """(value, error, worded) of one call that must not raise."""
    try:
        return function(item), None, False
    except BuildError as error:  # worded for people already
        return None, str(error), True
    except BaseException:  # SystemExit too: an item's failure must not end the others
        return None, traceback.format_exc(), False
