"""The traced sdist, the index and the bundle of the wheel under test; that the wheel comes out the same elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cyclonedx", reason="cyclonedx-python-lib, of the build environment, is not installed")

from build_tools.archive import rewrite_wheel
from build_tools.bundle import write_bundle
from build_tools.index import label_of_wheel, write_index
from build_tools.packing import backend_environment
from build_tools.sdist import make_traced_sdist

SAFELY: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, umask: int = 0o022) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        env=env, cwd=cwd, umask=umask, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{' '.join(map(str, command))}\n{result.stdout}"
    return result.stdout


def test_the_same_bytes_from_another_folder_umask_file_system_and_number_of_jobs(
    wheel: Path, store: Path, tmp_path: Path
) -> None:
    """Through the traced sdist, which pip takes offline and without TileLang or nvcc."""
    if "manylinux" in wheel.name:
        pytest.skip("a manylinux wheel needs zig; docs/packaging.md has its command")
    sdist = make_traced_sdist(store, tmp_path)
    assert label_of_wheel(wheel) in sdist.name
    elsewhere = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    scratch = elsewhere / f"tilekernels-{os.getpid()}"
    scratch.mkdir()
    environment = backend_environment(Path(sys.prefix) / "bin")
    environment.pop("TILEKERNELS_STORE", None)
    environment |= {"TMPDIR": str(scratch), "CMAKE_BUILD_PARALLEL_LEVEL": "1", "TZ": "Asia/Tokyo", "LC_ALL": "C"}
    try:
        command = (
            "-m",
            "pip",
            "wheel",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            scratch / "out",
            sdist,
        )
        run(sys.executable, *command, env=environment, cwd=tmp_path, umask=0o077)
        (built,) = (scratch / "out").glob("*.whl")
        rewrite_wheel(built)
        assert built.name == wheel.name
        with zipfile.ZipFile(built) as first, zipfile.ZipFile(wheel) as second:
            assert {info.filename: info.CRC for info in first.infolist()} == {
                info.filename: info.CRC for info in second.infolist()
            }
        assert built.read_bytes() == wheel.read_bytes()
    finally:
        shutil.rmtree(scratch)


def relabelled(wheel: Path, folder: Path, label: str) -> Path:
    """The wheel under the name and version of another GPU, for tests that only resolve."""
    old = f"+{label_of_wheel(wheel)}"
    target = folder / wheel.name.replace(old, f"+{label}")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as copy:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith("METADATA"):
                content = content.replace(f"Version: 0.1.0{old}".encode(), f"Version: 0.1.0+{label}".encode())
            copy.writestr(name.replace(old, f"+{label}"), content)
    return target


def test_each_folder_of_the_index_has_its_own_wheel(wheel: Path, tmp_path: Path) -> None:
    others = [relabelled(wheel, tmp_path, label) for label in ("cu130.sm100a", "cu130.sm90a.sm100a")]
    labels = write_index([wheel, *others], tmp_path / "index")
    assert labels == ["cu130.sm100a", "cu130.sm90a", "cu130.sm90a.sm100a"]
    for label in labels:
        url = (tmp_path / "index" / label).as_uri() + "/"
        report = tmp_path / f"{label}.json"
        command = ("-m", "pip", "--isolated", "install", "--no-deps", "--ignore-installed", "--dry-run", "--quiet")
        run(sys.executable, *command, "--index-url", url, "--report", report, "tilekernels")
        (found,) = json.loads(report.read_text())["install"]
        assert found["metadata"]["version"] == f"0.1.0+{label}"
    page = (tmp_path / "index" / "cu130.sm90a" / "tilekernels" / "index.html").read_text()
    assert f"#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}" in page
    assert write_index([wheel], tmp_path / "index") == labels  # the others stay


def test_an_index_of_nothing_or_of_others_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no wheel was given"):
        write_index([], tmp_path)
    with pytest.raises(ValueError, match=r"click-8-py3-none-any\.whl is no tilekernels wheel with a label"):
        write_index([tmp_path / "click-8-py3-none-any.whl"], tmp_path)


# ---- the bundle, on a machine without a network ----------------------------------------------------------------------


@pytest.fixture(scope="session")
def bundle(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of the wheel; what its command needs is in the environment that runs the tests."""
    file = tmp_path_factory.mktemp("bundle") / "tilekernels-0.1.0-bundle.tar"
    write_bundle([wheel], [], file)
    return file


def test_bundle_holds_everything_with_checksums(bundle: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(bundle) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, **SAFELY)
    assert {name.split("/")[0] for name in names} == {"tilekernels-0.1.0-bundle"}
    top = tmp_path / "tilekernels-0.1.0-bundle"
    label = label_of_wheel(wheel)
    for name in (
        f"index/{label}/tilekernels/{wheel.name}",
        "install.sh",
        "docs/README.md",
        "docs/LICENSE",
        "docs/NOTICE",
    ):
        assert (top / name).is_file(), name
    (sbom,) = (top / "sbom").glob("*.cdx.json")
    assert json.loads(sbom.read_text())["bomFormat"] == "CycloneDX"
    run("sha256sum", "--check", "--quiet", "SHA256SUMS", cwd=top)
    sums = dict(reversed(line.split("  ")) for line in (top / "SHA256SUMS").read_text().splitlines())
    files = {str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()}
    assert set(sums) == files - {"SHA256SUMS"}


