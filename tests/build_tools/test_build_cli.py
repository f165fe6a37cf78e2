"""`python -m build_tools` from kernel files to a store: a stand-in for TileLang and real nvcc, and once both real."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from build_tools import build as build_module
from build_tools.__main__ import main
from tests.build_tools import fake_trace

REPOSITORY = Path(__file__).resolve().parents[2]
TEMPLATE = '''"""Scales."""

from kernels_src.declare import grid, kernel


@kernel(axes=grid({axes}), archs=("sm_90a",))
def scale({names}):
    """Scale x."""
'''


@pytest.fixture
def kernels(tmp_path: Path) -> Callable[..., Path]:
    """Writes the one kernel file of a kernels_src with the given axes; returns its root."""

    def write(**axes: tuple[Any, ...]) -> Path:
        root = tmp_path / "kernels"
        (root / "demo").mkdir(parents=True, exist_ok=True)
        listed = ", ".join(f"{name}={values!r}" for name, values in axes.items())
        (root / "demo" / "scale.py").write_text(TEMPLATE.format(axes=listed, names=", ".join(axes)))
        return root

    return write


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Callable[..., Path]) -> Callable[..., Result]:
    """Runs a command on that kernels_src, with a cache and a store of this test's own."""
    monkeypatch.setenv("TILEKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "trace_files", fake_trace.trace_files)
    monkeypatch.setattr(build_module, "signature_files", fake_trace.signature_files)
    profile = tmp_path / "test.toml"
    profile.write_text('archs = ["sm_90a"]\n')

    def invoke(command: str, *arguments: str) -> Result:
        common = ["--profile", str(profile), "--store", str(tmp_path / "store")]
        if command != "clean":
            common += ["--kernels", str(tmp_path / "kernels")]
        return CliRunner().invoke(main, [command, *common, *arguments])

    return invoke


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def test_list(run: Callable[..., Result], kernels: Callable[..., Path]) -> None:
    kernels(factor=(2, 3), rounding=("up", "down"))
    result = run("list")
    assert result.exit_code == 0
    assert "demo.scale" in result.output
    assert "factor: 2, 3  rounding: up, down" in result.output
    listed = json.loads(run("list", "--json").output)
    assert [(entry["kernel"], entry["variant"], entry["arch"]) for entry in listed] == [
        ("demo.scale", f"f{factor}_{rounding}", "sm_90a") for factor in (2, 3) for rounding in ("up", "down")
    ]
    assert listed[1]["config"] == {"factor": 2, "rounding": "down"}


def test_list_counts_and_estimates(run: Callable[..., Result], kernels: Callable[..., Path]) -> None:
    kernels(factor=(2, 3))
    output = run("list", "--jobs", "1").output
    (row,) = [line.split("\u2502") for line in output.splitlines() if "demo.scale" in line]
    assert row[2].strip() == "2"
    assert int(row[3]) > 0  # no build of it is recorded: the mean of those that are
    assert "by 1 workers, nothing cached" in output


def test_explain_says_where_each_value_came_from(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    root = kernels(factor=(2, 3, 20), rounding=("up", "down"))
    profile = tmp_path / "mine.toml"
    profile.write_text(
        'archs = ["sm_90a", "sm_80"]\n[operators]\ninclude = ["demo.*"]\n["demo.scale"]\nfactor = [2, 20]\n'
    )
    result = run("list", "--explain", "demo.scale", "--profile", str(profile))
    assert result.output.splitlines() == [
        f"demo.scale: 4 variants, declared in {root}/demo/scale.py:6",
        f"  built: include 'demo.*' in {profile}:3",
        f"  archs: sm_90a from {profile}:1; sm_80: not among the archs in {root}/demo/scale.py:6",
        f"  factor: 2, 20: from {profile}:5, of 2, 3, 20 in {root}/demo/scale.py:6",
        f"  rounding: up, down: all that {root}/demo/scale.py:6 declares",
        "  4 of 6 combinations are built",
    ]
    unknown = run("list", "--explain", "moe.*")
    assert unknown.exit_code == 1
    assert "--explain moe.* matches no kernel; kernels: demo.scale" in unknown.output


def test_build_then_nothing_to_do_then_one_change(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    kernels(factor=(2, 3))
    cold = run("build", "--report", str(tmp_path / "report.json"))
    assert cold.exit_code == 0, cold.output
    store = content(tmp_path / "store")
    assert {name for name in store if not name.startswith("gen/")} == {
        "manifest.json",
        *(f"units/demo/scale/sm_90a/0/{name}" for name in ("unit.cu", "unit.cubin", "ptxas.txt")),
        *(f"variants/demo/scale/sm_90a/f{f}/{name}" for f in (2, 3) for name in ("kernel.cu", "launch.json")),
    }
    assert "gen/blobs.S" in store
    assert "spills: none" in cold.output
    assert "2 variants are in" in cold.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ok"], report["variants"], report["failures"]) == (True, 2, [])
    assert report["operators"][0]["kernel"] == "demo.scale"
    assert report["operators"][0]["bytes"] == len(store["units/demo/scale/sm_90a/0/unit.cubin"])
    assert [kernel["symbol"] for kernel in report["kernels"]] == ["tk_demo_scale__f2", "tk_demo_scale__f3"]

    warm = run("build")
    assert warm.exit_code == 0
    assert warm.output.startswith("nothing was to be done: 2 variants are up to date in ")
    assert content(tmp_path / "store") == store

    kernels(factor=(2,))
    narrowed = run("build")
    assert narrowed.exit_code == 0
    assert "variants/demo/scale/sm_90a/f3/kernel.cu" not in content(tmp_path / "store")
    assert [entry["variant"] for entry in json.loads((tmp_path / "store/manifest.json").read_text())["variants"]] == [
        "f2"
    ]


def test_parameters_do_not_depend_on_what_a_profile_leaves_out(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    """Programs are compiled against ops.h of one profile and run with the library of another."""
    kernels(mode=("fine", "scaled"), factor=(2,))
    profile = tmp_path / "narrow.toml"
    profile.write_text('archs = ["sm_90a"]\n["demo.scale"]\nmode = ["fine"]\n')
    assert run("build", "--profile", str(profile)).exit_code == 0
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    (kernel,) = manifest["kernels"]
    assert [variant["variant"] for variant in manifest["variants"]] == ["fine_f2"]
    assert [(param["name"], param["optional"], param["dtypes"]) for param in kernel["params"]] == [
        ("x", False, ["float32"]),
        ("scale", True, ["bfloat16"]),
        ("out", False, ["float32"]),
    ]
    header = (tmp_path / "store" / "gen" / "ops.h").read_text()
    assert header.index("* x;") < header.index("* scale;") < header.index("* out;")
    assert "in no variant of this build" in header


def test_another_store_and_cache_give_the_same_bytes(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(factor=(2, 3))
    assert run("build").exit_code == 0
    monkeypatch.setenv("TILEKERNELS_CACHE", str(tmp_path / "other_cache"))
    assert run("build", "--store", str(tmp_path / "other" / "place"), "--jobs", "1").exit_code == 0
    assert content(tmp_path / "store") == content(tmp_path / "other" / "place")


def test_all_failures_are_reported_at_once_and_the_rest_is_built(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    root = kernels(mode=("fine", "raises", "dies", "refused"), factor=(2,))
    result = run("build", "--report", str(tmp_path / "report.json"))
    assert result.exit_code == 1
    failures = {entry["variant"]: entry for entry in json.loads((tmp_path / "report.json").read_text())["failures"]}
    assert {variant: (entry["stage"], entry["sentence"]) for variant, entry in failures.items()} == {
        "raises_f2": ("trace", "ValueError: no layout fits this tile"),
        "dies_f2": ("trace", "the worker process died (signal SIGKILL), as did 2 before it"),
        "refused_f2": ("compile", "nvcc ended with exit code 1"),
    }
    for variant, mode in (("raises_f2", "raises"), ("dies_f2", "dies"), ("refused_f2", "refused")):
        assert f"failed: demo.scale {{mode: {mode}, factor: 2}} sm_90a" in result.output
        kept = tmp_path / "store" / "failed" / "demo" / "scale" / "sm_90a" / variant
        assert f"kept     {kept}" in result.output
        assert (kept / "output.txt").is_file()
    assert result.output.count(f"file     {root / 'demo' / 'scale.py'}") == 3
    assert 'identifier "no_such_function" is undefined' in result.output
    assert "tracing dies_f2" in result.output
    assert "no_such_function" in (tmp_path / "store/failed/demo/scale/sm_90a/refused_f2/unit.cu").read_text()
    assert "3 of 4 variants failed" in result.output
    assert not (tmp_path / "store" / "manifest.json").exists()

    kernels(mode=("fine",), factor=(2,))
    mended = run("build")
    assert mended.exit_code == 0, mended.output
    assert not (tmp_path / "store" / "failed").exists()
    assert (tmp_path / "store" / "manifest.json").is_file()


def test_failures_of_one_cause_are_printed_once_and_listed(
    run: Callable[..., Result], kernels: Callable[..., Path]
) -> None:
    kernels(mode=("raises", "refused"), factor=(2, 3, 4))
    result = run("build")
    assert result.exit_code == 1
    assert result.output.count("failed: demo.scale") == 2
    assert result.output.count('identifier "no_such_function" is undefined') == 1
    for mode in ("raises", "refused"):
        for factor in (3, 4):
            assert f"as well  demo.scale {{mode: {mode}, factor: {factor}}} sm_90a, kept " in result.output
    assert "6 of 6 variants failed" in result.output


def test_a_worded_error_is_shown_without_what_the_worker_printed(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    kernels(mode=("refuses",))
    result = run("build")
    assert "problem  TileLang cannot lower it (line 3): TypeError: too few" in result.output
    assert "tracing refuses" not in result.output
    kept = (tmp_path / "store/failed/demo/scale/sm_90a/refuses/output.txt").read_text()
    assert kept == "tracing refuses\nTileLang cannot lower it (line 3):\n  TypeError: too few\n"


def test_an_edit_during_the_build_is_noted_and_not_cached(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    kernels(mode=("edits",))
    result = run("build")
    assert result.exit_code == 0, result.output
    assert (
        f"note: {tmp_path / 'kernels' / 'demo' / 'scale.py'} changed while it was traced: build again" in result.output
    )
    assert not list((tmp_path / "cache").glob("trace-*/*/*"))


def test_a_failing_build_takes_the_manifest_of_the_last_one_away(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    kernels(mode=("fine",))
    assert run("build").exit_code == 0
    kernels(mode=("fine", "raises"))
    assert run("build").exit_code == 1
    assert not (tmp_path / "store" / "manifest.json").exists()


def test_the_stages_run_alone_and_take_edits_by_hand(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    kernels(factor=(2, 3))
    early = run("compile")
    assert early.exit_code == 1
    assert "holds no traced variant to compile: run the trace command with the same options" in early.output
    assert run("trace").exit_code == 0
    assert not (tmp_path / "store" / "units").exists()
    source = tmp_path / "store/variants/demo/scale/sm_90a/f2/kernel.cu"
    source.write_text(source.read_text().replace("(float)2", "(float)77"))
    result = run("compile")
    assert result.exit_code == 0, result.output
    assert "(float)77" in (tmp_path / "store/units/demo/scale/sm_90a/0/unit.cu").read_text()
    assert (tmp_path / "store/units/demo/scale/sm_90a/0/unit.cubin").stat().st_size > 0
    assert not (tmp_path / "store" / "manifest.json").exists()
    built = run("build")
    assert built.exit_code == 0
    assert "(float)77" not in source.read_text()


def test_only_selects_kernels_and_variants(run: Callable[..., Result], kernels: Callable[..., Path]) -> None:
    kernels(factor=(2, 3, 20))
    listed = json.loads(run("list", "--json", "--only", "demo.scale/f2*").output)
    assert [entry["variant"] for entry in listed] == ["f2", "f20"]
    assert len(json.loads(run("list", "--json", "--only", "demo.*").output)) == 3
    nothing = run("list", "--only", "moe.*")
    assert nothing.exit_code == 1
    assert "--only moe.* matches no variant; kernels: demo.scale" in nothing.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--archs", "sm_91"), "unknown arch 'sm_91'; allowed: sm_80, sm_89, sm_90a"),
        (("--profile", "no_such_profile"), "no profile no_such_profile"),
    ],
    ids=["arch", "profile"],
)
def test_wrong_options_are_one_sentence(
    run: Callable[..., Result], kernels: Callable[..., Path], arguments: tuple[str, ...], words: str
) -> None:
    kernels(factor=(2,))
    result = run("build", *arguments)
    assert result.exit_code == 1
    assert result.output.startswith("error: ")
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_full_disk_is_one_sentence_and_leaves_no_finished_store(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(factor=(2,))
    assert run("build").exit_code == 0
    kernels(factor=(3,))

    def refuse(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("build_tools.store.replace_file", refuse)
        result = run("build")
    assert result.exit_code == 1
    assert "error: " in result.output
    assert "kernel.cu: No space left on device; no file is half written: mend this and build again" in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "store" / "manifest.json").exists()
    again = run("build")
    assert again.exit_code == 0, again.output


def test_an_arch_that_nvcc_does_not_know_is_told_before_the_trace(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(factor=(2,))
    compiler = tmp_path / "nvcc"
    compiler.write_text(
        '#!/bin/sh\ncase $1 in --list-gpu-code) echo sm_80; echo sm_89 ;; *) echo "V13.0.1"; echo "Build x" ;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CUDACXX", str(compiler))
    result = run("build")
    assert result.exit_code == 1
    assert (
        f"error: nvcc 13.0.1 ({compiler}) does not know sm_90a; it knows sm_80, sm_89: build without it"
        in result.output
    )
    assert not (tmp_path / "store").exists()


def test_a_read_only_cache_serves_and_says_what_it_cannot(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels(factor=(2,))
    assert run("build").exit_code == 0
    kernels(factor=(2, 3))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("build_tools.cache.os", _OsWith(refuse))
    result = run("build")
    assert result.exit_code == 0, result.output
    assert "note: the cache could not be written" in result.output
    assert "Read-only file system" in result.output
    assert (tmp_path / "store" / "manifest.json").is_file()


def test_clean_removes_what_the_build_made_and_nothing_else(
    run: Callable[..., Result], kernels: Callable[..., Path], tmp_path: Path
) -> None:
    kernels(factor=(2,))
    assert run("build").exit_code == 0
    (tmp_path / "store" / "notes.txt").write_text("mine")
    assert run("clean", "--cache").exit_code == 0
    assert content(tmp_path / "store") == {"notes.txt": b"mine"}
    assert not (tmp_path / "cache").exists()


# ---- whole processes ------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from build_tools import build
from build_tools.__main__ import main
from tests.build_tools import fake_trace, slow_trace
build.trace_files = {trace}
try:
    main(sys.argv[1:])
finally:
    print("tilelang loaded:", "tilelang" in sys.modules, flush=True)
"""


def command(tmp_path: Path, root: Path, name: str, *arguments: str) -> list[str]:
    (tmp_path / "test.toml").write_text('archs = ["sm_90a"]\n')
    options = ["--profile", str(tmp_path / "test.toml"), "--store", str(tmp_path / "store"), "--kernels", str(root)]
    return [name, *options, *arguments]


def driver(tmp_path: Path, trace: str) -> list[str]:
    return [sys.executable, "-c", DRIVER.format(trace=trace)]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "TILEKERNELS_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(REPOSITORY)}


def test_neither_list_nor_a_build_imports_tilelang(kernels: Callable[..., Path], tmp_path: Path) -> None:
    root = kernels(factor=(2,))
    for name in ("list", "build", "build"):
        result = subprocess.run(
            [*driver(tmp_path, "fake_trace.trace_files"), *command(tmp_path, root, name)],
            env=environment(tmp_path), capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert "tilelang loaded: False" in result.stdout
    assert "nothing was to be done" in result.stdout


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_stopped_build_leaves_no_process_and_no_finished_store(
    kernels: Callable[..., Path], tmp_path: Path, stop: signal.Signals
) -> None:
    root = kernels(factor=(2, 3, 4))
    process = subprocess.Popen(
        [*driver(tmp_path, "slow_trace.trace_files"), *command(tmp_path, root, "build", "--jobs", "2")],
        env={**environment(tmp_path), "SLOW_TRACE_FOLDER": str(tmp_path)},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        # what runs in the background of a shell script inherits a SIGINT that is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    wait_until(lambda: len(list(tmp_path.glob("tracing-*"))) == 2)
    process.send_signal(stop)
    output, _ = process.communicate(timeout=60)
    if stop == signal.SIGINT:
        assert process.returncode == 130
        assert "stopped; what was finished is in the cache" in output
        assert "Traceback" not in output
    else:
        assert process.returncode == -signal.SIGKILL
    workers = [int(file.read_text()) for file in tmp_path.glob("tracing-*")]
    wait_until(lambda: not any(is_running(worker) for worker in workers))
    assert not (tmp_path / "store" / "manifest.json").exists()

    again = subprocess.run(
        [*driver(tmp_path, "fake_trace.trace_files"), *command(tmp_path, root, "build")],
        env=environment(tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "store" / "manifest.json").is_file()


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class _OsWith:
    """The module os with its own replace, for one module alone."""

    def __init__(self, replace: Callable[..., None]) -> None:
        self.replace = replace

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


# ---- all of it, with TileLang ---------------------------------------------------------------------------------------

REAL_KERNEL = '''"""Doubles a vector."""

import tilelang.language as T

from kernels_src.declare import forms, grid, kernel


@kernel(axes=grid(form=forms("wide", "general")), archs=("sm_80", "sm_90a"))
def double(form):
    """Write twice x to out."""
    size = T.dynamic("size")

    @T.prim_func
    def main(x: T.Tensor((size,), "float32"), out: T.Tensor((size,), "float32")):
        if form == "wide":
            T.assume(size % 4 == 0)
        with T.Kernel(T.ceildiv(size, 512), threads=128) as block:
            for i in T.Parallel(512):
                if block * 512 + i < size:
                    out[block * 512 + i] = x[block * 512 + i] * 2.0

    return main
'''


def test_from_a_tilelang_file_to_a_store(tmp_path: Path) -> None:
    root = tmp_path / "kernels"
    (root / "demo").mkdir(parents=True)
    (root / "demo" / "double.py").write_text(REAL_KERNEL)
    arguments = command(tmp_path, root, "build", "--archs", "sm_80,sm_90a")
    cold, warm = (
        subprocess.run(
            [sys.executable, "-m", "build_tools", *arguments],
            cwd=REPOSITORY, env=environment(tmp_path), capture_output=True, text=True, check=False,
        )
        for _ in range(2)
    )  # fmt: skip
    assert cold.returncode == 0, cold.stdout + cold.stderr
    assert warm.stdout.startswith("nothing was to be done: 4 variants are up to date")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert [(variant["variant"], variant["arch"]) for variant in manifest["variants"]] == [
        (form, arch) for arch in ("sm_80", "sm_90a") for form in ("wide", "general")
    ]
    assert manifest["kernels"][0]["doc"] == "Write twice x to out."
    assert [unit["id"] for unit in manifest["units"]] == ["demo.double-sm_80-0", "demo.double-sm_90a-0"]
    assert all(variant["launches"][0]["registers"] > 0 for variant in manifest["variants"])
