"""The store: files change only when their content does, and nothing half-done looks finished."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path

import pytest

from build_tools.errors import BuildError
from build_tools.store import MANIFEST, Store, to_json
from build_tools.units import make_units
from tests.build_tools.fake_trace import traced


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_layout(tmp_path: Path) -> None:
    store = Store(tmp_path)
    variant = traced("f2")
    (unit,) = make_units([variant], tmp_path)
    store.write_variant(variant)
    store.write_unit(unit, b"cubin", "ptxas")
    store.write(MANIFEST, b"{}\n")
    assert names(tmp_path) == [
        "manifest.json",
        "units/demo/scale/sm_90a/0/ptxas.txt",
        "units/demo/scale/sm_90a/0/unit.cu",
        "units/demo/scale/sm_90a/0/unit.cubin",
        "variants/demo/scale/sm_90a/f2/kernel.cu",
        "variants/demo/scale/sm_90a/f2/launch.json",
    ]
    assert store.read_variants() == [variant]


def test_the_first_change_takes_the_manifest_away_and_the_same_content_does_not(tmp_path: Path) -> None:
    first = Store(tmp_path)
    first.write("units/a", b"1")
    first.write(MANIFEST, b"{}\n")
    assert first.changed

    same = Store(tmp_path)
    before = (tmp_path / "units" / "a").stat().st_mtime_ns
    same.write("units/a", b"1")
    same.write(MANIFEST, b"{}\n")
    assert not same.changed
    assert (tmp_path / "units" / "a").stat().st_mtime_ns == before

    other = Store(tmp_path)
    other.write("units/a", b"2")
    assert other.changed
    assert not (tmp_path / MANIFEST).exists()


def test_folders_of_earlier_builds_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for variant in (traced("f2"), traced("f3"), traced("f4", kernel="demo.other")):
        store.write_variant(variant)
    store.write(MANIFEST, b"{}\n")
    store.prune("variants", ["variants/demo/scale/sm_90a/f2"])
    assert [variant.place for variant in store.read_variants()] == [("demo.scale", "sm_90a", "f2")]
    assert not (tmp_path / "variants" / "demo" / "other").exists()
    assert not (tmp_path / MANIFEST).exists()


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.write("gen/ops.h", b"old")

    def refuse(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("build_tools.store.os.replace", refuse)
    with pytest.raises(KeyboardInterrupt):
        store.write("gen/ops.h", b"new")
    assert names(tmp_path) == ["gen/ops.h"]
    assert (tmp_path / "gen" / "ops.h").read_bytes() == b"old"


def test_a_second_build_waits_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    order: list[str] = []

    def second() -> None:
        with Store(tmp_path).locked(said.append):
            order.append("second")

    with Store(tmp_path).locked(said.append):
        thread = threading.Thread(target=second)
        thread.start()
        while not said:
            time.sleep(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert said == [f"another build writes {tmp_path}: waiting for it"]


def test_a_lock_file_without_its_process_does_not_block(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as abandoned:
        fcntl.flock(abandoned, fcntl.LOCK_EX)
    said: list[str] = []
    with Store(tmp_path).locked(said.append):
        assert said == []


def test_a_store_that_cannot_be_made_is_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(BuildError, match=r"the store \S+/file/store cannot be written \(Not a directory\)"),
        Store(tmp_path / "file" / "store").locked(print),
    ):
        pass


def test_a_damaged_variant_says_how_to_mend_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write_variant(traced("f2"))
    (tmp_path / "variants/demo/scale/sm_90a/f2/launch.json").write_text("{")
    with pytest.raises(BuildError, match=r"cannot be read .* run python -m build_tools trace"):
        store.read_variants()


def test_json_is_deterministic_and_readable() -> None:
    assert to_json({"b": [1, "ü"], "a": None}) == '{\n "b": [\n  1,\n  "ü"\n ],\n "a": null\n}\n'.encode()
