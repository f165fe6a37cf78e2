"""Running programs, and Python with the library in it, under the sanitizers that TILEKERNELS_SANITIZE names."""

from __future__ import annotations

import os
import subprocess

SANITIZE = os.environ.get("TILEKERNELS_SANITIZE", "")

_RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
# Python never frees all it allocates; a program that uses a library does not either.
_OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": "halt_on_error=1"}


def compile_flags() -> list[str]:
    return [f"-fsanitize={SANITIZE}", "-fno-sanitize-recover=all", "-g"] if SANITIZE else []


def launcher() -> list[str]:
    """What stands before a program's command line: ThreadSanitizer wants addresses where it expects them."""
    return ["setarch", "--addr-no-randomize"] if "thread" in SANITIZE else []


def environment(is_instrumented: bool) -> dict[str, str]:
    """Variables of a process; a program that was compiled without the sanitizer, such as Python, loads it first."""
    if not SANITIZE:
        return {}
    names = SANITIZE.split(",")
    found = [
        subprocess.run(
            ["gcc", f"-print-file-name={_RUNTIMES[name]}"], capture_output=True, text=True, check=True
        ).stdout
        for name in names
    ]
    preload = {} if is_instrumented else {"LD_PRELOAD": " ".join(path.strip() for path in found)}
    return _OPTIONS | preload
