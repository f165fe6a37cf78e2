"""A wheel as released: compiled by zig for glibc 2.28, checked by auditwheel and twine, loaded by its own Python."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.wheels import make_zig_wheel, unpack

FULL = os.environ.get("TK_FULL_TEST", "0").lower() in ("1", "true")


@pytest.fixture(scope="module")
def verdicts(zig_wheel: Path) -> Sequence[str]:
    return examine(zig_wheel)


@pytest.fixture(scope="module")
def unpacked_zig(zig_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(zig_wheel, tmp_path_factory.mktemp("zig"))


def examine(wheel: Path, machine: str = "x86_64") -> Sequence[str]:
    """What `make wheels` prints of a wheel; it raises where a check fails."""
    from build_tools import wheels
    from build_tools.packing import Interpreter, Target

    return list(wheels.examine(wheel, Interpreter.running(), Target(machine)))


def test_auditwheel_finds_no_younger_glibc_than_the_tag_says(zig_wheel: Path, verdicts: Sequence[str]) -> None:
    assert zig_wheel.name.endswith("-manylinux_2_28_x86_64.whl")
    found = re.fullmatch(
        r"auditwheel: consistent with manylinux_2_(\d+)_x86_64, tagged manylinux_2_28_x86_64", verdicts[0]
    )
    assert found is not None, verdicts
    assert int(found[1]) <= 28


def test_twine_takes_its_metadata(verdicts: Sequence[str]) -> None:
    assert verdicts[1] == "twine: PASSED"


def test_its_extension_loads_under_its_python(unpacked_zig: Path, verdicts: Sequence[str]) -> None:
    kernels = json.loads((unpacked_zig / "tilekernels" / "manifest.json").read_text())["kernels"]
    python = sys.version.split()[0]
    assert re.fullmatch(rf"_C \S+ loads in Python {re.escape(python)}: {len(kernels)} kernels for sm_90a", verdicts[2])


CALLS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, tilekernels
assert tilekernels.__file__.startswith(sys.argv[1])
x = torch.arange(6.0).reshape(2, 3)
print(tilekernels.transpose.transpose(x).tolist() == x.T.tolist())
extension = tilekernels._native.load_native()
for wrong in (lambda: tilekernels.transpose.transpose(x[0]), lambda: extension.covers("moe.topk_gate", {"a": 1})):
    try:
        wrong()
    except tilekernels.ArgumentError as error:
        print(error)
"""


def test_operators_and_errors_of_its_library_reach_python(unpacked_zig: Path) -> None:
    """Its C++ runtime is another than torch's: what is thrown and what is checked must not cross between them."""
    ran = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "-c", CALLS, unpacked_zig], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    fine, shape, axes = ran.stdout.splitlines()
    assert fine == "True"
    assert shape.startswith("transpose.transpose: x must have 2 dimensions")
    assert axes.startswith("moe.topk_gate: axes must be among ")


def test_its_sbom_names_the_runtime_of_zig(unpacked_zig: Path) -> None:
    (sbom,) = unpacked_zig.glob("*.dist-info/sboms/*.cdx.json")
    components = {each["name"] for each in json.loads(sbom.read_text())["components"]}
    assert any("libc++" in name for name in components), components


@pytest.mark.skipif(not FULL, reason="zig's library for another processor takes minutes: TK_FULL_TEST=1")
def test_the_wheel_of_the_other_processor() -> None:
    wheel = make_zig_wheel("aarch64")
    auditwheel, twine, elf = examine(wheel, "aarch64")
    assert "tagged manylinux_2_28_aarch64" in auditwheel
    assert twine == "twine: PASSED"
    assert elf.startswith("_C and the library are ELF files of aarch64")
