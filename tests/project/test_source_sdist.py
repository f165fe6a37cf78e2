"""The source distribution: what is in it, what pip says of it where nothing is compiled, and that it can be installed
where TileLang and nvcc are."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from build_tools import wheel_label
from tests.wheels import ROOT, unpack

NEEDED = ("tilelang", "rich", "jinja2", "cyclonedx", "scikit_build_core", "pybind11")
PROFILE = """
archs = ["sm_90a"]
[operators]
include = ["transpose.transpose"]
["transpose.transpose"]
itemsize = [2]
form = ["general"]
"""
LOAD = "import sys; sys.path.insert(0, sys.argv[1]); from tilekernels import _C; print(_C.version(), len(_C.kernels()))"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the build environment has {', '.join(missing)}, this one has not")
    from build_tools.sdist import make_sdist

    return make_sdist(ROOT, tmp_path_factory.mktemp("sdist"))


def install(sdist: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """pip, as a user would type it where the build's requirements are installed, but to make the wheel only."""
    environment = os.environ | {"CMAKE_BUILD_PARALLEL_LEVEL": "2", "CC": "gcc", "CXX": "g++"}
    environment.pop("TILEKERNELS_STORE", None)
    environment["PATH"] = f"{sys.prefix}/bin{os.pathsep}{environment['PATH']}"
    command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation"]
    return subprocess.run(
        [*command, "-w", str(folder), str(sdist)],
        env=environment | variables, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_holds_what_builds_and_nothing_that_is_built(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert sdist.name == f"tilekernels-{wheel_label.project_version()}.tar.gz"
    for needed in (
        "kernels_src/declare.py",
        "kernels_src/common/cast.cuh",
        "profiles/default.toml",
        "build_tools/requirements.txt",
        "build_tools/templates",
        "csrc/include/tilekernels/tilekernels.h",
        "requirements-wheel.txt",
        "LICENSE",
    ):
        assert any(name == needed or name.startswith(f"{needed}/") for name in names), needed
    assert {name.split("/")[0] for name in names}.isdisjoint({"build", "dist", "store"})
    assert [name for name in names if name.endswith(".cubin") and not name.startswith("tests/")] == []


def test_pip_says_in_a_sentence_what_to_type(sdist: Path, tmp_path: Path) -> None:
    done = install(sdist, tmp_path, TILEKERNELS_PROFILE="")
    assert done.returncode != 0
    words = " ".join((done.stdout + done.stderr).split())
    assert "These are the sources of tilekernels, without compiled kernels: install a wheel or the traced" in words
    assert "TILEKERNELS_PROFILE=default pip install --no-build-isolation tilekernels-*.tar.gz" in words


def test_without_tilelang_it_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in pip's isolated environment, where it never is."""
    monkeypatch.setattr(wheel_label.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TILEKERNELS_PROFILE", "default")
    monkeypatch.delenv("TILEKERNELS_STORE", raising=False)
    words = r"TILEKERNELS_PROFILE=default has the kernels compiled, which needs TileLang, .* --no-build-isolation"
    with pytest.raises(ModuleNotFoundError, match=words):
        wheel_label.dynamic_metadata({}, {})


def test_a_profile_that_does_not_exist_is_said_by_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERNELS_PROFILE", "nightly")
    monkeypatch.delenv("TILEKERNELS_STORE", raising=False)
    monkeypatch.setattr(wheel_label.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(RuntimeError, match=r"no profile nightly: give a path to a \.toml file"):
        wheel_label.wheel_version()


def test_pip_compiles_the_kernels_of_a_profile(sdist: Path, tmp_path: Path) -> None:
    """One variant: TileLang, nvcc, the C++ compiler, and a wheel that says what is in it."""
    (tmp_path / "one.toml").write_text(PROFILE)
    cache = os.environ.get("TILEKERNELS_CACHE") or str(ROOT / "build" / "cache")
    done = install(sdist, tmp_path, TILEKERNELS_PROFILE=str(tmp_path / "one.toml"), TILEKERNELS_CACHE=cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"tilekernels-{wheel_label.project_version()}+cu130.sm90a-cp")
    content = unpack(wheel, tmp_path / "content")
    manifest = json.loads((content / "tilekernels" / "manifest.json").read_text())
    assert (manifest["profile"], [each["name"] for each in manifest["kernels"]]) == ("one", ["transpose.transpose"])
    assert [variant["variant"] for variant in manifest["variants"]] == ["b2_general"]
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", LOAD, str(content)], capture_output=True, text=True, check=True
    ).stdout
    assert loaded.split() == [f"{wheel_label.project_version()}+cu130.sm90a", "1"]
