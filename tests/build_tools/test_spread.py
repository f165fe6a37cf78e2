"""One build by several: shards that are merged, a Dask cluster that loses workers. The store is always the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from build_tools import build as build_module
from build_tools.__main__ import main
from build_tools.errors import BuildError
from build_tools.executors import make_executor
from build_tools.plan import Profile, plan
from build_tools.shards import Shard, parse_shard, variants_of_shard
from tests.build_tools import fake_trace

REPOSITORY = Path(__file__).resolve().parents[2]
KERNEL = '''"""Scales."""

from kernels_src.declare import grid, kernel


@kernel(axes=grid({axes}), archs=("sm_80", "sm_90a"))
def {name}({names}):
    """Scale x."""
'''


@pytest.fixture
def kernels(tmp_path: Path) -> Callable[..., Path]:
    """Adds a kernel file with the given axes; returns the root."""

    def write(kernel: str = "scale", **axes: tuple[Any, ...]) -> Path:
        root = tmp_path / "kernels"
        (root / "demo").mkdir(parents=True, exist_ok=True)
        listed = ", ".join(f"{name}={values!r}" for name, values in axes.items())
        text = KERNEL.format(name=kernel, axes=listed, names=", ".join(axes))
        (root / "demo" / f"{kernel}.py").write_text(text)
        return root

    return write


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs a command with a cache of its own for each store."""
    monkeypatch.setattr(build_module, "trace_files", fake_trace.trace_files)
    monkeypatch.setattr(build_module, "signature_files", fake_trace.signature_files)
    profile = tmp_path / "test.toml"
    profile.write_text('archs = ["sm_90a"]\n')

    def invoke(command: str, store: str, *arguments: str, profile: Path = profile) -> Result:
        monkeypatch.setenv("TILEKERNELS_CACHE", str(tmp_path / f"cache-{store}"))
        common = ["--profile", str(profile), "--store", str(tmp_path / store), "--kernels", str(tmp_path / "kernels")]
        return CliRunner().invoke(main, [command, *common, *arguments])

    return invoke


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


# ---- shards ----------------------------------------------------------------------------------------------------------


def test_every_variant_is_in_one_shard_and_units_are_not_cut(kernels: Callable[..., Path]) -> None:
    root = kernels("scale", factor=tuple(range(40)))
    kernels("shift", factor=tuple(range(3)))
    planned = plan(Profile("test", ("sm_80", "sm_90a")), root=root)
    for total in (1, 2, 3, 7, 50):
        parts = [variants_of_shard(planned, Shard(number, total)) for number in range(1, total + 1)]
        assert sorted(variant.symbol + variant.arch for part in parts for variant in part) == sorted(
            variant.symbol + variant.arch for variant in planned
        )
        sizes = sorted(len([v for v in part if v.kernel == "demo.scale" and v.arch == "sm_80"]) for part in parts)
        assert sum(sizes) == 40
        assert all(size % 16 in (0, 8) for size in sizes)  # 16 + 16 + 8


@pytest.mark.parametrize("text", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2", "1/2/3", "1 / 2"])
def test_a_shard_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match=r"--shard must be i/n with 1 <= i <= n, such as 2/3, got"):
        parse_shard(text)


