"""Worker processes: one item's crash, hang or garbage is that item's failure and nobody else's."""

from __future__ import annotations

import multiprocessing.util
import os
import signal
import sys
import time
from pathlib import Path

from build_tools.errors import BuildError
from build_tools.workers import Outcome, run_in_workers


def work(item: str) -> str:
    """Runs in a worker."""
    print(f"working on {item}", flush=True)
    if item == "raises":
        raise ValueError("cannot do this one")
    if item == "refuses":
        raise BuildError("worded for people")
    if item == "exits":
        sys.exit("enough")
    if item == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if item == "crashes":
        print("last words", file=sys.stderr, flush=True)
        os.abort()
    if item == "hangs":
        time.sleep(600)
    if item == "who":
        return str(os.getpid())
    return item.upper()


def outcomes(items: list[str], jobs: int = 2, timeout: float = 60) -> dict[str, Outcome]:
    found = list(run_in_workers(work, items, jobs, timeout))
    assert sorted(outcome.index for outcome in found) == list(range(len(items)))
    return {items[outcome.index]: outcome for outcome in found}


def test_every_item_has_its_own_outcome() -> None:
    found = outcomes(["a", "raises", "killed", "refuses", "b", "exits", "crashes", "c"])
    assert {item: outcome.value for item, outcome in found.items() if outcome.error is None} == {
        "a": "A",
        "b": "B",
        "c": "C",
    }
    assert found["a"].output == "working on a\n"
    assert (found["refuses"].error, found["refuses"].worded) == ("worded for people", True)
    assert not any(found[item].worded for item in ("raises", "killed", "exits", "crashes"))
    assert (found["raises"].error or "").startswith("Traceback")
    assert (found["raises"].error or "").endswith("ValueError: cannot do this one\n")
    assert "SystemExit: enough" in (found["exits"].error or "")
    assert found["killed"].error == "the worker process died (signal SIGKILL), as did 2 before it"
    assert found["killed"].output == "working on killed\n"
    assert found["crashes"].error == "the worker process died (signal SIGABRT), as did 2 before it"
    assert "last words" in found["crashes"].output


def test_a_hanging_item_is_stopped_and_the_others_go_on() -> None:
    start = time.monotonic()
    found = outcomes(["hangs", "a", "b"], timeout=3)
    assert found["hangs"].error == "the worker process was stopped after 3 s"
    assert (found["a"].value, found["b"].value) == ("A", "B")
    assert time.monotonic() - start < 30


def test_workers_are_used_again() -> None:
    found = list(run_in_workers(work, ["who"] * 6, 2, 60))
    assert len({outcome.value for outcome in found}) <= 2


def test_leaving_early_ends_the_workers() -> None:
    running = run_in_workers(work, ["who", "hangs"], 2, 60)
    first = next(running)
    running.close()
    assert not Path(f"/proc/{first.value}").exists()


def test_nothing_to_do_starts_nothing() -> None:
    assert list(run_in_workers(work, [], 2, 60)) == []


def test_a_worker_that_is_done_ends_by_itself(tmp_path: Path) -> None:
    (outcome,) = run_in_workers(end_with_a_word, [str(tmp_path / "ended")], 1, 60)
    assert outcome.error is None
    assert (tmp_path / "ended").read_text() == "by itself"


def end_with_a_word(file: str) -> None:
    """Runs in a worker: writes a file when the interpreter shuts down in good order."""
    multiprocessing.util.Finalize(None, Path(file).write_text, ("by itself",), exitpriority=10)
