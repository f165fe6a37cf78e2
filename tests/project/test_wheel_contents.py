"""What is in the wheel and what is not: the promises of a self-contained wheel, read from the built file."""

from __future__ import annotations

import base64
import csv
import email.parser
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from build_tools.wheel_label import make_label, project_version
from tilekernels.cli._package import find_blobs, find_damage, open_wheel

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "tilekernels/lib/libtilekernels.so.0"

# Part of every Linux with glibc. libstdc++ and libgcc_s are wanted by builds of the machine's own g++.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"}
COMPILER_LIBRARIES = {"libstdc++.so.6", "libgcc_s.so.1"}
MAX_BYTES = 20_000_000  # default profile, one arch


def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def dist_info(unpacked: Path) -> Path:
    (folder,) = unpacked.glob("tilekernels-*.dist-info")
    return folder


def binaries(unpacked: Path) -> list[Path]:
    (extension,) = unpacked.glob("tilekernels/_C.*.so")
    return [extension, unpacked / LIBRARY]


def tool(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def dynamic_entries(binary: Path, tag: str) -> set[str]:
    """Values of one kind in the dynamic section: NEEDED, SONAME, RUNPATH."""
    return set(re.findall(rf"\({tag}\).*\[(.*)\]", tool("readelf", "--dynamic", "--wide", binary)))


@pytest.mark.parametrize(
    "pattern",
    [
        r"tilekernels/_C\..*\.so",
        r"tilekernels/_C\.pyi",
        r"tilekernels/py\.typed",
        r"tilekernels/manifest\.json",
        r"tilekernels/lib/libtilekernels\.so\.0",
        r"tilekernels/lib/cmake/tilekernels/tilekernels-config\.cmake",
        r"tilekernels/lib/cmake/tilekernels/tilekernels-config-version\.cmake",
        r"tilekernels/include/tilekernels/tilekernels\.h",
        r"tilekernels/include/tilekernels/tilekernels\.hpp",
        r"tilekernels/include/tilekernels/quant\.hpp",
        r"tilekernels/include/tilekernels/torch\.hpp",
        r"tilekernels/include/tilekernels/ops\.h",
        r"tilekernels/lib/pkgconfig/tilekernels\.pc",
        r"tilekernels/operators\.md",
        r"tilekernels-.*\.dist-info/sboms/tilekernels\.cdx\.json",
        r"tilekernels-.*\.dist-info/licenses/LICENSE",
        r"tilekernels-.*\.dist-info/licenses/NOTICE",
        r"tilekernels-.*\.dist-info/licenses/licenses/tilelang\.txt",
        r"tilekernels-.*\.dist-info/licenses/licenses/cutlass\.txt",
        r"tilekernels-.*\.dist-info/licenses/licenses/pybind11\.txt",
        r"tilekernels-.*\.dist-info/licenses/licenses/llvm\.txt",
    ],
)
def test_holds_one(wheel: Path, pattern: str) -> None:
    assert len([name for name in names(wheel) if re.fullmatch(pattern, name)]) == 1


def test_holds_nothing_of_the_build_side(wheel: Path) -> None:
    foreign = re.compile(r"kernels_src|build_tools|csrc|tests/|__pycache__|\.(cu|cubin|fatbin|cpp|S|a|o|toml)$")
    assert [name for name in names(wheel) if foreign.search(name)] == []


def test_holds_the_package_and_its_metadata_only(wheel: Path) -> None:
    assert {name.split("/")[0].split("-")[0] for name in names(wheel)} == {"tilekernels"}


def test_every_source_file_of_the_package_is_in(wheel: Path) -> None:
    sources = {str(file.relative_to(ROOT / "python")) for file in (ROOT / "python" / "tilekernels").rglob("*.py")}
    assert sources - set(names(wheel)) == set()


def test_holds_no_link_and_nothing_twice(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert [info.filename for info in archive.infolist() if stat.S_ISLNK(info.external_attr >> 16)] == []
    assert len(names(wheel)) == len(set(names(wheel)))
    assert len([name for name in names(wheel) if "libtilekernels" in name]) == 1


def test_record_has_every_file_with_its_hash(unpacked: Path) -> None:
    with (dist_info(unpacked) / "RECORD").open(newline="") as file:
        recorded = {row[0]: row[1] for row in csv.reader(file)}
    files = [file for file in unpacked.rglob("*") if file.is_file() and file.name != "RECORD"]
    actual = {
        str(file.relative_to(unpacked)): "sha256="
        + base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
        for file in files
    }
    assert {name: digest for name, digest in recorded.items() if not name.endswith("/RECORD")} == actual


def test_verify_finds_every_unit_of_machine_code_and_a_flipped_bit_in_one(wheel: Path, unpacked: Path) -> None:
    manifest = json.loads((unpacked / "tilekernels" / "manifest.json").read_text())
    units = manifest["units"]
    assert units
    assert find_damage(open_wheel(wheel)) == []
    library = bytearray((unpacked / LIBRARY).read_bytes())
    assert find_blobs(bytes(library), units) == []
    victim = units[len(units) // 2]
    start = next(
        at for at in range(len(library)) if library[at : at + 4] == b"\x7fELF"
        and hashlib.sha256(library[at : at + victim["bytes"]]).hexdigest() == victim["sha256"]
    )  # fmt: skip
    library[start + victim["bytes"] // 2] ^= 1
    assert find_blobs(bytes(library), units) == [victim["id"]]


def test_sbom_names_what_is_compiled_in_and_every_cubin(unpacked: Path) -> None:
    sbom = json.loads((dist_info(unpacked) / "sboms" / "tilekernels.cdx.json").read_text())
    units = json.loads((unpacked / "tilekernels" / "manifest.json").read_text())["units"]
    files = {part["name"]: part["hashes"][0]["content"] for part in sbom["components"] if part["type"] == "file"}
    assert files == {unit["id"]: unit["sha256"] for unit in units}
    libraries = {part["name"] for part in sbom["components"] if part["type"] == "library"}
    assert {"TileLang", "CUTLASS", "pybind11", "NVIDIA CUDA Toolkit"} <= libraries
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert "timestamp" not in sbom["metadata"] or os.environ.get("SOURCE_DATE_EPOCH")


def test_version_says_cuda_and_gpus(wheel: Path, unpacked: Path) -> None:
    manifest = json.loads((unpacked / "tilekernels" / "manifest.json").read_text())
    metadata = email.parser.Parser().parsestr((dist_info(unpacked) / "METADATA").read_text())
    expected = f"{project_version()}+{make_label(manifest['build']['nvcc'], manifest['archs'])}"
    assert metadata["Version"] == expected
    assert wheel.name.split("-")[1] == expected
    assert metadata["Summary"].endswith(f"({', '.join(manifest['archs'])}; CUDA 13.0; profile {manifest['profile']})")
    assert manifest["version"] == project_version()
    assert {re.split(r"[ >=<~]", line)[0] for line in metadata.get_all("Requires-Dist")} == {"torch", "click", "rich"}


def test_manifest_has_no_path_of_the_build_machine(unpacked: Path) -> None:
    text = (unpacked / "tilekernels" / "manifest.json").read_text()
    assert str(ROOT) not in text
    assert re.findall(r'"/[^"]*"', text) == []


def test_needs_only_the_c_library(unpacked: Path) -> None:
    extension, library = binaries(unpacked)
    allowed = SYSTEM_LIBRARIES | COMPILER_LIBRARIES
    assert dynamic_entries(library, "NEEDED") <= allowed
    assert dynamic_entries(extension, "NEEDED") <= allowed | {"libtilekernels.so.0"}
    assert dynamic_entries(library, "SONAME") == {"libtilekernels.so.0"}
    assert dynamic_entries(extension, "RUNPATH") == {"$ORIGIN/lib"}
    assert dynamic_entries(library, "RUNPATH") == set()


def test_exports_only_its_own_names(unpacked: Path) -> None:
    extension, library = binaries(unpacked)

    def exported(binary: Path) -> set[str]:
        lines = tool("nm", "--dynamic", "--defined-only", "--format=posix", binary).splitlines()
        return {line.split()[0].split("@")[0] for line in lines if line.split()[1] != "A"}  # A: the version node itself

    assert exported(extension) == {"PyInit__C"}
    assert {name for name in exported(library) if not name.startswith("tk_")} == set()
    assert {"tk_find", "tk_launch", "tk_check", "tk_preload", "tk_last_error", "tk_version"} <= exported(library)


def test_binaries_have_no_path_of_the_build_machine(unpacked: Path) -> None:
    for binary in binaries(unpacked):
        content = binary.read_bytes()
        for path in (str(ROOT), sys.prefix, "site-packages"):
            assert path.encode() not in content, f"{binary.name} contains {path}"


def test_size(wheel: Path) -> None:
    assert wheel.stat().st_size <= MAX_BYTES


def test_importing_loads_neither_torch_nor_tilelang(unpacked: Path) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(unpacked)!r})
import tilekernels, tilekernels._C, tilekernels.cli
assert tilekernels.__file__.startswith({str(unpacked)!r}), tilekernels.__file__
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "tilelang", "tvm", "numpy")))
"""
    assert tool(sys.executable, "-I", "-c", program).strip() == "[]"
