"""The arch gate: which GPU runs code of which arch, for every pair of those that exist."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.csrc.conftest import BUILD, HERE, ROOT, locked, run

GPUS = ["7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]

# Which of GPUS run code of an arch. From the CUDA manuals: plain code runs on its major from its minor on, `a` on
# exactly one capability, `f` within a family.
RUNS_ON = {
    "sm_80": ["8.0", "8.6", "8.7", "8.9"],
    "sm_86": ["8.6", "8.7", "8.9"],
    "sm_89": ["8.9"],
    "sm_90": ["9.0"],
    "sm_90a": ["9.0"],
    "sm_100": ["10.0", "10.3"],
    "sm_100a": ["10.0"],
    "sm_100f": ["10.0", "10.3"],
    "sm_103a": ["10.3"],
    "sm_103f": ["10.3"],
    "sm_120": ["12.0", "12.1"],
    "sm_120a": ["12.0"],
    "sm_120f": ["12.0", "12.1"],
    "compute_90": [],
    "sm_": [],
    "sm_90x": [],
}

WANTED = {
    "7.5": "none",
    "8.0": "sm_80",
    "8.6": "sm_80",
    "8.9": "sm_89",
    "9.0": "sm_90a",
    "10.0": "sm_100a",
    "10.3": "sm_103a",
    "12.0": "sm_120a",
}


@pytest.fixture(scope="module")
def probe() -> Path:
    program = BUILD / "arch_probe"
    BUILD.mkdir(parents=True, exist_ok=True)
    with locked(BUILD / "lock"):
        source = ROOT / "csrc" / "src"
        run(["g++", "-std=c++20", f"-I{source}", HERE / "arch_probe.cpp", source / "arch.cpp", "-o", program])
    return program


def ask(probe: Path, questions: list[tuple[str, str]]) -> list[tuple[int, str]]:
    """(rank, wanted arch) of each (arch, compute capability)."""
    lines = "".join(f"{arch} {gpu.replace('.', ' ')}\n" for arch, gpu in questions)
    output = subprocess.run([probe], input=lines, capture_output=True, text=True, check=True).stdout
    return [(int(rank), wanted) for rank, wanted in map(str.split, output.splitlines())]


@pytest.mark.parametrize("arch", RUNS_ON)
def test_runs_on(probe: Path, arch: str) -> None:
    ranks = [rank for rank, _ in ask(probe, [(arch, gpu) for gpu in GPUS])]
    assert [gpu for gpu, rank in zip(GPUS, ranks, strict=True) if rank > 0] == RUNS_ON[arch]


@pytest.mark.parametrize(
    ("gpu", "rising"),
    [("8.9", ["sm_80", "sm_86", "sm_89"]), ("9.0", ["sm_90", "sm_90a"]), ("10.3", ["sm_100", "sm_100f", "sm_103a"])],
)
def test_the_more_specific_arch_wins(probe: Path, gpu: str, rising: list[str]) -> None:
    ranks = [rank for rank, _ in ask(probe, [(arch, gpu) for arch in rising])]
    assert ranks == sorted(set(ranks))


@pytest.mark.parametrize("gpu", WANTED)
def test_wanted_arch(probe: Path, gpu: str) -> None:
    ((_, wanted),) = ask(probe, [("sm_80", gpu)])
    assert wanted == WANTED[gpu]


@pytest.mark.parametrize("gpu", [gpu for gpu, arch in WANTED.items() if arch != "none"])
def test_wanted_arch_runs(probe: Path, gpu: str) -> None:
    ((rank, _),) = ask(probe, [(WANTED[gpu], gpu)])
    assert rank > 0
