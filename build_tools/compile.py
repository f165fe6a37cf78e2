"""compile: one unit -> unit.cubin and what ptxas says of it.

Runs nvcc by relative name in an empty folder, where the bytes depend on nothing but the source, the flags and the
compiler. When a unit fails, the variants at fault are found by the lines and symbols in nvcc's words, or else by trying
halves; each is named with the words about it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from .cache import Cache, make_key
from .errors import BuildError
from .ptxas import Usage, parse, without_times
from .toolchain import Toolchain
from .units import TracedVariant, Unit, lines_of, unit_source

NVCC_TIMEOUT = 1800  # seconds; the slowest unit seen takes 60: a compiler that hangs must not hang the build


class CompileError(BuildError):
    """nvcc refused a source, or made a cubin that must not ship."""

    def __init__(self, sentence: str, command: str, output: str) -> None:
        super().__init__(f"{sentence}\n  {command}\n{_indent(output)}")
        self.sentence, self.command, self.output = sentence, command, output


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What one run of nvcc leaves."""

    cubin: bytes
    ptxas: str

    @property
    def usage(self) -> dict[str, Usage]:
        return parse(self.ptxas)


@dataclasses.dataclass(frozen=True)
class BadVariants:
    """Variants that do not compile (several only if each of them compiles alone), with the source that nvcc saw."""

    variants: tuple[TracedVariant, ...]
    source: str
    error: CompileError


@dataclasses.dataclass(frozen=True)
class UnitResult:
    """A unit's outcome: either `compiled` or the list `bad`."""

    unit: Unit
    compiled: Compiled | None
    bad: tuple[BadVariants, ...]
    seconds: float  # of nvcc; 0 when it came from the cache
    cached: bool


def find_compiled(unit: Unit, toolchain: Toolchain, cache: Cache) -> UnitResult | None:
    """The unit's outcome if the cache holds it."""
    hit = cache.get(compile_key(unit, toolchain))
    if hit is None or hit.keys() != {"unit.cubin", "ptxas.txt"}:
        return None
    return UnitResult(unit, Compiled(hit["unit.cubin"], hit["ptxas.txt"].decode()), (), 0.0, cached=True)


def compile_unit(unit: Unit, toolchain: Toolchain, cache: Cache, kernels_src: Path) -> UnitResult:
    """The unit's cubin from nvcc, put into the cache; never raises for a kernel that does not compile."""
    start = time.monotonic()
    try:
        compiled = compile_source(unit.source, symbols_of(unit.variants), unit.flags, toolchain)
    except CompileError as error:
        bad = _find_bad(unit, unit.variants, unit.source, error, toolchain, kernels_src)
        return UnitResult(unit, None, tuple(bad), time.monotonic() - start, cached=False)
    put_compiled(unit, compiled, toolchain, cache)
    return UnitResult(unit, compiled, (), time.monotonic() - start, cached=False)


def put_compiled(unit: Unit, compiled: Compiled, toolchain: Toolchain, cache: Cache) -> None:
    """Keep what nvcc made of a unit."""
    cache.put(compile_key(unit, toolchain), to_files(compiled))


def to_files(compiled: Compiled) -> dict[str, bytes]:
    """The cache's form of it."""
    return {"unit.cubin": compiled.cubin, "ptxas.txt": compiled.ptxas.encode()}


def compile_key(unit: Unit, toolchain: Toolchain) -> str:
    """Everything that decides the cubin. TileLang's version stands for the content of its headers."""
    content = {
        "source": unit.source,
        "flags": list(unit.flags),
        "nvcc": toolchain.build,
        "headers": f"tilelang {toolchain.tilelang}",
    }
    return make_key({"stage": "compile", "symbols": sorted(symbols_of(unit.variants)), **content})


def compile_source(source: str, symbols: Sequence[str], flags: Sequence[str], toolchain: Toolchain) -> Compiled:
    """Compile one source and check that the cubin holds `symbols` and nothing that belongs to this machine."""
    command = [str(toolchain.nvcc), *flags, *toolchain.include_flags, "-o", "unit.cubin", "unit.cu"]
    shown = shlex.join(command)
    with tempfile.TemporaryDirectory(prefix="tilekernels-nvcc-") as name:
        folder = Path(name)
        (folder / "unit.cu").write_text(source)
        code, output = run_nvcc(command, folder)
        output = without_times(output.replace(f"{name}/", ""))
        if code != 0 or not (folder / "unit.cubin").is_file():
            raise CompileError(f"nvcc ended with exit code {code}", shown, output)
        compiled = Compiled((folder / "unit.cubin").read_bytes(), output)
    problem = find_machine_trace(compiled.cubin)
    if problem:
        raise CompileError(f"the cubin would not be the same elsewhere: {problem}", shown, output)
    missing = sorted(set(symbols) - compiled.usage.keys())
    if missing:
        raise CompileError(f"the source defines no kernel {', '.join(missing)}", shown, output)
    return compiled


