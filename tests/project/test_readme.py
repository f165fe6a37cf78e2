"""What the papers tell a person to type works: commands, targets, options, files, and the examples in Python and C."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAPERS = ("README.md", "CONTRIBUTING.md", "docs/packaging.md")
# Folders at the root: a path in backticks that starts with one of them must exist.
FOLDERS = ("kernels_src", "build_tools", "profiles", "csrc", "python", "tests", "examples", "benchmarks", "docs")


def paper(name: str) -> str:
    return (ROOT / name).read_text()


def blocks(name: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", paper(name), re.MULTILINE | re.DOTALL)
    assert found, f"{name} has no {language} block"
    return found


def test_first_screen_has_the_two_commands() -> None:
    first_screen = "\n".join(paper("README.md").splitlines()[:40])
    assert "\nmake wheel" in first_screen
    assert "\nmake test" in first_screen


@pytest.mark.parametrize("name", PAPERS)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = set(re.findall(r"(?:^|`)make ([a-z-]+)", paper(name), re.MULTILINE))
    assert used, f"{name} names no make target"
    assert used - targets == set()


def test_help_lists_every_target() -> None:
    listing = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [target for target in targets if not re.search(rf"^  {target} +\S", listing, re.MULTILINE)] == []


def commands_of(module: str) -> dict[str, click.Command]:
    group = importlib.import_module(module).main
    assert isinstance(group, click.Group)
    return dict(group.commands)


@pytest.mark.parametrize("name", PAPERS)
@pytest.mark.parametrize(
    ("program", "module"), [("tilekernels", "tilekernels.cli"), ("python -m build_tools", "build_tools.__main__")]
)
def test_commands_exist(name: str, program: str, module: str) -> None:
    used = re.findall(rf"(?:^|`){program} ([a-z]+)([^`\n#]*)", paper(name), re.MULTILINE)
    commands = commands_of(module)
    for command, rest in used:
        assert command in commands, f"{name}: {program} {command}"
        options = {option for parameter in commands[command].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) - options == set()


def worked_example() -> dict[str, str]:
    """The files of the operator that CONTRIBUTING.md adds: path -> text."""
    return dict(
        re.findall(r"^`(\S+\.py)`\n\n```python\n(.*?)^```$", paper("CONTRIBUTING.md"), re.MULTILINE | re.DOTALL)
    )


@pytest.mark.parametrize("name", PAPERS)
def test_files_exist(name: str) -> None:
    paths = re.findall(r"`((?:" + "|".join(FOLDERS) + r")/[\w./-]+)`", paper(name))
    assert [path for path in paths if not (ROOT / path).exists() and path not in worked_example()] == []


def test_worked_example_is_three_files_of_one_name() -> None:
    assert list(worked_example()) == [
        "kernels_src/moe/scale_rows.py",
        "python/tilekernels/moe/scale_rows.py",
        "tests/moe/test_scale_rows.py",
    ]


def test_worked_example_builds(tmp_path: Path) -> None:
    for path, text in worked_example().items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    command = [sys.executable, "-m", "build_tools", "build", "--archs", "sm_90a", "--jobs", "1"]
    command += ["--kernels", str(tmp_path / "kernels_src"), "--store", str(tmp_path / "store")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "tk_status tk_moe_scale_rows(" in (tmp_path / "store" / "gen" / "ops.h").read_text()
    assert "def moe_scale_rows(" in (tmp_path / "store" / "gen" / "_C.pyi").read_text()
    assert "`moe.scale_rows`" in (tmp_path / "store" / "gen" / "operators.md").read_text()


def test_worked_example_runs_on_cpu(tmp_path: Path) -> None:
    file = tmp_path / "scale_rows.py"
    file.write_text(worked_example()["python/tilekernels/moe/scale_rows.py"])
    spec = importlib.util.spec_from_file_location("tilekernels.moe.scale_rows", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x, weights = torch.randn(3, 129).bfloat16(), torch.randn(3)
    expected = (x.double() * weights.double()[:, None]).float().bfloat16()
    assert torch.equal(module.scale_rows(x, weights), expected)


@pytest.mark.parametrize("source", blocks("README.md", "python"))
def test_python_example_runs(source: str) -> None:
    """On CPU tensors, and without preload, which needs a GPU."""
    on_cpu = re.sub(
        r"^tilekernels\.preload\(\).*$", "", source.replace('device="cuda"', 'device="cpu"'), flags=re.MULTILINE
    )
    names: dict[str, object] = {}
    exec(compile(on_cpu, "README.md", "exec"), names)
    assert tuple(names["experts"].shape) == (4096, 8)  # type: ignore[attr-defined]
    assert tuple(names["scale"].shape) == (4096, 56)  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", blocks("README.md", "c"))
def test_c_example_compiles(source: str, unpacked: Path) -> None:
    include = unpacked / "tilekernels" / "include"
    command = ["gcc", "-x", "c", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{include}", "-"]
    result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_quickstart_runs() -> None:
    source = (ROOT / "examples" / "python" / "quickstart.py").read_text()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "quickstart.py", "exec"), {})
    assert "all as expected on" in output.getvalue()
