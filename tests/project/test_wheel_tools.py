"""The tools behind `make wheel` that need no kernel: the version label, and the environment that is kept up to date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from build_tools import environment, wheel_label


def write_store(folder: Path, nvcc: str, archs: list[str], source_hash: str | None = None) -> Path:
    folder.mkdir()
    build = {"nvcc": nvcc, "source_hash": source_hash or wheel_label.hash_sources(wheel_label.SOURCES)}
    (folder / "manifest.json").write_text(json.dumps({"profile": "mine", "archs": archs, "build": build}))
    return folder


@pytest.mark.parametrize(
    ("nvcc", "archs", "label"),
    [
        ("13.0.88", ["sm_90a"], "cu130.sm90a"),
        ("13.1.2", ["sm_100a", "sm_80", "sm_90a"], "cu131.sm80.sm90a.sm100a"),
    ],
)
def test_label_says_cuda_and_archs_by_number(nvcc: str, archs: list[str], label: str) -> None:
    assert wheel_label.make_label(nvcc, archs) == label


@pytest.mark.parametrize("label", ["cu130.sm_90a", "cu130.SM90a", "cu130", "sm90a", "cu130.sm90a-x", ""])
def test_label_that_installers_would_change_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match=r"must look like cu130\.sm90a"):
        wheel_label.check_label(label)


def test_version_takes_the_label_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "store", "13.0.88", ["sm_90a"])
    monkeypatch.setenv("TILEKERNELS_STORE", str(store))
    assert wheel_label.dynamic_metadata({}, {}) == {
        "version": f"{wheel_label.project_version()}+cu130.sm90a",
        "description": f"{wheel_label.SUMMARY} (sm_90a; CUDA 13.0; profile mine)",
    }


def test_version_without_a_store_has_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEKERNELS_STORE", raising=False)
    assert wheel_label.wheel_version() == wheel_label.project_version()
    assert wheel_label.describe() == wheel_label.SUMMARY


def test_store_without_kernels_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERNELS_STORE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="python -m build_tools build"):
        wheel_label.wheel_version()


def test_store_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_store(tmp_path / "store", "13.0.88", ["sm_80", "sm_90a"], source_hash="0" * 64)
    monkeypatch.setenv("TILEKERNELS_STORE", str(store))
    with pytest.raises(ValueError, match=r"other kernel sources .*build --profile mine --archs sm_80,sm_90a --store"):
        wheel_label.wheel_version()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What update_environment does, recorded instead of done."""
    done: list[str] = []

    def make_environment(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "made-by").write_text(environment._interpreter())
        done.append("make")

    monkeypatch.setattr(environment, "make_environment", make_environment)
    monkeypatch.setattr(environment, "install", lambda folder, arguments: done.append(" ".join(arguments)))
    return done


def test_environment_installs_what_changed_and_nothing_else(tmp_path: Path, calls: list[str]) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("a==1")
    second.write_text("b==1")
    for _ in range(2):
        environment.update_environment(tmp_path / "venv", [first, second])
    second.write_text("b==2")
    environment.update_environment(tmp_path / "venv", [first, second])
    assert calls == ["make", f"-r {first} -r {second}", f"-r {second}"]


def test_environment_of_another_python_is_made_anew(tmp_path: Path, calls: list[str]) -> None:
    environment.update_environment(tmp_path / "venv", [])
    (tmp_path / "venv" / "made-by").write_text("another Python")
    environment.update_environment(tmp_path / "venv", [])
    assert calls == ["make", "make"]


def test_failed_install_is_tried_again(tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = tmp_path / "first.txt"
    requirements.write_text("a==1")

    def fail(folder: Path, arguments: list[str]) -> None:
        raise environment.EnvironmentFailed("no network")

    with monkeypatch.context() as patch:
        patch.setattr(environment, "install", fail)
        with pytest.raises(environment.EnvironmentFailed):
            environment.update_environment(tmp_path / "venv", [requirements])
    environment.update_environment(tmp_path / "venv", [requirements])
    assert calls == ["make", f"-r {requirements}"]