def test_bundle_has_the_same_bytes_again(bundle: Path, wheel: Path, tmp_path: Path) -> None:
    write_bundle([wheel], [], tmp_path / bundle.name)
    assert (tmp_path / bundle.name).read_bytes() == bundle.read_bytes()


@pytest.mark.parametrize("problem", ["damaged", "no such label", "no torch"])
def test_install_script_refuses(bundle: Path, tmp_path: Path, problem: str) -> None:
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path, **SAFELY)
    top = tmp_path / "tilekernels-0.1.0-bundle"
    arguments = ["--label", "cu130.sm70"] if problem == "no such label" else ["--python", sys.executable]
    if problem == "damaged":
        (wheel,) = top.glob("index/*/tilekernels/*.whl")
        content = bytearray(wheel.read_bytes())
        content[len(content) // 2] ^= 1
        wheel.write_bytes(content)
    if problem == "no torch":
        (tmp_path / "python").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "python").chmod(0o755)
        arguments = ["--python", str(tmp_path / "python")]
    result = subprocess.run(["sh", str(top / "install.sh"), *arguments], capture_output=True, text=True, check=False)
    expected = {
        "damaged": "error: a file of this bundle is damaged",
        "no such label": "error: say which wheel by --label: cu130.",
        "no torch": "has no torch: install the cluster's own torch >= 2.10 first",
    }
    assert result.returncode == 1
    assert expected[problem] in result.stderr


CALL = """
import torch, tilekernels
x = torch.arange(6.0).reshape(2, 3)
assert tilekernels.transpose.transpose(x).tolist() == x.T.tolist()
print("an operator ran")
"""
AIR_GAP = """\
set -eu
mount -t tmpfs tmpfs "$WORK"
"$PYTHON" -m venv "$WORK/venv"
site=$(echo "$WORK"/venv/lib/python*/site-packages)
"$PYTHON" -c 'import sys; print(*[each for each in sys.path if "site-packages" in each], sep="\\n")' > "$site/base.pth"
mount -o remount,ro,bind /
touch /read-only 2> /dev/null && { echo "the root can be written"; exit 1; }
unset HOME CC CXX CUDA_HOME
export PATH="$WORK/venv/bin:$TOOLS" TMPDIR="$WORK/tmp" LANG=C.UTF-8
mkdir "$TMPDIR"
for tool in gcc g++ cc c++ clang nvcc zig; do command -v "$tool" && { echo "a compiler is on PATH"; exit 1; }; done
sh "$BUNDLE/install.sh" --python "$WORK/venv/bin/python" -- --force-reinstall --no-deps
rm -r "$TMPDIR"
unset TMPDIR
mount -o remount,ro "$WORK"
cd /
tilekernels verify
tilekernels list | tail -n 1
tilekernels doctor
python -I -W "ignore:Failed to initialize NumPy:UserWarning" -c "$CALL"
python -I -c 'import socket; socket.create_connection(("192.0.2.1", 80), 2)' 2>&1 | tail -n 1
"""


def test_bundle_installs_and_runs_without_network_home_compiler_or_writable_root(bundle: Path, tmp_path: Path) -> None:
    isolate = ["unshare", "--net", "--mount"] + ([] if os.getuid() == 0 else ["--map-root-user"])
    probe = subprocess.run([*isolate, "sh", "-c", f"mount -t tmpfs tmpfs {tmp_path}"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"this machine forbids namespaces of its own: {probe.stderr.decode().strip()}")
    with tarfile.open(bundle) as archive:
        archive.extractall(tmp_path, **SAFELY)
    for name in ("work", "tools"):
        (tmp_path / name).mkdir()
    # everything that install.sh and the test's own script call, and no compiler
    for tool in (
        "sh",
        "sha256sum",
        "dirname",
        "basename",
        "sed",
        "head",
        "tail",
        "wc",
        "tr",
        "sort",
        "mkdir",
        "rm",
        "mount",
    ):
        found = shutil.which(tool)
        assert found is not None, tool
        (tmp_path / "tools" / tool).symlink_to(found)
    environment = {
        "WORK": str(tmp_path / "work"),
        "TOOLS": str(tmp_path / "tools"),
        "BUNDLE": str(tmp_path / "tilekernels-0.1.0-bundle"),
        "PYTHON": sys.executable,
        "CALL": CALL,
        "PATH": os.environ["PATH"],
    }
    output = run(*isolate, "sh", "-c", AIR_GAP, env=environment)
    assert re.search(r"^installed cu\d+\.sm\w+; now run", output, re.MULTILINE)
    assert re.search(r"good: \d+ files, \d+ units of machine code", output)
    assert "extension: loads" in output
    assert "an operator ran" in output
    assert "Network is unreachable" in output.splitlines()[-1]
