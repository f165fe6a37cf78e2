"""Tensor maps (TMA descriptors) of a lowered kernel: the arguments of the driver's call, as launch.json has them."""

from __future__ import annotations

import re
from typing import Any

from .errors import TraceError
from .trace_access import BULK_BYTES
from .trace_arguments import Launch, Parameters, attribute_of, is_variable
from .trace_guards import multiple_guard
from .trace_print import Printer, VarNames, Walk, operator_of

# The driver's CUtensorMapDataType, by number
_TENSOR_MAP_DTYPES = (
    "uint8",
    "uint16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
    "bfloat16",
)
_INTERLEAVE_32B = 2  # CU_TENSOR_MAP_INTERLEAVE_32B, which wants base and strides on 32 bytes
_INTERLEAVED_BYTES = 32


def read_tensor_maps(
    host: Any, launches: list[Launch], parameters: Parameters, printer: Printer
) -> tuple[list[dict[str, Any]], VarNames]:
    """The tensor maps in the order in which launches first take them, and their numbers by host variable."""
    by_var = {hash(var): (var, list(args)) for var, args in (attribute_of(host, "tma_descriptor_args") or {}).items()}
    maps: list[dict[str, Any]] = []
    numbers = VarNames()
    for launch in launches:
        for _, argument in launch.arguments:
            if is_variable(argument) and hash(argument) in by_var and numbers.find(argument) is None:
                numbers.add(argument, str(len(maps)))
                maps.append(_read_tensor_map(by_var[hash(argument)][1], parameters, printer))
    return maps, numbers


def _read_tensor_map(arguments: list[Any], parameters: Parameters, printer: Printer) -> dict[str, Any]:
    """From the arguments of __tvm_tensormap_create_tiled."""
    # (maker, map, dtype, rank, pointer), then rank times dims, strides, box and element strides, then four enums
    maker, _, dtype, rank_argument, pointer, *rest = arguments
    if str(maker.value) != "__tvm_tensormap_create_tiled":
        raise TraceError(f"tensor maps made by {maker.value} are not supported, only tiled ones")
    tensor = parameters.tensors.find(pointer)
    if tensor is None:
        raise TraceError(f"a tensor map is made over {pointer}, which is no parameter")
    rank = printer.number(rank_argument, "the rank of a tensor map")
    what = f"the tensor map of {tensor}"
    dims, strides, box, element_strides = (rest[i * rank : (i + 1) * rank] for i in range(4))
    interleave, swizzle, l2_promotion, oob_fill = (printer.number(value, what) for value in rest[4 * rank :])
    dtype_number = printer.number(dtype, what)
    if dtype_number >= len(_TENSOR_MAP_DTYPES):
        raise TraceError(f"{what} has the driver's element type {dtype_number}, which is not supported")
    return {
        "tensor": tensor,
        "dtype": _TENSOR_MAP_DTYPES[dtype_number],
        "rank": rank,
        "global_dim": [printer.text(value, what) for value in dims],
        "global_stride": [printer.text(value, what) for value in strides[1:]],
        "box_dim": [printer.number(value, what) for value in box],
        "element_stride": [printer.number(value, what) for value in element_strides],
        "interleave": interleave,
        "swizzle": swizzle,
        "l2_promotion": l2_promotion,
        "oob_fill": oob_fill,
    }


def tensor_map_guards(maps: list[dict[str, Any]]) -> list[str]:
    """What the driver asks of a tensor map's base and strides."""
    guards = []
    for described in maps:
        bytes_ = _INTERLEAVED_BYTES if described["interleave"] == _INTERLEAVE_32B else BULK_BYTES
        guards.append(f"aligned({described['tensor']}, {bytes_})")
        guards += [multiple_guard(stride, bytes_) for stride in described["global_stride"]]
    return [guard for guard in guards if guard]


def stored_maps(launch: Launch, walk: Walk) -> set[int]:
    """Parameters of a device function that are tensor maps and used for more than loads."""
    parameters = {hash(var): index for index, (var, _) in enumerate(launch.arguments)}
    stored: set[int] = set()
    for node in walk(launch.function.body):
        operator = operator_of(node)
        if operator and not re.match(r"tl\.(tma_load|prefetch_tma)", operator):
            stored.update(parameters[hash(argument)] for argument in node.args if hash(argument) in parameters)
    return stored
