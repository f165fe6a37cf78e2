"""The cache: whole entries or none, whatever happens to its folder or to those who write it."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from build_tools import cache as cache_module
from build_tools.cache import ABANDONED_AFTER, Cache, default_cache_folder, make_key

FILES = {"unit.cubin": bytes(range(256)) * 40, "ptxas.txt": b"Used 32 registers\n"}
KEY = make_key({"source": "x"})


def entry_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_an_entry_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    Cache(tmp_path, "compile").put(KEY, FILES)
    assert Cache(tmp_path, "compile").get(KEY) == FILES


def test_kinds_and_keys_are_apart(tmp_path: Path) -> None:
    Cache(tmp_path, "compile").put(KEY, FILES)
    assert Cache(tmp_path, "trace").get(KEY) is None
    assert Cache(tmp_path, "compile").get(make_key({"source": "y"})) is None


def test_the_key_depends_on_content_only() -> None:
    assert make_key({"a": 1, "b": [2, "x"]}) == make_key({"b": [2, "x"], "a": 1})
    assert make_key({"a": 1}) != make_key({"a": 2})


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "no json", "lengthen"])
def test_a_damaged_entry_counts_as_missing_and_can_be_stored_anew(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path, "compile")
    cache.put(KEY, FILES)
    (file,) = entry_files(tmp_path)
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
    elif damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "empty":
        content.clear()
    elif damage == "no json":
        content[:5] = b"?????"
    else:
        content += b"more"
    file.write_bytes(content)
    assert cache.get(KEY) is None
    cache.put(KEY, FILES)
    assert cache.get(KEY) == FILES


def test_a_cache_that_cannot_be_written_still_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Cache(tmp_path, "compile").put(KEY, FILES)
    cache = Cache(tmp_path, "compile")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(cache_module.tempfile, "mkstemp", refuse)
    other = make_key({"source": "z"})
    cache.put(other, FILES)
    assert cache.get(KEY) == FILES
    assert cache.get(other) is None
    assert cache.write_problem is not None
    assert cache.write_problem.endswith("compile-1: Read-only file system")


def test_a_full_disk_leaves_no_half_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path, "compile")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache_module.os, "replace", refuse)
    cache.put(KEY, FILES)
    assert entry_files(tmp_path) == []
    assert cache.get(KEY) is None


def _write_often(folder: str, number: int) -> None:
    cache = Cache(Path(folder), "compile")
    for _ in range(100):
        cache.put(KEY, {"unit.cubin": bytes([number]) * 100_000})


def test_concurrent_builders_leave_whole_entries(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_often, args=(str(tmp_path), number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    cache = Cache(tmp_path, "compile")
    seen = 0
    while any(writer.is_alive() for writer in writers):
        entry = cache.get(KEY)
        if entry is not None:
            seen += 1
            assert entry["unit.cubin"] in (b"\1" * 100_000, b"\2" * 100_000)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen > 0
    assert len(entry_files(tmp_path)) == 1


def test_a_killed_builder_leaves_a_file_that_is_removed_a_day_later(tmp_path: Path) -> None:
    cache = Cache(tmp_path, "compile")
    cache.put(KEY, FILES)
    (entry,) = entry_files(tmp_path)
    fresh, old = entry.parent / ".tmp-fresh", entry.parent / ".tmp-old"
    for file in (fresh, old):
        file.write_bytes(b"half an ent")
    long_ago = time.time() - ABANDONED_AFTER - 1
    os.utime(old, (long_ago, long_ago))
    cache.remove_abandoned()
    assert sorted(path.name for path in entry.parent.iterdir()) == sorted([".tmp-fresh", entry.name])
    assert cache.get(KEY) == FILES


def test_the_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERNELS_CACHE", str(tmp_path / "elsewhere"))
    assert default_cache_folder() == tmp_path / "elsewhere"
    monkeypatch.delenv("TILEKERNELS_CACHE")
    assert default_cache_folder().parts[-2:] == ("build", "cache")
