"""units: which variants nvcc compiles together, and the one source file made of theirs.

nvcc spends most of its time on headers: ten kernels take 11 s one by one and 2 s in one file. A unit holds variants of
one kernel, arch and set of flags, at most 16 by sorted id, so what is in a unit follows from the plan alone, never from
what is cached.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_VARIANTS = 16

# c++20 is what TileLang's headers are written in; they warn 40 times a file (-w). -Xptxas -v: registers and spills.
# No -lineinfo: it puts paths into cubins.
BASE_FLAGS = ("--cubin", "-O3", "-std=c++20", "-w", "-Xptxas", "-v")


@dataclasses.dataclass(frozen=True)
class TracedVariant:
    """One variant after tracing: kernel.cu and launch.json."""

    source: str
    launch: Mapping[str, Any]

    @property
    def kernel(self) -> str:
        return str(self.launch["kernel"])

    @property
    def id(self) -> str:
        return str(self.launch["variant"])

    @property
    def arch(self) -> str:
        return str(self.launch["arch"])

    @property
    def place(self) -> tuple[str, str, str]:
        """What identifies a variant within a build."""
        return self.kernel, self.arch, self.id

    @property
    def symbols(self) -> tuple[str, ...]:
        return tuple(launch["symbol"] for launch in self.launch["launches"])


@dataclasses.dataclass(frozen=True)
class Unit:
    """What one run of nvcc compiles."""

    kernel: str
    arch: str
    number: int
    flags: tuple[str, ...]  # all of nvcc's flags except include folders and file names
    extra_flags: tuple[str, ...]  # those that the kernel asked for
    variants: tuple[TracedVariant, ...]
    source: str

    @property
    def id(self) -> str:
        return f"{self.kernel}-{self.arch}-{self.number}"


def make_units(variants: Iterable[TracedVariant], kernels_src: Path) -> list[Unit]:
    """Cut variants into units. Quoted includes are looked up in the family's folder, `common` and
    `kernels_src` itself, and become part of the unit's source."""
    groups: dict[tuple[str, str], dict[tuple[str, ...], list[TracedVariant]]] = {}
    for variant in sorted(variants, key=lambda variant: variant.place):
        by_flags = groups.setdefault((variant.kernel, variant.arch), {})
        by_flags.setdefault(extra_flags(variant.launch), []).append(variant)
    units: list[Unit] = []
    for (kernel, arch), by_flags in sorted(groups.items()):
        pieces = [
            (flags, tuple(members[start : start + MAX_VARIANTS]))
            for flags, members in sorted(by_flags.items())
            for start in range(0, len(members), MAX_VARIANTS)
        ]
        units += [
            Unit(
                kernel,
                arch,
                number,
                (*BASE_FLAGS, arch_flag(arch), *flags),
                flags,
                piece,
                unit_source(piece, kernels_src),
            )
            for number, (flags, piece) in enumerate(pieces)
        ]
    return units


def arch_flag(arch: str) -> str:
    """The long form: `-arch=sm_90a` packs PTX as well, and fails on warp-group register moves."""
    digits = arch.removeprefix("sm_")
    return f"-gencode=arch=compute_{digits},code=sm_{digits}"


def extra_flags(launch: Mapping[str, Any]) -> tuple[str, ...]:
    """Pass options that are really nvcc flags, mapped as TileLang's own call of nvcc does, then declared flags."""
    options = launch.get("pass_configs") or {}
    flags: list[str] = []
    compile_flags = options.get("tl.device_compile_flags") or ()
    for flag in [compile_flags] if isinstance(compile_flags, str) else compile_flags:
        flags += shlex.split(str(flag))
    if options.get("tl.enable_fast_math"):
        flags.append("--use_fast_math")
    level = options.get("tl.ptxas_register_usage_level")
    if level is not None:
        flags.append(f"--ptxas-options=--register-usage-level={int(level)}")
    return (*flags, *(launch.get("flags") or ()))


def unit_source(variants: Iterable[TracedVariant], kernels_src: Path) -> str:
    """unit.cu: the includes that the variants need, each block once, then their kernels."""
    heads: dict[str, None] = {}
    bodies: list[str] = []
    families: set[str] = set()
    for variant in variants:
        families.add(variant.kernel.split(".")[0])
        head, body = _split(variant.source)
        heads.setdefault(head)
        bodies.append(f"{_heading(variant)}\n{_own_shared_memory(body).strip()}\n")
    folders = [kernels_src / name for name in (*sorted(families), "common", "")]
    return "\n".join([_inline_includes("\n".join(heads), folders, set()), *bodies])


def lines_of(source: str, variants: Iterable[TracedVariant]) -> list[tuple[int, int, tuple[str, str, str]]]:
    """(first line, last line, place) of each variant in a unit's source, counted as compilers do."""
    places = {_heading(variant): variant.place for variant in variants}
    lines = source.splitlines()
    starts = [(number, places[line]) for number, line in enumerate(lines, 1) if line in places]
    ends = [number - 1 for number, _ in starts[1:]] + [len(lines)]
    return [(start, end, place) for (start, place), end in zip(starts, ends, strict=True)]


def _heading(variant: TracedVariant) -> str:
    return f"// ---- {variant.kernel} {variant.id} {variant.arch}"


def _split(source: str) -> tuple[str, str]:
    """(includes and helpers, kernels)."""
    first_kernel = re.search(r"^.*\b__global__\b", source, re.MULTILINE)
    start = first_kernel.start() if first_kernel else len(source)
    return source[:start].strip() + "\n", source[start:]


_DYNAMIC_SHARED = re.compile(r"\bextern __shared__ __align__\((\d+)\) ([^;\[\]]+?)\s*\b(\w+)\[\];")


def _own_shared_memory(body: str) -> str:
    """Declare dynamic shared memory as bytes and a pointer of the wanted type: the cubin is the same, byte for byte.

    TileLang names and types the array after a kernel's single buffer, and nvcc refuses one name of two types in a file.
    """
    return _DYNAMIC_SHARED.sub(
        r"extern __shared__ __align__(\1) unsigned char tk_shared_\1[]; "
        r"\2* const \3 = reinterpret_cast<\2*>(tk_shared_\1);",
        body,
    )


_QUOTED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[ \t]*$', re.MULTILINE)


def _inline_includes(text: str, folders: Sequence[Path], included: set[Path]) -> str:
    """Put the project's own headers into the text, each once: the unit's hash then covers them."""

    def content(match: re.Match[str]) -> str:
        file = next((folder / match[1] for folder in folders if (folder / match[1]).is_file()), None)
        if file is None:
            return match[0]  # nvcc says it better
        if file in included:
            return ""
        included.add(file)
        return f"// from {match[1]}\n" + _inline_includes(file.read_text(), folders, included)

    return _QUOTED_INCLUDE.sub(content, text)
