"""progress: how far a stage is: a bar with counts and the time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import rich.progress
from rich.console import Console

PLAIN_INTERVAL = 10.0  # seconds between lines where there is no terminal
PLAIN_WIDTH = 140  # columns where there is no terminal: tables need not fold

Advance = Callable[[str], None]


def make_console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


@contextlib.contextmanager
def stage(console: Console, name: str, total: int) -> Iterator[Advance]:
    """Shows the stage `name` of `total` steps; call what it yields once a step, with what was done."""
    if total == 0:
        yield lambda _done: None
    elif console.is_terminal:
        with _bar(console) as bar:
            task = bar.add_task(name, total=total, done="")
            yield lambda done: bar.update(task, advance=1, done=done)
    else:
        yield _Lines(console, name, total)


def _bar(console: Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description:8}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("left"),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("[dim]{task.fields[done]}"),
        console=console,
        transient=True,
    )


class _Lines:
    """`trace 12/340 after 20 s, about 550 s left`, at most one line in PLAIN_INTERVAL, and one at the end."""

    def __init__(self, console: Console, name: str, total: int) -> None:
        self._console, self._name, self._total = console, name, total
        self._count, self._start = 0, time.monotonic()
        self._said = self._start

    def __call__(self, _done: str) -> None:
        self._count += 1
        now = time.monotonic()
        if now - self._said < PLAIN_INTERVAL and self._count < self._total:
            return
        self._said = now
        spent = now - self._start
        left = spent / self._count * (self._total - self._count)
        rest = f", about {left:.0f} s left" if self._count < self._total else ""
        self._console.print(f"{self._name} {self._count}/{self._total} after {spent:.0f} s{rest}")
