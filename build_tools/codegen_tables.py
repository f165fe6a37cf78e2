"""Initialisers of the tables of csrc/src/registry.h, and the arrays that a typed C entry hands to the runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .codegen_model import Axis, Kernel, Param
from .codegen_text import SCALAR_FIELDS, cpp_bool, cpp_dtype, identifier, quoted


def enumerators(items: Iterable[Param | str]) -> str:
    """Names of a nested enum; they count from 0 as the arrays of a Frame do."""
    return ", ".join(identifier(item if isinstance(item, str) else item.name) for item in items)


def dtypes(param: Param) -> str:
    return ", ".join(f"DType::{cpp_dtype(dtype)}" for dtype in param.dtypes)


def param_desc(param: Param) -> str:
    flags = ", ".join(map(cpp_bool, (param.is_tensor, param.written, param.nullable, param.optional, param.raw)))
    if param.is_tensor:
        rest = f"kDtypes_{param.name}, {len(param.dtypes)}, {param.rank}, ScalarType::none"
    else:
        rest = f"nullptr, 0, 0, ScalarType::{cpp_dtype(param.dtypes[0])}"
    return f"{{{quoted(param.name)}, {flags}, {rest}}}"


def kinds(params: Iterable[Param]) -> str:
    """The type of each parameter, none for a tensor."""
    types = ("none" if param.is_tensor else cpp_dtype(param.dtypes[0]) for param in params)
    return ", ".join(f"ScalarType::{name}" for name in types)


def axis_values(axis: Axis) -> list[str]:
    if axis.kind == "dtype_of":
        return [f"static_cast<int64_t>(DType::{cpp_dtype(dtype)})" for dtype in axis.dtypes]
    if isinstance(axis.values[0], str):
        return [str(index) for index in range(len(axis.values))]
    return [str(int(value)) for value in axis.values]


def axis_desc(kernel: Kernel, axis: Axis) -> str:
    slot = kernel.param(axis.of).slot if axis.of is not None else -1
    tables = f"{len(axis.values)}, kLabels_{axis.name}, kValues_{axis.name}"
    return f"{{{quoted(axis.name)}, {_axis_kind(axis)}, {slot}, {tables}}}"


def _axis_kind(axis: Axis) -> str:
    if not axis.is_plain:
        return f"TK_AXIS_{axis.kind.upper()}"
    return {bool: "TK_AXIS_FLAG", str: "TK_AXIS_CHOICE", int: "TK_AXIS_NUMBER"}[type(axis.values[0])]


def launch_desc(launch: Mapping[str, Any]) -> str:
    cluster = ", ".join(map(str, launch["cluster"]))
    return (
        f"{{{quoted(launch['symbol'])}, {cpp_bool(launch['cooperative'])}, {cpp_bool(launch['pdl'])}, {{{cluster}}}}}"
    )


# ---- typed entries -------------------------------------------------------------------------------------------------


def tensor_fields(kernel: Kernel) -> list[str]:
    return [f"args->{identifier(param.name)}" for param in kernel.tensors]


def scalar_fields(kernel: Kernel) -> list[str]:
    return [f"{{.{SCALAR_FIELDS[param.dtypes[0]]} = args->{identifier(param.name)}}}" for param in kernel.scalars]


def axis_fields(kernel: Kernel) -> list[str]:
    return [f"tk::read_axis(args->{identifier(axis.name)})" for axis in kernel.plain_axes]
