"""Loads the compiled extension `tilekernels._C` once, or says in a sentence why it cannot be loaded.

Apart from the dispatch because the command needs it where torch is missing.
"""

import functools
import importlib
import importlib.metadata
import importlib.resources
import re
from pathlib import Path
from types import ModuleType

from ._version import __version__

# What the dynamic linker says -> what it means and what to do. First match wins.
_DIAGNOSES = [
    (
        r"libtilekernels\S*: cannot open shared object",
        "the install is incomplete: lib/libtilekernels.so.0 is missing beside the extension; reinstall the wheel",
    ),
    (
        r"undefined symbol",
        "two builds are mixed: the extension wants a symbol that the libraries it found do not have. This is not about "
        "the GPU architecture; remove every installed tilekernels and install one wheel",
    ),
    (
        r"version `(GLIBC_\S+|GLIBCXX_\S+|CXXABI_\S+)' not found",
        "this system's C or C++ runtime is older than the one that the wheel was built for; use the manylinux wheel",
    ),
    (
        r"file too short|invalid ELF header|wrong ELF class",
        "the file is damaged or made for another kind of machine; reinstall the wheel for this platform",
    ),
    (r"cannot open shared object", "a system library that the extension needs is missing"),
]
_UNKNOWN = "the dynamic linker refused it; reinstall the wheel, and report this text if that does not help"


def find_damaged() -> list[str]:
    """Compiled files whose size is not the recorded one. Loading a truncated file can end the process with SIGBUS, so
    the command looks before it loads."""
    try:
        files = importlib.metadata.files(__package__) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    compiled = [file for file in files if ".so" in file.suffixes and file.size is not None]
    return [str(file) for file in compiled if _size_of(Path(str(file.locate()))) != file.size]


def _size_of(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


@functools.cache
def load_native() -> ModuleType | None:
    """`tilekernels._C`, or None in a tree that was never built; ImportError with a diagnosis where it is broken."""
    name = f"{__package__}._C"
    try:
        extension = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    except ImportError as error:
        meaning = diagnose(str(error))
        raise ImportError(f"tilekernels._C does not load: {meaning}.\n  the linker said: {error}") from error
    else:
        _check_version(extension.version())
        return extension
    others = _builds_for_other_pythons()
    if others:
        raise ImportError(
            f"tilekernels._C was built for another Python ({', '.join(others)} found); install the wheel for this one"
        )
    return None


def diagnose(linker_text: str) -> str:
    """What a dynamic linker's complaint means for the person who has to repair the install."""
    for pattern, meaning in _DIAGNOSES:
        if re.search(pattern, linker_text):
            return meaning
    return _UNKNOWN


def _check_version(version: str) -> None:
    """The library's version has to be that of the Python files; a label (+cu130.sm90a) is the build's own."""
    if version.partition("+")[0] != __version__:
        raise ImportError(
            f"tilekernels._C does not load: two builds are mixed: the Python files are {__version__}, the library is "
            f"{version}; remove every installed tilekernels and install one wheel"
        )


def _builds_for_other_pythons() -> list[str]:
    files = importlib.resources.files(__package__).iterdir()
    return sorted(file.name for file in files if re.fullmatch(r"_C\..+\.(so|pyd)", file.name))
