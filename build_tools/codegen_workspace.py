"""What the library knows of scratch tensors (parameters `workspace*`): dtype and shape, so that callers can ask."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from .codegen_bind import Binding
from .codegen_model import Kernel, Param
from .codegen_text import cpp, cpp_dtype, extents, symbol, symbols_in, tensor

PREFIX = "workspace"
_NUM_BLOCKS = "num_sms"  # the symbol of a workspace's rows where they stand for the blocks that run


@dataclasses.dataclass(frozen=True)
class Workspace:
    """One scratch tensor of one key: the fields of WorkspaceDesc in registry.h, and the body of its shape function."""

    tensor: str
    dtype: str
    rank: int
    num_sms: str
    symbols: str
    body: str


def workspace_params(kernel: Kernel) -> list[Param]:
    """The scratch parameters whose size can be told in every configuration that has them."""
    return [param for param in kernel.tensors if param.name.startswith(PREFIX) and _is_known(kernel, param)]


def workspaces(binding: Binding) -> Iterator[Workspace]:
    """The scratch tensors of the key of `binding`; where its forms differ, the largest of their sizes."""
    kernel = binding.kernel
    for param in workspace_params(kernel):
        entries = binding.entries[param.name]
        if not entries:
            continue
        rows = zip(*(extents(entry, "shape") for entry in entries), strict=True)
        sizes = [_largest(list(dict.fromkeys(texts))) for texts in rows]
        needed = sorted({name for text in sizes for name in symbols_in(text, kernel)}, key=kernel.symbols.index)
        yield Workspace(
            tensor=tensor(param.name),
            dtype=f"DType::{cpp_dtype(entries[0]['dtype'])}",
            rank=len(sizes),
            num_sms=symbol(_NUM_BLOCKS) if _NUM_BLOCKS in needed and _is_free(kernel, _NUM_BLOCKS) else "-1",
            symbols=" | ".join(f"1u << {symbol(name)}" for name in needed) or "0",
            body="\n".join(f"  shape[{axis}] = {cpp(kernel, text)};" for axis, text in enumerate(sizes)),
        )


def _is_known(kernel: Kernel, param: Param) -> bool:
    """Whether no size of the tensor is the caller's choice, other than the number of blocks."""
    texts = {
        text
        for variant in kernel.variants
        if param.name in variant.tensors
        for text in extents(variant.tensors[param.name], "shape")
    }
    names = {name for text in texts for name in symbols_in(text, kernel)}
    return not any(_is_free(kernel, name) for name in names - {_NUM_BLOCKS})


def _is_free(kernel: Kernel, name: str) -> bool:
    """Whether no tensor but scratch carries the symbol."""
    return not any(
        text == name
        for variant in kernel.variants
        for owner, entry in variant.tensors.items()
        if not owner.startswith(PREFIX)
        for part in ("shape", "strides")
        for text in extents(entry, part)
    )


def _largest(texts: list[str]) -> str:
    largest = texts[0]
    for text in texts[1:]:
        largest = f"max({largest}, {text})"
    return largest
