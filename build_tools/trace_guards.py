"""What must hold of a call's arguments for a traced kernel to be right.

T.assume says what the author promised. The rest TileLang relied on without saying so: vector loads want aligned
pointers, bulk copies want multiples of 16 bytes. Tensor maps add their own: trace_tensor_maps.py.
"""

from __future__ import annotations

import re
from typing import Any

from .errors import TraceError
from .trace_access import BULK_BYTES, accesses, device_names, itemsize
from .trace_arguments import Launch, Parameters
from .trace_print import Printer, VarNames, Walk, operator_of


def assumed_guards(prim_func: Any, parameters: Parameters, printer: Printer, walk: Walk) -> list[str]:
    """The author's T.assume about arguments; those about a kernel's own variables cannot be checked from outside."""
    guards = []
    for condition in [node.args[0] for node in walk(prim_func.body) if operator_of(node) == "tirx.assume"]:
        if parameters.integers.all_of(_leaves(condition, walk)):
            text = printer.text(condition, "an assumption")
            if text == "False":
                raise TraceError(f"T.assume({condition}) is never true")
            guards += [text] if text != "True" else []
    return guards


def access_guards(launches: list[Launch], parameters: Parameters, printer: Printer, walk: Walk) -> list[str]:
    """Alignment of the tensors that are read or written by more than one element at once."""
    widths: dict[str, int] = {}
    guards: list[str] = []
    for launch in launches:
        names = device_names(launch, parameters)
        for access in accesses(launch.function, names.tensors, walk):
            widths[access.tensor] = max(widths.get(access.tensor, 0), access.bytes)
            for value in access.multiples_of_16:
                guards += _divisible(value, names.integers, printer, access.tensor, walk)
    wide = [name for name in parameters.dtypes if widths.get(name, 0) > itemsize(parameters.dtypes[name])]
    return [f"aligned({name}, {widths[name]})" for name in wide] + guards


def unique_guards(texts: list[str]) -> list[str]:
    """In order, each once; of several alignments of one tensor the widest."""
    widest: dict[str, int] = {}
    for text in texts:
        if match := re.fullmatch(r"aligned\((\w+), (\d+)\)", text):
            widest[match[1]] = max(widest.get(match[1], 0), int(match[2]))
    kept = [
        text
        for text in texts
        if not (match := re.fullmatch(r"aligned\((\w+), (\d+)\)", text)) or int(match[2]) == widest[match[1]]
    ]
    return list(dict.fromkeys(kept))


# ---- divisibility --------------------------------------------------------------------------------------------------


def multiple_guard(text: str, divisor: int) -> str:
    """The guard that `text` is a multiple of `divisor`; empty where it always is."""
    if text.lstrip("-").isdigit():
        if int(text) % divisor:
            raise TraceError(f"a bulk copy or tensor map needs multiples of {divisor} bytes, got {text}")
        return ""
    return f"floormod({text}, {divisor}) == 0"


def _divisible(value: tuple[Any, int], integers: VarNames, printer: Printer, tensor: str, walk: Walk) -> list[str]:
    """Guards under which an expression is a multiple of 16 bytes whatever its block and loop variables are."""
    expression, unit = value
    device_printer = Printer(integers, printer.simplify)
    guards = []
    for factor, known, has_unknown in _terms(printer.simplify(expression), integers, device_printer, walk):
        if factor * unit % BULK_BYTES == 0:
            continue
        if not known:
            if has_unknown:
                raise TraceError(
                    f"a bulk copy of {tensor} at {expression} cannot be shown to be on {BULK_BYTES} bytes: "
                    'copy otherwise or set pass_configs={"tl.disable_tma_lower": True}'
                )
            raise TraceError(
                f"a bulk copy of {tensor} needs multiples of {BULK_BYTES} bytes, got {factor * unit} in {expression}"
            )
        guards.append(
            multiple_guard(" * ".join([*known, *([str(factor * unit)] if factor * unit != 1 else [])]), BULK_BYTES)
        )
    return guards


def _terms(node: Any, integers: VarNames, printer: Printer, walk: Walk) -> list[tuple[int, list[str], bool]]:
    """`node` as a sum of products: (constant factor, factors known at launch, whether unknown factors remain)."""
    kind = type(node).__name__
    if isinstance(node, int) or kind == "IntImm":
        value = int(node if isinstance(node, int) else node.value)
        return [(value, [], False)] if value else []
    if kind in ("Add", "Sub"):
        return [term for side in (node.a, node.b) for term in _terms(side, integers, printer, walk)]
    if kind == "Mul":
        return [
            (left[0] * right[0], left[1] + right[1], left[2] or right[2])
            for left in _terms(node.a, integers, printer, walk)
            for right in _terms(node.b, integers, printer, walk)
        ]
    if kind == "Cast":
        return _terms(node.value, integers, printer, walk)
    if integers.all_of(_leaves(node, walk)):
        return [(1, [printer.text(node, "a size or offset of a bulk copy")], False)]
    return [(1, [], True)]


def _leaves(expression: Any, walk: Walk) -> list[Any]:
    """Variables and memory reads of an expression: what it depends on."""
    return [
        node for node in walk(expression) if type(node).__name__ in ("Var", "SizeVar", "BufferLoad", "ProducerLoad")
    ]
