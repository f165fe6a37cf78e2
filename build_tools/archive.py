"""The last step of every wheel: the archive written anew, so that equal files give equal bytes.

    python -m build_tools.archive dist/tilekernels-*.whl

Entries are sorted, `.dist-info` last and RECORD at the very end, with one date (SOURCE_DATE_EPOCH, else the first that
a zip file can hold) and with permissions that do not depend on the umask. RECORD is written anew, sorted as well.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import stat
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

FIRST_DATE = 315532800  # 1980-01-01, the beginning of time in zip files
LEVEL = 9  # named, because the default is the library's to choose


class ArchiveError(ValueError):
    """Not a wheel, or one that cannot be written anew."""


def source_date() -> int:
    """SOURCE_DATE_EPOCH, or the first date of zip files."""
    text = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not text:
        return FIRST_DATE
    if not text.isdecimal():
        raise ArchiveError(f"SOURCE_DATE_EPOCH must be a number of seconds, got {text!r}")
    return max(int(text), FIRST_DATE)


def read_wheel(wheel: Path) -> dict[str, tuple[bytes, bool]]:
    """{name: (content, executable)} of every file in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return {
                info.filename: (archive.read(info), bool(info.external_attr >> 16 & stat.S_IXUSR))
                for info in archive.infolist()
                if not info.is_dir()
            }
    except (zipfile.BadZipFile, zipfile.LargeZipFile, OSError) as error:
        raise ArchiveError(f"{wheel} cannot be read as a wheel: {error}") from None


def rewrite_wheel(wheel: Path, added: Mapping[str, bytes] | None = None, platform: str = "") -> Path:
    """Write the wheel anew in its folder. `added`: files put into its .dist-info, or replaced there. `platform`: the
    tag instead of its own, in the name as well; the name of the new file is returned."""
    files = read_wheel(wheel)
    records = [name for name in files if name.endswith(".dist-info/RECORD") and name.count("/") == 1]
    if len(records) != 1:
        raise ArchiveError(f"{wheel} must have one .dist-info/RECORD, got {len(records)}")
    record, info_folder = records[0], records[0].rpartition("/")[0]
    for name, content in (added or {}).items():
        files[f"{info_folder}/{name}"] = (content, False)
    target = wheel
    if platform:
        target = wheel.with_name(f"{wheel.name.rpartition('-')[0]}-{platform}.whl")
        files[f"{info_folder}/WHEEL"] = (_retag(files[f"{info_folder}/WHEEL"][0], target), False)
    del files[record]
    names = sorted(files, key=lambda name: (name.startswith(f"{info_folder}/"), name))
    files[record] = (_record([(name, files[name][0]) for name in names], record), False)
    temporary = target.with_name(f".new-{target.name}")
    _write(temporary, {name: files[name] for name in [*names, record]})
    os.replace(temporary, target)
    if target != wheel:
        wheel.unlink()
    return target


def _retag(metadata: bytes, wheel: Path) -> bytes:
    """WHEEL with the one tag of the file's name."""
    lines = [line for line in metadata.decode().splitlines() if line and not line.startswith("Tag:")]
    return "\n".join([*lines, f"Tag: {'-'.join(wheel.stem.split('-')[-3:])}", ""]).encode()


def _write(path: Path, files: Mapping[str, tuple[bytes, bool]]) -> None:
    date = time.gmtime(source_date())[:6]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as archive:
        for name, (content, executable) in files.items():
            info = zipfile.ZipInfo(name, date)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            info.create_system = 3  # Unix, whose permissions these are
            archive.writestr(info, content)
    path.chmod(0o644)


def _record(files: list[tuple[str, bytes]], record: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for name, content in sorted(files):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        writer.writerow([name, f"sha256={digest}", len(content)])
    writer.writerow([record, "", ""])
    return text.getvalue().encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+")
    for wheel in parser.parse_args().wheels:
        rewrite_wheel(wheel)


if __name__ == "__main__":
    main()
