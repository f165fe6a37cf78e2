"""How device code touches the tensors of a launch: which ones, and how many bytes at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any

from .errors import TraceError
from .trace_arguments import Launch, Parameters
from .trace_print import VarNames, Walk, operator_of

BULK_BYTES = 16  # cp.async.bulk and tensor maps: addresses, sizes and strides


def itemsize(dtype: str) -> int:
    """Bytes of one element of a torch dtype."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1


@dataclasses.dataclass
class DeviceNames:
    """A device function's own variables, under the names of parameters and symbols."""

    tensors: VarNames
    integers: VarNames


def device_names(launch: Launch, parameters: Parameters) -> DeviceNames:
    """Names of a device function's parameters: those of the host's arguments."""
    names = DeviceNames(VarNames(), VarNames())
    for device_var, argument in launch.arguments:
        if type(argument).__name__ in ("Var", "SizeVar"):
            tensor, integer = parameters.tensors.find(argument), parameters.integers.find(argument)
            if tensor is not None:
                names.tensors.add(device_var, tensor)
            if integer is not None:
                names.integers.add(device_var, integer)
    return names


@dataclasses.dataclass
class Access:
    """One access of global memory: `bytes` at once, and what must be a multiple of 16 bytes besides the pointer."""

    tensor: str
    bytes: int
    # (expression, bytes per unit of it)
    multiples_of_16: list[tuple[Any, int]] = dataclasses.field(default_factory=list)
    node: Any = None


def accesses(function: Any, tensors: VarNames, walk: Walk) -> list[Access]:
    """All accesses of named tensors in a device function."""
    found: list[Access] = []
    for node in walk(function.body):
        kind = type(node).__name__
        if kind in ("BufferLoad", "BufferStore"):
            tensor = tensors.find(node.buffer.data)
            if tensor is not None:
                found.append(Access(tensor, _vector_bytes(node, kind), node=node))
        elif kind == "Call":
            found.extend(_pointer_accesses(node, tensors))
    return found


def _vector_bytes(node: Any, kind: str) -> int:
    """Bytes of a load or store that is one instruction: a run of neighbours, or one element of a vector type."""
    value = node.dtype if kind == "BufferLoad" else node.value.dtype
    element = node.buffer.dtype
    index = node.indices[-1]
    neighbours = type(index).__name__ != "Ramp" or (type(index.stride).__name__ == "IntImm" and index.stride.value == 1)
    return _power_of_two(_bytes(value) if neighbours else _bytes(element))


def _pointer_accesses(call: Any, tensors: VarNames) -> Iterator[Access]:
    """Accesses through pointers handed to an intrinsic."""
    operator = operator_of(call)
    for argument in call.args:
        pointer = _pointer(argument, tensors)
        if pointer is None:
            continue
        tensor, element_bytes, offset = pointer
        if operator in ("tl.tma_load", "tl.tma_store"):
            # Bulk copies: load(shared, global, barrier, bytes, policy), store(global, shared, bytes, reduce, policy)
            size = call.args[3] if operator == "tl.tma_load" else call.args[2]
            yield Access(tensor, BULK_BYTES, [(offset, element_bytes), (size, 1)], node=argument)
        else:
            yield Access(tensor, _intrinsic_bytes(operator, call, element_bytes), node=argument)


# common/device.py: what a helper that is handed the pointer moves at once
_ALIGNED = re.compile(r"tk::aligned<(\d+)>")


def _intrinsic_bytes(operator: str, call: Any, element_bytes: int) -> int:
    """How many bytes an intrinsic moves at once; unknown ones are taken to move single elements."""
    name = operator.split(".")[-1]
    if match := re.fullmatch(r"(?:ldg|stg)(\d+)", name):
        return int(match[1]) // 8
    if match := re.search(r"atomic_addx(\d)", name):
        return int(match[1]) * element_bytes
    if name == "ptx_cp_async":
        count = int(call.args[2].value)
        return count * element_bytes if operator == "tl.ptx_cp_async" else count
    if name == "call_extern" and (match := _ALIGNED.fullmatch(call.args[0].value)):
        return int(match[1])
    return element_bytes


def _pointer(node: Any, tensors: VarNames) -> tuple[str, int, Any] | None:
    """(tensor, bytes of an element, offset in elements) of an expression that points into a parameter."""
    operator = operator_of(node)
    if operator == "tirx.tvm_access_ptr":
        tensor = tensors.find(node.args[1])
        return (tensor, _bytes(node.args[0].dtype), node.args[2]) if tensor is not None else None
    if operator == "tirx.address_of" and type(node.args[0]).__name__ == "BufferLoad":
        load = node.args[0]
        tensor = tensors.find(load.buffer.data)
        return (tensor, _bytes(load.buffer.dtype), load.indices[-1]) if tensor is not None else None
    return None


_DTYPE = re.compile(r"([a-z]+)(\d*)(?:_[a-z0-9]*?)?(?:x(\d+))?$")


def _bytes(dtype: Any) -> int:
    """Bytes of a TVM dtype such as bool, bfloat16x8 or float8_e4m3fnx4; at least one."""
    match = _DTYPE.match(str(dtype))
    if match is None:
        raise TraceError(f"dtype {dtype} of a memory access is not known")
    return max(1, int(match[2] or 8) * int(match[3] or 1) // 8)


def _power_of_two(bytes_: int) -> int:
    """The alignment of a vector of so many bytes: a float3 is read by elements of 4."""
    return bytes_ & -bytes_