def test_merged_shards_are_the_build_in_one_piece(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("scale", "shift", "turn"):
        kernels(name, factor=(2, 3))
    assert run("build", "whole").exit_code == 0
    for number in (1, 2):
        part = run("build", f"part{number}", "--shard", f"{number}/2")
        assert part.exit_code == 0, part.output
        assert not (tmp_path / f"part{number}" / "manifest.json").exists()
    merged = run("merge", "merged", str(tmp_path / "part2"), str(tmp_path / "part1"))
    assert merged.exit_code == 0, merged.output
    assert content(tmp_path / "merged") == content(tmp_path / "whole")


def test_merge_refuses_what_does_not_belong_together(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    for name in ("scale", "shift"):
        kernels(name, factor=(2, 3))
    assert run("build", "part1", "--shard", "1/2").exit_code == 0
    parts = [str(tmp_path / f"part{number}") for number in (1, 2)]

    def problem(*folders: str) -> str:
        result = run("merge", "merged", *folders)
        assert result.exit_code == 1
        assert not (tmp_path / "merged" / "manifest.json").exists()
        return result.output

    assert "error: shards are missing: 2/2; build them by --shard" in problem(parts[0])
    assert f"{parts[1]} holds no finished shard (shard.json)" in problem(*parts)
    kernels("shift", factor=(2, 4))
    assert f"error: {parts[0]} is a shard of another build (profile, archs" in problem(parts[0])
    kernels("shift", factor=(2, 3))
    assert run("build", "part2", "--shard", "2/2").exit_code == 0
    entry = next(path for path in sorted((tmp_path / "part2" / "entries").rglob("*")) if path.is_file())
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    assert f"error: {parts[1]} is damaged: its compile entry" in problem(*parts)


# ---- executors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wish", ["ray", "dask://", "dask://host", "dask:host:1", ""])
def test_an_unknown_executor_is_refused(wish: str) -> None:
    with pytest.raises(BuildError, match="--executor must be local, dask or dask://host:port, got"):
        make_executor(wish, 1)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[int], tuple[str, list[subprocess.Popen[bytes]]]]]:
    """Starts a scheduler and workers as a cluster's operator does; workers import this tree."""
    pytest.importorskip("distributed")
    started: list[subprocess.Popen[bytes]] = []
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "DASK_DISTRIBUTED__WORKER__DAEMON": "False"}

    def launch(*command: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "dask.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "distributed.cli.dask_" + command[0], *command[1:]],
                cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        started.append(process)
        return process

    def start(num_workers: int) -> tuple[str, list[subprocess.Popen[bytes]]]:
        file = tmp_path / "scheduler.json"
        launch("scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file), "--host", "127.0.0.1")
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        options = ("--nthreads", "1", "--no-dashboard", "--no-nanny", "--local-directory", str(tmp_path / "dask"))
        workers = [launch("worker", address, *options) for _ in range(num_workers)]
        return address.replace("tcp://", "dask://"), workers

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_cluster_that_loses_a_worker_makes_the_same_store(
    run: Callable[..., Result],
    kernels: Callable[..., Path],
    cluster: Callable[[int], tuple[str, list[subprocess.Popen[bytes]]]],
    tmp_path: Path,
) -> None:
    kernels(factor=tuple(range(2, 10)), mode=("slow",))
    assert run("build", "whole").exit_code == 0
    address, workers = cluster(2)

    def kill_half_way() -> None:
        for _ in range(600):
            if len(list((tmp_path / "cache-spread").rglob("trace-1/*/*"))) >= 3:
                workers[0].kill()
                return
            time.sleep(0.05)

    victim = threading.Thread(target=kill_half_way)
    victim.start()
    result = run("build", "spread", "--executor", address)
    victim.join()
    assert result.exit_code == 0, result.output
    assert workers[0].wait(timeout=30) == -signal.SIGKILL
    assert content(tmp_path / "spread") == content(tmp_path / "whole")


def test_a_cluster_without_workers_ends_in_a_sentence(
    run: Callable[..., Result],
    kernels: Callable[..., Path],
    cluster: Callable[[int], tuple[str, list[subprocess.Popen[bytes]]]],
) -> None:
    kernels(factor=(2, 3))
    address, _ = cluster(0)
    result = run("build", "spread", "--executor", address, "--patience", "2")
    assert result.exit_code == 1
    assert "had no worker for 2 s, 2 of 2 tasks are left; start workers (dask worker ADDRESS), then" in result.output
    assert "Traceback" not in result.output


def test_no_scheduler_is_a_sentence(run: Callable[..., Result], kernels: Callable[..., Path]) -> None:
    pytest.importorskip("distributed")
    kernels(factor=(2,))
    result = run("build", "spread", "--executor", "dask://127.0.0.1:9", "--patience", "1")
    assert result.exit_code == 1
    assert "no Dask scheduler answers at tcp://127.0.0.1:9" in result.output


def test_a_task_that_kills_its_workers_is_a_reported_failure(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    """With a cluster started here, whose workers are started again; the other variants are built."""
    pytest.importorskip("distributed")
    kernels(mode=("fine", "dies"), factor=(2,))
    result = run("build", "spread", "--executor", "dask", "--jobs", "2", "--report", str(tmp_path / "report.json"))
    assert result.exit_code == 1, result.output
    assert (tmp_path / "report.json").exists(), result.output
    (failure,) = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert (failure["stage"], failure["variant"]) == ("trace", "dies_f2")
    assert failure["sentence"] == "the worker process died, as did 3 before it"
    assert not (tmp_path / "spread" / "manifest.json").exists()


def test_a_worker_with_other_sources_refuses(
    run: Callable[..., Result],
    kernels: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Keys travel with the names: here the client believes in another key than the worker finds."""
    pytest.importorskip("distributed")
    kernels(factor=(2,))
    monkeypatch.setattr("build_tools.executors.trace_key", lambda variant: "0" * 64)
    result = run("build", "spread", "--executor", "dask", "--jobs", "1")
    assert result.exit_code == 1
    assert "a Dask worker has other kernel sources or another TileLang than this machine" in result.output


def test_a_build_goes_on_where_an_interrupted_one_stopped(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    kernels(factor=(2, 3, 4))
    assert run("build", "whole").exit_code == 0
    assert run("build", "stopped", "--only", "demo.scale/f2").exit_code == 0  # as much as was finished
    assert run("build", "stopped", "--report", str(tmp_path / "report.json")).exit_code == 0
    traces = json.loads((tmp_path / "report.json").read_text())["traces"]
    assert {trace["variant"]: trace["cached"] for trace in traces} == {"f2": True, "f3": False, "f4": False}
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")
    shutil.rmtree(tmp_path / "stopped")
    assert run("build", "stopped").exit_code == 0
    assert content(tmp_path / "stopped") == content(tmp_path / "whole")
