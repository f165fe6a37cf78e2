"""failures: one variant that was not built, its words and its source kept in failed/ of the store."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .compile import BadVariants
from .plan import Variant
from .store import Store, failed_folder, variant_folder
from .units import TracedVariant
from .workers import Outcome


@dataclasses.dataclass(frozen=True)
class Failure:
    """What a person needs to find and mend it."""

    stage: str
    kernel: str
    variant: str
    arch: str
    config: Mapping[str, Any]
    file: str  # the kernel file
    sentence: str
    command: str
    output: str
    kept: str  # folder with the source and the whole output

    @property
    def place(self) -> str:
        """`quant.per_token_cast {fmt: e4m3, form: general} sm_90a`."""
        axes = ", ".join(f"{axis}: {value}" for axis, value in self.config.items())
        return f"{self.kernel} {{{axes}}} {self.arch}"

    @property
    def cause(self) -> tuple[str, str, str, str]:
        """Equal for failures that very likely have one reason; only the first of them is printed in full."""
        errors = [line for line in self.output.splitlines() if "error" in line.lower()]
        first = (errors or [""])[0].replace(self.variant, "")
        # units differ in length: the same mistake stands in another line of each
        return self.stage, self.kernel, self.sentence.replace(self.variant, ""), re.sub(r"\d+", "", first)


def trace_failure(variant: Variant, outcome: Outcome, store: Store) -> Failure:
    """A variant that TileLang did not lower, with what the worker printed."""
    folder = failed_folder(variant.kernel, variant.arch, variant.id)
    error = (
        (outcome.error or "").strip().removeprefix(f"{variant.file}: {variant.describe()}: ")
    )  # the report says it already
    words = f"{outcome.output.strip()}\n{error}".strip()  # the error last: of long output the end is shown
    store.write(f"{folder}/output.txt", words.encode() + b"\n")
    return Failure(
        stage="trace",
        kernel=variant.kernel,
        variant=variant.id,
        arch=variant.arch,
        config=dict(variant.config),
        file=str(variant.file),
        sentence=_sentence(error),
        command="",
        output="" if outcome.worded and error == _sentence(error) else error if outcome.worded else words,
        kept=str(store.folder / folder),
    )


def compile_failures(bad: BadVariants, files: Mapping[str, str], store: Store) -> Iterator[Failure]:
    """Variants that nvcc refused. `files` maps kernels to their files, as far as they are known."""
    others = len(bad.variants) - 1
    together = f", only together with {others} others of its unit" if others else ""
    for variant in bad.variants:
        folder = failed_folder(variant.kernel, variant.arch, variant.id)
        store.write(f"{folder}/unit.cu", bad.source.encode())
        store.write(f"{folder}/output.txt", f"{bad.error.command}\n{bad.error.output}\n".encode())
        yield Failure(
            stage="compile",
            kernel=variant.kernel,
            variant=variant.id,
            arch=variant.arch,
            config=variant.launch.get("config", {}),
            file=files.get(variant.kernel) or _traced_file(variant, store),
            sentence=bad.error.sentence + together,
            command=bad.error.command,
            output=bad.error.output,
            kept=str(store.folder / folder),
        )


def _traced_file(variant: TracedVariant, store: Store) -> str:
    return str(store.folder / variant_folder(variant.kernel, variant.arch, variant.id) / "kernel.cu")


def _sentence(error: str) -> str:
    """What a traceback ends with, or the first line of a worded error; with the next where that only announces it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["no words"]
    if lines[0].startswith("Traceback"):
        return lines[-1]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
