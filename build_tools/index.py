"""A static index of wheels for installers, a folder for each CUDA-arch pair (`make index`).

    python -m build_tools.index dist dist/index
    pip install tilekernels --index-url file:///where/index/cu130.sm90a/

Installers order local version labels as text, whatever the GPU is: in one flat page they would take the wheel of a
GPU that is not there. So each label has an index of its own (PEP 503). A web server or file:// can serve the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import shutil
import sys
import urllib.parse
import zipfile
from pathlib import Path

from .store import replace_file

PROJECT = "tilekernels"
PAGE = (
    '<!DOCTYPE html>\n<html>\n<head><meta name="pypi:repository-version" content="1.0"><title>{title}</title></head>\n'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, help="folder with the wheels")
    parser.add_argument("index", type=Path, help="folder to write")
    arguments = parser.parse_args()
    try:
        labels = write_index(sorted(arguments.wheels.glob("*.whl")), arguments.index)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for label in labels:
        print(f"pip install {PROJECT} --index-url {(arguments.index / label).resolve().as_uri()}/")


def write_index(wheels: list[Path], index: Path) -> list[str]:
    """Write the folders and return their labels. What an earlier run wrote for them is replaced."""
    by_label: dict[str, list[Path]] = {}
    for wheel in wheels:
        by_label.setdefault(label_of_wheel(wheel), []).append(wheel)
    if not by_label:
        raise ValueError("no wheel was given: run make wheels first")
    for label, group in by_label.items():
        _write_label(group, index / label)
    labels = sorted({*by_label, *(path.parent.parent.name for path in index.glob(f"*/{PROJECT}/index.html"))})
    links = "".join(f'<a href="{_quote(label)}/">{html.escape(label)}</a><br>\n' for label in labels)
    note = "<p>Choose the GPU architecture, then give pip that folder as --index-url.</p>\n"
    _write_page(index / "index.html", f"{PROJECT} wheels", note + links)
    return labels


def label_of_wheel(wheel: Path) -> str:
    """`tilekernels-0.1.0+cu130.sm90a-cp311-...whl` -> `cu130.sm90a`."""
    name, _, rest = wheel.name.partition("-")
    label = rest.partition("-")[0].partition("+")[2]
    if name != PROJECT or not label:
        raise ValueError(f"{wheel.name} is no tilekernels wheel with a label (+cu130.sm90a); build it by make wheels")
    return label


def _write_label(wheels: list[Path], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    project = folder / PROJECT
    project.mkdir(parents=True)
    links = []
    for wheel in wheels:
        shutil.copyfile(wheel, project / wheel.name)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        # the metadata beside the wheel: an installer need not fetch the wheel to resolve
        metadata = _metadata(wheel)
        replace_file(project / f"{wheel.name}.metadata", metadata)
        core = f"sha256={hashlib.sha256(metadata).hexdigest()}"
        links.append(
            f'<a href="{_quote(wheel.name)}#sha256={digest}" data-requires-python="&gt;=3.10" '
            f'data-core-metadata="{core}" data-dist-info-metadata="{core}">{html.escape(wheel.name)}</a><br>\n'
        )
    _write_page(project / "index.html", f"{PROJECT} for {folder.name}", "".join(links))
    _write_page(folder / "index.html", folder.name, f'<a href="{PROJECT}/">{PROJECT}</a>\n')


def _metadata(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return archive.read(name)


def _quote(name: str) -> str:
    return urllib.parse.quote(name)


def _write_page(file: Path, title: str, body: str) -> None:
    replace_file(file, f"{PAGE.format(title=html.escape(title))}<body>\n{body}</body>\n</html>\n".encode())


if __name__ == "__main__":
    main()
