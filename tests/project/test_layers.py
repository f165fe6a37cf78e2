"""The layer rules: who may import whom. Read from the sources without importing them: this needs nothing installed."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNELS_SRC, BUILD_TOOLS, PACKAGE, CSRC = (
    ROOT / part for part in ("kernels_src", "build_tools", "python/tilekernels", "csrc")
)

# May be imported outside its own tree: pure size arithmetic, which kernels and operators must agree on.
SHARED_WITH_KERNELS = "tilekernels.layout"
PACKAGE_DEPENDENCIES = {"torch", "click", "rich"}  # pyproject.toml, [project] dependencies
BUILD_DEPENDENCIES = {
    "rich",
    "click",
    "jinja2",
    "tomli",
    "cyclonedx",
    "dask",
    "distributed",  # requirements-dask.txt; only for --executor dask
}  # build_tools/requirements.txt; tomli is tomllib of Python 3.10
# Files of build_tools that run on a bare Python: before the environment exists, or inside scikit-build-core.
BARE_FILES = ("environment.py", "wheel_label.py", "check_wheel.py", "lint.py", "archive.py")


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import in the file, those inside functions included."""
    base = file.parent if PACKAGE not in file.parents else ROOT / file.parent.relative_to(PACKAGE.parent)
    package = base.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(file.read_text(), filename=str(file))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def foreign(file: Path, allowed: set[str]) -> list[str]:
    """Imports of the file that neither the standard library nor one of the allowed names covers."""
    return [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for line, module in imports(file)
        if module.split(".")[0] not in sys.stdlib_module_names
        and not any(module == name or module.startswith(f"{name}.") for name in allowed)
    ]


def python_files(folder: Path) -> list[Path]:
    files = sorted(folder.rglob("*.py"))
    assert files, f"no Python files in {folder}"
    return files


def test_kernels_import_tilelang_and_sizes_only() -> None:
    allowed = {"tilelang", "kernels_src", SHARED_WITH_KERNELS}
    assert [line for file in python_files(KERNELS_SRC) for line in foreign(file, allowed)] == []


def test_build_tools_never_import_the_package_and_only_trace_and_signatures_import_tilelang() -> None:
    found = []
    for file in python_files(BUILD_TOOLS):
        allowed = {"build_tools", "kernels_src", *BUILD_DEPENDENCIES}
        if file.name in ("trace.py", "signatures.py"):
            allowed |= {"tilelang"}
        found += foreign(file, allowed)
    assert found == []


@pytest.mark.parametrize("name", BARE_FILES)
def test_bootstrap_files_need_the_standard_library_alone(name: str) -> None:
    assert foreign(BUILD_TOOLS / name, {"build_tools"}) == []
    for _, module in imports(BUILD_TOOLS / name):
        if module.startswith("build_tools."):
            assert f"{module.split('.')[1]}.py" in BARE_FILES, f"{name} imports {module}, which may need more"


def test_package_imports_itself_and_its_dependencies_only() -> None:
    allowed = {"tilekernels", *PACKAGE_DEPENDENCIES}
    assert [line for file in python_files(PACKAGE) for line in foreign(file, allowed)] == []


def test_library_sees_neither_python_nor_torch() -> None:
    forbidden = re.compile(
        r'^\s*#\s*include\s*[<"](pybind11/|Python\.h|torch/|ATen/|c10/|tilelang|tl_templates/)', re.MULTILINE
    )
    sources = [file for file in sorted(CSRC.rglob("*")) if file.suffix in {".h", ".cpp", ".c"}]
    assert sources
    found = [
        f"{file.relative_to(ROOT)}: {match[0].strip()}"
        for file in sources
        if "python" not in file.relative_to(CSRC).parts
        for match in forbidden.finditer(file.read_text())
    ]
    assert found == []


def kernel_files() -> list[Path]:
    return [
        file.relative_to(KERNELS_SRC)
        for file in sorted(KERNELS_SRC.glob("*/*.py"))
        if file.parent.name != "common" and not file.name.startswith("_")
    ]


@pytest.mark.parametrize("file", kernel_files(), ids=str)
def test_three_trees_have_one_shape(file: Path) -> None:
    assert (PACKAGE / file).is_file(), f"kernels_src/{file} has no operator file python/tilekernels/{file}"
    test_file = file.with_name(f"test_{file.name}")
    assert (ROOT / "tests" / test_file).is_file(), f"kernels_src/{file} has no test file tests/{test_file}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from ..errors import ArgumentError", ["tilekernels.errors.ArgumentError"]),
        ("from . import x", ["tilekernels.moe.x"]),
        ("def f():\n    import tilelang.language as T", ["tilelang.language"]),
    ],
    ids=["parent", "sibling", "inside a function"],
)
def test_imports_are_read_as_absolute_names(
    source: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules above are as good as their reader: it must see relative imports and those inside functions."""
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "python" / "tilekernels")
    file = tmp_path / "python" / "tilekernels" / "moe" / "topk_gate.py"
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert [module for _, module in imports(file)] == expected
