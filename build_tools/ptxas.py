"""ptxas: what the assembler says of each kernel: registers, spills, static shared memory."""

from __future__ import annotations

import dataclasses
import re

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_NO_RESULT = re.compile(r"^.*Compile time = .*\n?", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Usage:
    """Resources of one kernel. Spills are counted in bytes of code that stores or loads a spilled register."""

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    smem_static: int = 0

    @property
    def spill_bytes(self) -> int:
        return self.spill_stores + self.spill_loads


def without_times(text: str) -> str:
    """The output of `nvcc -Xptxas -v` without its clocks: the same kernels give the same text."""
    return _NO_RESULT.sub("", text)


def parse(text: str) -> dict[str, Usage]:
    """Usage by symbol. Spills of functions that a kernel calls stand below its name and count for it."""
    found: dict[str, Usage] = {}
    symbol = None
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            symbol = entry[1]
            found[symbol] = Usage()
        if symbol is None:
            continue
        usage = found[symbol]
        if spills := _SPILLS.search(line):
            usage = dataclasses.replace(
                usage, spill_stores=usage.spill_stores + int(spills[1]), spill_loads=usage.spill_loads + int(spills[2])
            )
        if used := _USED.search(line):
            smem = _STATIC_SMEM.search(line)
            usage = dataclasses.replace(usage, registers=int(used[1]), smem_static=int(smem[1]) if smem else 0)
        found[symbol] = usage
    return found
