"""Builds one wheel in one piece, in shards, and on Dask clusters that lose a worker, and compares the bytes.

    python benchmarks/spread.py [--only 'transpose.*'] [--output benchmarks/results/build/spread.txt]

Each build starts with an empty cache. Of a cluster's workers (2, then 4), one is killed with SIGKILL when half of the
variants are traced. Needs the build environment with requirements-dask.txt; no GPU. Minutes: variants are traced anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from build_tools.packing import Interpreter, pack  # noqa: E402 - found beside this folder

STORE = (
    ROOT / "build" / "store" / "spread"
)  # one place for all, as the packed paths are part of no byte but of CMake's work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="transpose.*")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    lines: list[str] = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory(prefix="tilekernels-spread-") as name:
        scratch = Path(name)
        found = {
            "in one piece": measured(say, "in one piece", scratch, lambda: build(arguments.only, scratch)),
            "two shards": measured(say, "two shards", scratch, lambda: build_shards(arguments.only, scratch)),
        }
        for num_workers in (2, 4):
            how = f"{num_workers} Dask workers, one killed"
            found[how] = measured(say, how, scratch, lambda n=num_workers: build_on_cluster(arguments.only, scratch, n))
    equal = len({digest for _, digest in found.values()}) == 1
    say(f"all {len(found)} wheels have the same bytes: {equal}")
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")
    sys.exit(0 if equal else 1)


def measured(say: Callable[[str], None], how: str, scratch: Path, work: Callable[[], str]) -> tuple[str, str]:
    """Run one build from nothing; say how long it took and what the wheel's bytes are."""
    shutil.rmtree(STORE, ignore_errors=True)
    shutil.rmtree(scratch / "cache", ignore_errors=True)
    start = time.monotonic()
    note = work()
    seconds = time.monotonic() - start
    wheel = pack(STORE, scratch / "dist", Interpreter.running())
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    say(f"{how}: built in {seconds:.0f} s{note}; {wheel.name} sha256 {digest}")
    return wheel.name, digest


def run(scratch: Path, *arguments: str) -> None:
    environment = os.environ | {"TILEKERNELS_CACHE": str(scratch / "cache")}
    command = [sys.executable, "-m", "build_tools", *arguments]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(command)} ended with {result.returncode}\n{result.stdout}{result.stderr}")


def build(only: str, scratch: Path) -> str:
    run(scratch, "build", "--profile", "smoke", "--only", only, "--store", str(STORE))
    return ""


def build_shards(only: str, scratch: Path) -> str:
    folders = [scratch / f"shard{number}" for number in (1, 2)]
    for number, folder in enumerate(folders, 1):
        shard = ("--shard", f"{number}/2", "--store", str(folder))
        run(scratch, "build", "--profile", "smoke", "--only", only, *shard)
        shutil.rmtree(scratch / "cache", ignore_errors=True)
    run(scratch, "merge", *map(str, folders), "--profile", "smoke", "--only", only, "--store", str(STORE))
    return ""


def build_on_cluster(only: str, scratch: Path, num_workers: int) -> str:
    listed = [sys.executable, "-m", "build_tools", "list", "--json", "--profile", "smoke", "--only", only]
    half = len(json.loads(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout)) // 2
    with cluster(scratch, num_workers) as (address, workers):
        killed: list[float] = []

        def kill_half_way() -> None:
            start = time.monotonic()
            while len(list((scratch / "cache").glob("trace-1/*/*"))) < half:
                time.sleep(0.2)
            workers[0].kill()
            killed.append(time.monotonic() - start)

        threading.Thread(target=kill_half_way, daemon=True).start()
        run(scratch, "build", "--profile", "smoke", "--only", only, "--store", str(STORE), "--executor", address)
        code = workers[0].wait(timeout=60)
    return f", a worker ended by {signal.Signals(-code).name} after {killed[0]:.0f} s"


@contextmanager
def cluster(scratch: Path, num_workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """A scheduler and workers as a cluster's operator starts them."""
    started: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def launch(program: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"distributed.cli.dask_{program}", *arguments]
        with (scratch / "dask.log").open("ab") as log:
            started.append(subprocess.Popen(command, cwd=scratch, env=environment, stdout=log, stderr=log))
        return started[-1]

    try:
        file = scratch / f"scheduler{num_workers}.json"
        launch("scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file), "--host", "127.0.0.1")
        while not file.exists():
            time.sleep(0.2)
        address = json.loads(file.read_text())["address"]
        options = ("--nthreads", "1", "--no-dashboard", "--no-nanny", "--local-directory", str(scratch / "dask"))
        workers = [launch("worker", address, *options) for _ in range(num_workers)]
        yield address.replace("tcp://", "dask://"), workers
    finally:
        for process in started:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
