"""`tilekernels verify` and `diff` on small wheels made here: a flipped bit is found, a difference is named."""

from __future__ import annotations

import base64
import copy
import hashlib
import importlib.metadata
import json
import zipfile
from pathlib import Path
from typing import Any

import click.testing
import pytest

from tilekernels.cli import _package, main

INFO = "tilekernels-0.1.0+cu130.sm90a.dist-info"
CUBINS = [b"\x7fELF" + bytes(14) + b"\xbe\0" + bytes([number]) * 300 for number in (1, 2)]
MANIFEST: dict[str, Any] = {
    "schema": 1,
    "version": "0.1.0",
    "profile": "demo",
    "archs": ["sm_90a"],
    "build": {"tilelang": "0.1.15", "nvcc": "13.0.88"},
    "kernels": [{"name": "demo.cast", "params": [{"name": "x"}, {"name": "out"}]}],
    "units": [
        {"id": f"demo.cast-sm_90a-{number}", "sha256": hashlib.sha256(cubin).hexdigest(), "bytes": len(cubin)}
        for number, cubin in enumerate(CUBINS)
    ],
    "variants": [
        {
            "kernel": "demo.cast",
            "variant": f"f{number}",
            "arch": "sm_90a",
            "guards": [],
            "launches": [{"registers": 32, "spill_bytes": 0, "grid": ["1", "1", "1"]}],
            "unit": f"demo.cast-sm_90a-{number}",
        }
        for number in (0, 1)
    ],
}
# an ELF file that holds its cubins where the manifest says nothing of: after some code, aligned
LIBRARY = b"\x7fELF" + bytes(60) + CUBINS[0] + bytes(20) + CUBINS[1] + bytes(100)


def write_wheel(folder: Path, manifest: dict[str, Any] = MANIFEST, **changes: bytes) -> Path:
    files = {
        "tilekernels/manifest.json": json.dumps(manifest).encode(),
        "tilekernels/lib/libtilekernels.so.0": LIBRARY,
        "tilekernels/__init__.py": b"",
        f"{INFO}/METADATA": b"Name: tilekernels\n",
    }
    files |= {name: content for name, content in changes.items() if "/" in name}
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tilekernels-0.1.0+cu130.sm90a-cp311-cp311-linux_x86_64.whl"
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b'=').decode()},{len(content)}"
        for name, content in files.items()
    ]
    with zipfile.ZipFile(wheel, "w") as archive:  # stored, so that a flipped byte of the file is one of its content
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(f"{INFO}/RECORD", "\n".join([*lines, f"{INFO}/RECORD,,"]) + "\n")
    return wheel


def invoke(*arguments: str | Path) -> tuple[int, str]:
    result = click.testing.CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_good_wheel(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    assert invoke("verify", wheel) == (0, f"{wheel.name}: good: 4 files, 2 units of machine code\n")


@pytest.mark.parametrize("where", ["library", "cubin", "source"])
def test_a_flipped_bit_in_a_wheel_is_found(tmp_path: Path, where: str) -> None:
    wheel = write_wheel(tmp_path)
    content = bytearray(wheel.read_bytes())
    start = content.find({"library": LIBRARY, "cubin": CUBINS[1], "source": b"Name: tile"}[where])
    content[start + (1 if where == "source" else 40)] ^= 1
    wheel.write_bytes(content)
    code, output = invoke("verify", wheel)
    assert code == 1
    assert "damaged" in output
    assert ("METADATA" if where == "source" else "libtilekernels.so.0") in output


def test_machine_code_that_does_not_belong_to_the_manifest_is_found(tmp_path: Path) -> None:
    """Both files have their recorded hashes, but come from two builds."""
    manifest = copy.deepcopy(MANIFEST)
    manifest["units"][1]["sha256"] = hashlib.sha256(b"another").hexdigest()
    code, output = invoke("verify", write_wheel(tmp_path, manifest))
    assert code == 1
    assert output.startswith("demo.cast-sm_90a-1: its machine code in tilekernels/lib/libtilekernels.so.0 is not what")


def test_an_installed_file_that_was_edited_or_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(write_wheel(tmp_path)) as archive:
        archive.extractall(tmp_path / "site")
    found = importlib.metadata.PathDistribution(tmp_path / "site" / INFO)
    monkeypatch.setattr(_package.importlib.metadata, "distribution", lambda _name: found)
    assert invoke("verify")[0] == 0
    (tmp_path / "site/tilekernels/__init__.py").write_text("# edited\n")
    (tmp_path / "site/tilekernels/lib/libtilekernels.so.0").unlink()
    code, output = invoke("verify")
    assert code == 1
    assert "tilekernels/__init__.py is not what was installed" in output
    assert "tilekernels/lib/libtilekernels.so.0 is missing" in output


@pytest.mark.parametrize("content", [b"", b"no zip file", b"PK\3\4cut"])
def test_what_is_no_wheel_is_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.whl"
    file.write_bytes(content)
    for command in (["verify", file], ["diff", file, file]):
        code, output = invoke(*command)
        assert code == 1
        assert "cannot be read as a wheel" in output


def test_a_wheel_does_not_differ_from_itself(tmp_path: Path) -> None:
    first, second = write_wheel(tmp_path / "a"), write_wheel(tmp_path / "b")
    assert invoke("diff", first, second) == (0, "the same files, byte for byte\n")


def test_diff_names_build_kernels_variants_code_and_files(tmp_path: Path) -> None:
    manifest = copy.deepcopy(MANIFEST)
    manifest["build"]["nvcc"] = "13.1.2"
    manifest["kernels"].append({"name": "demo.sum", "params": []})
    manifest["kernels"][0]["params"].append({"name": "scale"})
    manifest["variants"][0]["launches"][0]["registers"] = 40
    manifest["units"][1]["sha256"] = "0" * 64
    manifest["variants"].append({**manifest["variants"][0], "variant": "f2"})
    second = write_wheel(tmp_path / "b", manifest, **{"tilekernels/new.py": b"", "tilekernels/__init__.py": b"x"})
    code, output = invoke("diff", write_wheel(tmp_path / "a"), second)
    assert code == 1
    assert output.splitlines() == [
        "build:",
        "  nvcc: 13.0.88 -> 13.1.2",
        "kernels:",
        "  + demo.sum",
        '  demo.cast: parameters ["x", "out"] -> ["x", "out", "scale"]',
        "variants:",
        "  + demo.cast/f2 sm_90a",
        "machine code:",
        "  demo.cast/f0 sm_90a: registers: 32 -> 40",
        "  demo.cast/f1 sm_90a: its unit has other bytes",
        "files:",
        "  + tilekernels/new.py",
        "  ~ tilekernels/__init__.py",
        output.splitlines()[-1],
    ]
    assert output.splitlines()[-1].startswith("  ~ tilekernels/manifest.json (")
    code, output = invoke("diff", "--json", write_wheel(tmp_path / "a"), second)
    assert code == 1
    assert json.loads(output)["kernels"][0] == "+ demo.sum"
