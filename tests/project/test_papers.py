"""Facts that stand in two papers agree, and every paper can be followed without a network."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from build_tools.wheel_label import project_version

ROOT = Path(__file__).resolve().parents[2]
PAPERS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md"))),
]


def pins(text: str) -> dict[str, str]:
    """{package: version} of every `package==version` in the text."""
    return {name.lower(): version for name, version in re.findall(r"([A-Za-z0-9_-]+)==([0-9][\w.]*)", text)}


def test_changelog_starts_with_the_version() -> None:
    versions = re.findall(r"^## ([0-9]+\.[0-9]+\.[0-9]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == project_version()


def test_build_requirements_are_pinned_once() -> None:
    backend = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert backend is not None
    installed = pins((ROOT / "requirements-wheel.txt").read_text())
    assert pins(backend[1]) == {name: installed[name] for name in ("scikit-build-core", "pybind11")}


def test_every_requirement_is_pinned() -> None:
    files = [*ROOT.glob("requirements-*.txt"), *(ROOT / "build_tools").glob("requirements*.txt")]
    assert len(files) >= 6
    lines = [(file.name, line.split("#")[0].strip()) for file in files for line in file.read_text().splitlines()]
    assert [(name, line) for name, line in lines if line and "==" not in line] == []


@pytest.mark.parametrize("name", PAPERS)
def test_links_stay_in_the_repository(name: str) -> None:
    """Air-gapped readers have the repository only."""
    text = (ROOT / name).read_text()
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    assert [target for target in targets if not (ROOT / name).parent.joinpath(target).exists()] == []
    assert re.findall(r"https?://\S+", text) == []


def source_files() -> list[Path]:
    """Every file that git tracks or would track, as text."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_folder_of_its_author() -> None:
    home = re.compile(r"(?<![\w.])/(?:home|root|work|Users)/\w")
    found = []
    for file in source_files():
        content = file.read_bytes()
        if b"\0" in content:
            continue
        for number, line in enumerate(content.decode().splitlines(), 1):
            if home.search(line):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_nothing_is_left_to_do_in_comments() -> None:
    marks = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")  # cut, so that this file does not find itself
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in source_files()
        if file.suffix in {".py", ".cpp", ".h", ".hpp", ".c", ".cuh", ".md", ".cmake", ".toml", ".j2"}
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert found == []
