"""What the header, the stub and the operator table say of a kernel: its shapes, dtypes and values in its own words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .codegen_model import Axis, Kernel, Param
from .codegen_text import extents, identifier, readable, tuple_of

_C_TYPES = {"float32": "float", "float64": "double", "int32": "int32_t", "int64": "int64_t", "bool": "int32_t"}
_LINE = 100  # characters of a comment line in ops.h
_PYTHON_TYPES = {"float32": "float", "float64": "float", "int32": "int", "int64": "int", "bool": "bool"}


# ---- what a parameter is -------------------------------------------------------------------------------------------


def describe(kernel: Kernel, param: Param) -> list[str]:
    """What a caller passes, one line for the dtypes and one for each shape that some variant has."""
    if not param.is_tensor:
        return ["bool: 0 or 1" if param.dtypes[0] == "bool" else param.dtypes[0]]
    words = [_dtypes(param)]
    if param.written:
        words.append("written")
    if param.nullable or param.optional:
        words.append("may be null")
    entries = [variant.tensors[param.name] for variant in kernel.variants if param.name in variant.tensors]
    shapes = dict.fromkeys(
        f"{tuple_of(map(readable, extents(entry, 'shape')))}, {_strides(entry)}" for entry in entries
    )
    title = ", ".join(words)
    if not shapes:
        return [f"{title}; in no variant of this build"]
    if len(shapes) == 1 and len(title) + len(next(iter(shapes))) < _LINE:
        return [f"{title}: {next(iter(shapes))}"]
    return [f"{title}:", *(f"  {shape}" for shape in shapes)]


def _dtypes(param: Param) -> str:
    *others, last = param.dtypes
    words = f"{', '.join(others)} or {last}" if others else last
    return f"any dtype as wide as {words}" if param.raw else words


def _strides(entry: Mapping[str, Any]) -> str:
    dense = extents({**entry, "strides": ""}, "strides")
    return (
        "dense"
        if extents(entry, "strides") == dense
        else f"strides {tuple_of(map(readable, extents(entry, 'strides')))}"
    )


def describe_axis(axis: Axis) -> str:
    """`itemsize of x: 1, 2`."""
    source = {"dtype_of": f" (dtype of {axis.of})", "itemsize_of": f" (bytes per element of {axis.of})"}.get(
        axis.kind, ""
    )
    return f"{axis.name}{source}: {', '.join(axis.labels)}"


# ---- C header ------------------------------------------------------------------------------------------------------


def c_fields(kernel: Kernel) -> Iterator[tuple[str, list[str]]]:
    """Declaration and comment lines of each field of the args struct, after `size`."""
    for param in kernel.params:
        kind = "const tk_tensor* " if param.is_tensor else f"{_C_TYPES[param.dtypes[0]]} "
        yield f"{kind}{identifier(param.name)};", describe(kernel, param)
    for axis in kernel.plain_axes:
        values = "0 or 1" if isinstance(axis.values[0], bool) else ", ".join(axis.labels)
        yield f"{c_axis_type(kernel, axis)} {identifier(axis.name)};", [values]


def choices(kernel: Kernel) -> list[Axis]:
    """The axes that are C enums."""
    return [axis for axis in kernel.plain_axes if isinstance(axis.values[0], str)]


def c_axis_type(kernel: Kernel, axis: Axis) -> str:
    return f"tk_{kernel.identifier}_{axis.name}" if isinstance(axis.values[0], str) else "int32_t"


def c_enumerator(kernel: Kernel, axis: Axis, label: str) -> str:
    return f"TK_{kernel.identifier}_{axis.name}_{label}".upper()


# ---- Python stub ---------------------------------------------------------------------------------------------------


def python_arguments(kernel: Kernel, check: bool) -> list[str]:
    """The positional parameters of a function of `_C`: written tensors may be asked for, in a check be None."""
    arguments = [f"{param.name}: {_python_type(param, check)}" for param in kernel.params]
    arguments += [f"{axis.name}: {_python_axis_type(axis)}" for axis in kernel.plain_axes]
    return [*arguments, "/"] if arguments else []


def _python_type(param: Param, check: bool) -> str:
    if not param.is_tensor:
        return _PYTHON_TYPES[param.dtypes[0]]
    absent = " | None" if param.nullable or param.optional or (check and param.written) else ""
    asked_for = " | tuple[Any, ...]" if param.written and not check else ""
    return f"Tensor{asked_for}{absent}"


def _python_axis_type(axis: Axis) -> str:
    if isinstance(axis.values[0], bool):
        return "bool"
    return f"Literal[{', '.join(json.dumps(value) for value in axis.values)}]"


# ---- operator table ------------------------------------------------------------------------------------------------


def describe_archs(kernel: Kernel, validated_on: Mapping[str, str], not_run: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(
        f"{arch} (run on {validated_on[arch]})"
        if arch in validated_on and kernel.name not in not_run.get(arch, ())
        else f"{arch} (compiled, not run)"
        for arch in kernel.archs
    )
