"""The archive of a wheel: the same files give the same bytes, whatever wrote them and in which order."""

from __future__ import annotations

import csv
import io
import os
import zipfile
from pathlib import Path

import pytest

from build_tools.archive import ArchiveError, rewrite_wheel

INFO = "demo-1.dist-info"
FILES = {
    "demo/b.py": b"b",
    "demo/a.so": b"a" * 1000,
    f"{INFO}/WHEEL": b"Wheel-Version: 1.0\n",
    f"{INFO}/METADATA": b"Name: demo\n",
    f"{INFO}/RECORD": b"demo/b.py,sha256=wrong,1\n",
}


def write(path: Path, names: list[str], year: int = 2020, mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            info = zipfile.ZipInfo(name, (year, 1, 2, 3, 4, 6))
            info.external_attr = (0o755 if name.endswith(".so") else mode) << 16
            archive.writestr(info, FILES[name])
    return path


def test_order_dates_permissions_and_compression_do_not_matter(tmp_path: Path) -> None:
    first = write(tmp_path / "1" / "demo-1-py3-none-any.whl", list(FILES))
    second = write(tmp_path / "2" / "demo-1-py3-none-any.whl", list(reversed(FILES)), year=2024, mode=0o600)
    for wheel in (first, second):
        rewrite_wheel(wheel)
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        infos = archive.infolist()
        record = archive.read(f"{INFO}/RECORD").decode()
    assert [info.filename for info in infos] == [
        "demo/a.so", "demo/b.py", f"{INFO}/METADATA", f"{INFO}/WHEEL", f"{INFO}/RECORD",
    ]  # fmt: skip
    assert [oct(info.external_attr >> 16 & 0o777) for info in infos] == ["0o755", "0o644", "0o644", "0o644", "0o644"]
    assert {info.date_time for info in infos} == {(1980, 1, 1, 0, 0, 0)}
    rows = list(csv.reader(io.StringIO(record)))
    assert [row[0] for row in rows] == [*sorted(name for name in FILES if name != f"{INFO}/RECORD"), f"{INFO}/RECORD"]
    assert rows[3] == ["demo/b.py", "sha256=PiPoFgA5WUoziU9lZOGxNIu9egCI1CxKy3PurtWcAJ0", "1"]


def test_the_date_is_the_one_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1767225600")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    wheel = write(tmp_path / "demo-1-py3-none-any.whl", list(FILES))
    rewrite_wheel(wheel)
    with zipfile.ZipFile(wheel) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2026, 1, 1, 0, 0, 0)}


def test_files_are_added_to_the_metadata(tmp_path: Path) -> None:
    wheel = write(tmp_path / "demo-1-py3-none-any.whl", list(FILES))
    rewrite_wheel(wheel, {"sboms/demo.cdx.json": b"{}"})
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read(f"{INFO}/sboms/demo.cdx.json") == b"{}"
        assert f"{INFO}/sboms/demo.cdx.json,sha256=" in archive.read(f"{INFO}/RECORD").decode()


def test_another_platform_is_in_the_name_and_the_metadata(tmp_path: Path) -> None:
    wheel = write(tmp_path / "demo-1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", list(FILES))
    renamed = rewrite_wheel(wheel, platform="manylinux_2_28_x86_64")
    assert [path.name for path in tmp_path.iterdir()] == ["demo-1-cp311-cp311-manylinux_2_28_x86_64.whl"]
    with zipfile.ZipFile(renamed) as archive:
        assert archive.read(f"{INFO}/WHEEL") == b"Wheel-Version: 1.0\nTag: cp311-cp311-manylinux_2_28_x86_64\n"


def test_what_is_no_wheel_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.whl"
    file.write_bytes(b"no zip")
    with pytest.raises(ArchiveError, match="cannot be read as a wheel"):
        rewrite_wheel(file)
    assert file.read_bytes() == b"no zip"
    wheel = write(tmp_path / "y.whl", ["demo/b.py"])
    with pytest.raises(ArchiveError, match="must have one"):
        rewrite_wheel(wheel)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    with pytest.raises(ArchiveError, match="SOURCE_DATE_EPOCH must be a number"):
        rewrite_wheel(write(tmp_path / "z.whl", list(FILES)))
    assert sorted(os.listdir(tmp_path)) == ["x.whl", "y.whl", "z.whl"]
