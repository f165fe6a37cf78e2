"""One tar for a cluster without internet (`make bundle`): wheels, checksums, SBOM, papers, and a script that installs.

    python -m build_tools.bundle dist dist/tilekernels-0.1.0-bundle.tar

Inside: index/ (build_tools/index.py), dependencies/ (the wheel's own small ones; torch is the cluster's), sbom/, docs/,
SHA256SUMS, install.sh. The same files give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from .archive import source_date
from .index import label_of_wheel, write_index
from .packing import run_tool
from .wheel_label import ROOT, project_version

DOCS = ("README.md", "CHANGELOG.md", "LICENSE", "NOTICE", "licenses", "docs")
INSTALLER = ROOT / "build_tools" / "install.sh"
DEPENDENCIES = ROOT / "requirements-bundle.txt"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder with the wheels")
    parser.add_argument("bundle", type=Path, nargs="?", help="the tar to write")
    arguments = parser.parse_args()
    bundle = arguments.bundle or arguments.wheels / f"tilekernels-{project_version()}-bundle.tar"
    try:
        with tempfile.TemporaryDirectory(prefix="tilekernels-bundle-") as folder:
            fetch_dependencies(Path(folder))
            write_bundle(sorted(arguments.wheels.glob("*.whl")), sorted(Path(folder).glob("*.whl")), bundle)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: ended with {error.returncode}: {' '.join(map(str, error.cmd))}")
    print(f"{bundle} ({bundle.stat().st_size / 1e6:.1f} MB)")


def fetch_dependencies(folder: Path) -> None:
    """The pinned wheels that the command needs: pure Python, so that one file serves every Python."""
    run_tool("fetching what the command needs", [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps",
        "--only-binary", ":all:", "--dest", str(folder), "-r", str(DEPENDENCIES),
    ], os.environ)  # fmt: skip


def write_bundle(wheels: list[Path], dependencies: list[Path], bundle: Path) -> None:
    """Write the tar. Its one top folder is named like it."""
    files: dict[str, bytes] = {"install.sh": INSTALLER.read_bytes()}
    with tempfile.TemporaryDirectory(prefix="tilekernels-index-") as name:
        write_index(wheels, Path(name))
        files |= {f"index/{path.relative_to(name)}": path.read_bytes() for path in _files(Path(name))}
    files |= {f"dependencies/{wheel.name}": wheel.read_bytes() for wheel in dependencies}
    files |= {f"sbom/{label_of_wheel(wheel)}-{wheel.stem}.cdx.json": _sbom(wheel) for wheel in wheels}
    for part in DOCS:
        files |= {f"docs/{path.relative_to(ROOT)}": path.read_bytes() for path in _files(ROOT / part)}
    sums = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    _write_tar({**files, "SHA256SUMS": sums.encode()}, bundle.name.removesuffix(".tar"), bundle)


def _write_tar(files: dict[str, bytes], top: str, bundle: Path) -> None:
    bundle.parent.mkdir(parents=True, exist_ok=True)
    temporary = bundle.with_name(f".new-{bundle.name}")
    with tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(files):
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mtime = len(files[name]), source_date()
            info.mode = 0o755 if name == "install.sh" else 0o644
            archive.addfile(info, io.BytesIO(files[name]))
    temporary.replace(bundle)


def _sbom(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.endswith(".dist-info/sboms/tilekernels.cdx.json")]
        if len(found) != 1:
            raise ValueError(f"{wheel.name} holds no SBOM; build it again by make wheels")
        return archive.read(found[0])


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
