"""embed against the golden files, and the object that the assembler makes of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from build_tools.embed import embed
from build_tools.errors import EmbedError
from tests.golden_store import REGENERATE, STORE, read_manifest

FILES = ["blobs.S", "blobs.cpp"]


@pytest.mark.parametrize("name", FILES)
def test_golden_file(name: str, tmp_path: Path) -> None:
    embed(read_manifest(), STORE, tmp_path)
    assert (tmp_path / name).read_text() == (STORE / "gen" / name).read_text(), f"if this is meant: {REGENERATE}"


def test_place_of_the_store_is_in_no_byte(tmp_path: Path) -> None:
    store = tmp_path / "elsewhere"
    shutil.copytree(STORE, store)
    embed(read_manifest(), store, store / "gen")
    for name in FILES:
        assert (store / "gen" / name).read_bytes() == (STORE / "gen" / name).read_bytes()


def test_second_run_touches_nothing(tmp_path: Path) -> None:
    embed(read_manifest(), STORE, tmp_path)
    for name in FILES:
        os.utime(tmp_path / name, (1, 1))
    embed(read_manifest(), STORE, tmp_path)
    assert {(tmp_path / name).stat().st_mtime for name in FILES} == {1}


def test_object_holds_the_cubins_aligned(tmp_path: Path) -> None:
    units = read_manifest()["units"]
    subprocess.run(["gcc", f"-Wa,-I,{STORE}", "-c", STORE / "gen" / "blobs.S", "-o", tmp_path / "blobs.o"], check=True)
    raw = tmp_path / "rodata"
    subprocess.run(["objcopy", "-O", "binary", "-j", ".rodata", tmp_path / "blobs.o", raw], check=True)
    symbols = subprocess.run(
        ["readelf", "--symbols", "--wide", tmp_path / "blobs.o"], check=True, capture_output=True, text=True
    ).stdout
    found = {
        int(index): (int(address, 16), int(size), visibility)
        for address, size, visibility, index in re.findall(
            r"([0-9a-f]{16}) +(\d+) OBJECT +GLOBAL (\w+) +\d+ tk_blob_(\d+)", symbols
        )
    }
    assert sorted(found) == list(range(len(units)))
    for index, unit in enumerate(units):
        address, size, visibility = found[index]
        assert (address % 16, size, visibility) == (0, unit["bytes"], "HIDDEN")
        assert raw.read_bytes()[address : address + size] == (STORE / unit["file"]).read_bytes()


def test_object_asks_for_no_executable_stack(tmp_path: Path) -> None:
    subprocess.run(["gcc", f"-Wa,-I,{STORE}", "-c", STORE / "gen" / "blobs.S", "-o", tmp_path / "blobs.o"], check=True)
    sections = subprocess.run(
        ["readelf", "--sections", "--wide", tmp_path / "blobs.o"], check=True, capture_output=True, text=True
    ).stdout
    (note,) = [line for line in sections.splitlines() if ".note.GNU-stack" in line]
    assert "X" not in note.split("PROGBITS")[1].split()[4]


def test_store_without_units_assembles(tmp_path: Path) -> None:
    embed(read_manifest() | {"units": []}, STORE, tmp_path)
    assert "kNumBlobs = 0;" in (tmp_path / "blobs.cpp").read_text()
    subprocess.run(["gcc", "-c", tmp_path / "blobs.S", "-o", tmp_path / "blobs.o"], check=True)


# ---- stores that do not fit their manifest ---------------------------------------------------------------------------


def test_missing_cubin_is_named(tmp_path: Path) -> None:
    shutil.copytree(STORE, tmp_path / "store")
    (tmp_path / "store/units/demo/cast/sm_90a/0/unit.cubin").unlink()
    with pytest.raises(
        EmbedError, match=r"embed: demo.cast-sm_90a-0: \S+/unit.cubin is missing; build the store again"
    ):
        embed(read_manifest(), tmp_path / "store", tmp_path / "out")


def test_changed_cubin_is_refused(tmp_path: Path) -> None:
    shutil.copytree(STORE, tmp_path / "store")
    (tmp_path / "store/units/demo/rank/sm_80/0/unit.cubin").write_bytes(b"other")
    with pytest.raises(
        EmbedError, match=r"embed: demo.rank-sm_80-0: .* must have \d+ bytes and sha256 \w+, .*got 5 bytes"
    ):
        embed(read_manifest(), tmp_path / "store", tmp_path / "out")
    assert not (tmp_path / "out").exists()