def _find_bad(
    unit: Unit,
    variants: tuple[TracedVariant, ...],
    source: str,
    error: CompileError,
    toolchain: Toolchain,
    kernels_src: Path,
) -> list[BadVariants]:
    """The variants at fault among `variants`, whose `source` failed with `error`."""
    if len(variants) == 1:
        return [BadVariants(variants, source, error)]
    blamed = blame(error.output, source, variants)
    found = [
        BadVariants((variant,), source, CompileError(error.sentence, error.command, blamed[variant.place]))
        for variant in variants
        if variant.place in blamed
    ]
    # nvcc stops after a while, and its words may name nobody: try what is left, whole or in halves
    middle = len(variants) // 2
    rest = tuple(variant for variant in variants if variant.place not in blamed)
    parts = (rest,) if blamed else (variants[:middle], variants[middle:])
    for part in filter(None, parts):
        part_source = unit_source(part, kernels_src)
        try:
            compile_source(part_source, symbols_of(part), unit.flags, toolchain)
        except CompileError as part_error:
            found += _find_bad(unit, part, part_source, part_error, toolchain, kernels_src)
    return found or [BadVariants(variants, source, error)]


_ERROR_LINE = re.compile(r"^unit\.cu\((\d+)\): (?:catastrophic )?error\b")
_ERROR_SYMBOL = re.compile(r"^ptxas\b.*\berror\b.*'(\w+)'")


def blame(output: str, source: str, variants: Sequence[TracedVariant]) -> dict[tuple[str, str, str], str]:
    """The compiler's words about each variant, by `place`, for those that it names by line or symbol."""
    owners = lines_of(source, variants)
    by_symbol = {symbol: variant.place for variant in variants for symbol in variant.symbols}
    words: dict[tuple[str, str, str], list[str]] = {}
    current: tuple[str, str, str] | None = None
    for line in output.splitlines():
        if at_line := _ERROR_LINE.match(line):
            current = next((place for first, last, place in owners if first <= int(at_line[1]) <= last), None)
        elif at_symbol := _ERROR_SYMBOL.match(line):
            current = by_symbol.get(at_symbol[1])
        elif re.match(r"^\S", line):
            current = None  # another message, or the count at the end
        if current is not None:
            words.setdefault(current, []).append(line)
    return {place: "\n".join(lines).rstrip() + "\n" for place, lines in words.items()}


# What puts a machine's paths into a cubin: device asserts, __FILE__, -lineinfo, and names that nvcc makes unique
_UNIQUE_NAMES = {
    b"_INTERNAL_": "a name made from the path of the source (static __device__ data, an anonymous namespace)",
    b"_GLOBAL__N_": "a name out of an anonymous namespace",
}
_PATH = re.compile(rb"(?<![\w.+/<-])/(?:[\w.+-]{2,}/)+[\w.+-]{2,}")
_SHORTEST_PATH = 10  # bytes; machine code looks like a shorter one now and then


def find_machine_trace(cubin: bytes) -> str:
    """Why the bytes of this cubin depend on the machine or the folder, or ""."""
    for name, meaning in _UNIQUE_NAMES.items():
        if name in cubin:
            return f"it contains {name.decode()}: {meaning}"
    for match in _PATH.finditer(cubin):
        if len(match[0]) >= _SHORTEST_PATH:
            return f"it contains the path {match[0].decode()} (a device assert, __FILE__ or -lineinfo)"
    return ""


def symbols_of(variants: Sequence[TracedVariant]) -> list[str]:
    return [symbol for variant in variants for symbol in variant.symbols]


# ---- running nvcc ---------------------------------------------------------------------------------------------------

_running: set[subprocess.Popen[str]] = set()
_running_lock = threading.Lock()
_stopping = threading.Event()


def run_nvcc(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of one compiler run with its temporary files in `folder`."""
    # Flags in the environment would change the bytes without showing in the manifest
    environment = {
        name: value for name, value in os.environ.items() if name not in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
    }
    environment |= {"TMPDIR": str(folder), "LC_ALL": "C"}
    with _running_lock:
        if _stopping.is_set():
            return -signal.SIGTERM, "stopped"
        # its own session: nvcc's children (cicc, ptxas) must end with it, and Ctrl-C must reach Python first
        process = subprocess.Popen(
            list(command), cwd=folder, env=environment, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        _running.add(process)
    try:
        output, _ = process.communicate(timeout=NVCC_TIMEOUT)
    except subprocess.TimeoutExpired:
        _kill(process)
        output = process.communicate()[0] + f"\nstopped after {NVCC_TIMEOUT} s\n"
    finally:
        with _running_lock:
            _running.discard(process)
    return process.returncode, output


def stop_compilers() -> None:
    """End all running compilers and start no more, for Ctrl-C."""
    _stopping.set()
    with _running_lock:
        for process in _running:
            _kill(process)


def allow_compilers() -> None:
    """Undo `stop_compilers` at the start of a build."""
    _stopping.clear()


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.strip().splitlines())
