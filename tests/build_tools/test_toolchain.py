"""Finding nvcc and TileLang's headers: the order of places, versions that will not do, and what the errors advise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from build_tools import toolchain
from build_tools.errors import BuildError
from build_tools.toolchain import find_tilelang_headers, find_toolchain

BUILD = "cuda_13.0.r13.0/compiler.36424714_0"


def fake_nvcc(folder: Path, version: str = "13.0.88", code: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "nvcc"
    release = version.rpartition(".")[0]
    file.write_text(
        f'#!/bin/sh\necho "Cuda compilation tools, release {release}, V{version}"\necho "Build {BUILD}"\nexit {code}\n'
    )
    file.chmod(0o755)
    return file


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with g++, sh and TileLang, and no nvcc."""
    headers = (tmp_path / "src", tmp_path / "cutlass")
    monkeypatch.setattr(toolchain, "find_tilelang_headers", lambda: ("0.1.15", headers))
    monkeypatch.setattr(toolchain, "_wheel_folders", list)
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "g++").write_text("#!/bin/sh\n")
    (tools / "g++").chmod(0o755)
    return {"PATH": str(tools)}


def add_to_path(environment: dict[str, str], folder: Path) -> None:
    environment["PATH"] += f":{folder}"


def test_path(environment: dict[str, str], tmp_path: Path) -> None:
    nvcc = fake_nvcc(tmp_path / "a")
    add_to_path(environment, nvcc.parent)
    found = find_toolchain(environment)
    assert (found.nvcc, found.version, found.build, found.source) == (nvcc, "13.0.88", BUILD, "PATH")
    assert found.include_flags == (f"-I{tmp_path / 'src'}", f"-I{tmp_path / 'cutlass'}")


def test_cudacxx_comes_before_path(environment: dict[str, str], tmp_path: Path) -> None:
    add_to_path(environment, fake_nvcc(tmp_path / "a").parent)
    environment["CUDACXX"] = str(fake_nvcc(tmp_path / "b", "13.1.2"))
    found = find_toolchain(environment)
    assert (found.source, found.version) == ("CUDACXX", "13.1.2")


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_toolkit_folders(environment: dict[str, str], tmp_path: Path, variable: str) -> None:
    environment[variable] = str(fake_nvcc(tmp_path / "toolkit" / "bin").parent.parent)
    assert find_toolchain(environment).source == variable


def test_an_older_cuda_on_path_is_passed_over(environment: dict[str, str], tmp_path: Path) -> None:
    add_to_path(environment, fake_nvcc(tmp_path / "old", "12.4.131").parent)
    environment["CUDA_HOME"] = str(fake_nvcc(tmp_path / "new" / "bin").parent.parent)
    assert find_toolchain(environment).source == "CUDA_HOME"


def test_a_wrong_cudacxx_is_an_error_even_where_another_would_do(environment: dict[str, str], tmp_path: Path) -> None:
    add_to_path(environment, fake_nvcc(tmp_path / "good").parent)
    environment["CUDACXX"] = str(fake_nvcc(tmp_path / "old", "12.4.131"))
    with pytest.raises(BuildError, match=r"CUDACXX: \S+/old/nvcc is of CUDA 12\.4\.131, needed is 13\.x"):
        find_toolchain(environment)


def test_none_says_what_to_install(environment: dict[str, str]) -> None:
    with pytest.raises(BuildError) as caught:
        find_toolchain(environment)
    assert "pip install -r build_tools/requirements-nvcc.txt" in str(caught.value)
    assert "no nvcc in $CUDACXX, PATH, CUDA_HOME, CUDA_PATH or the PyPI wheels" in str(caught.value)


def test_a_broken_nvcc_is_named_with_its_exit_code(environment: dict[str, str], tmp_path: Path) -> None:
    add_to_path(environment, fake_nvcc(tmp_path / "broken", code=3).parent)
    with pytest.raises(BuildError, match=r"PATH: \S+/broken/nvcc --version ended with 3"):
        find_toolchain(environment)


def make_wheels(site: Path) -> Path:
    """site-packages/nvidia/cu13 as the PyPI wheels fill it."""
    top = site / "nvidia" / "cu13"
    fake_nvcc(top / "bin")
    parts = ("nvvm/bin/cicc", "include/crt/host_config.h", "include/cccl/cuda/std/version", "include/cuda_runtime.h")
    for part in parts:
        (top / part).parent.mkdir(parents=True, exist_ok=True)
        (top / part).touch()
    return top


def test_wheels(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = make_wheels(tmp_path / "site")
    monkeypatch.setattr(toolchain, "_wheel_folders", lambda: [top])
    found = find_toolchain(environment)
    assert (found.source, found.nvcc) == ("wheels", top / "bin" / "nvcc")


def test_a_missing_wheel_is_named(environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = make_wheels(tmp_path / "site")
    (top / "nvvm" / "bin" / "cicc").unlink()
    monkeypatch.setattr(toolchain, "_wheel_folders", lambda: [top])
    with pytest.raises(BuildError, match="lacks the wheels nvidia-nvvm"):
        find_toolchain(environment)


def test_wheels_are_looked_for_beside_the_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top = make_wheels(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert top in toolchain._wheel_folders()


def test_no_host_compiler(environment: dict[str, str], tmp_path: Path) -> None:
    environment["PATH"] = str(fake_nvcc(tmp_path / "a").parent)
    with pytest.raises(BuildError, match=r"install g\+\+"):
        find_toolchain(environment)


def test_tilelang_headers_are_found_without_importing_it() -> None:
    before = "tilelang" in sys.modules
    version, include = find_tilelang_headers()
    assert version
    assert (include[0] / "tl_templates" / "cuda" / "reduce.h").is_file()
    assert (include[1] / "cutlass" / "cutlass.h").is_file()
    assert ("tilelang" in sys.modules) == before
