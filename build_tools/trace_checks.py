"""What trace refuses although TileLang lowers it: a declaration that contradicts the PrimFunc, and a tensor that is
touched where it may be null or of another dtype."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernels_src.declare import Axis, AxisValue, Kernel

from . import expr
from .errors import TraceError
from .trace_access import accesses, device_names, itemsize
from .trace_arguments import Launch, Parameters
from .trace_print import VarNames, Walk, operator_of


def check_declaration(kernel: Kernel, config: Mapping[str, AxisValue], parameters: Parameters) -> None:
    """Raise TraceError where axes, raw, accepts and derived contradict the PrimFunc."""
    kinds = {param["name"]: param["kind"] for param in parameters.described}
    for name in kernel.raw:
        if kinds.get(name, "tensor") != "tensor":
            raise TraceError(f"raw names {name}, which is a scalar")
    for name in kernel.accepts:
        if kinds.get(name, "tensor") != "tensor":
            raise TraceError(f"accepts names {name}, which is a scalar")
    for name, text in kernel.derived.items():
        if kinds.get(name, "scalar") != "scalar":
            raise TraceError(f"derived names {name}, which is a tensor; only scalars can be derived")
        for tensor in expr.tensors(text) - kinds.keys() if name in kinds else ():
            raise TraceError(f"derived: {name} = {text} asks about {tensor}, which is no parameter")
    for axis in kernel.axes:
        _check_axis(axis, config[axis.name], kernel, parameters)


def _check_axis(axis: Axis, value: AxisValue, kernel: Kernel, parameters: Parameters) -> None:
    if axis.kind == "value" and axis.name in parameters.dtypes:
        raise TraceError(f"axis and parameter are both named {axis.name}: rename one")
    declared = parameters.dtypes.get(axis.of or "")
    if axis.kind == "itemsize_of" and (declared is None or itemsize(declared) != value):
        raise TraceError(
            f"{axis.name} is read from the element size of {axis.of}, which must be {value} bytes here, "
            f"got {declared or 'no such tensor'}"
        )
    if axis.kind == "dtype_of":
        dtype = axis.dtypes[axis.values.index(value)]
        null = dtype is None and parameters.is_nullable(axis.of or "")
        allowed = {declared, *kernel.accepts.get(axis.of or "", ())}
        carried = (
            axis.of in kernel.raw
            and declared is not None
            and dtype is not None
            and itemsize(dtype) == itemsize(declared)
        )
        if not (null or dtype in allowed or carried):
            raise TraceError(
                f"{axis.name}={value} is read from {axis.of} being {dtype or 'absent'}, "
                f"but it is declared {declared or 'not at all'}"
            )


# ---- carriers ------------------------------------------------------------------------------------------------------


def check_carriers(accepts: Mapping[str, tuple[str, ...]], prim_func: Any, parameters: Parameters, walk: Walk) -> None:
    """Raise TraceError where TIR indexes a tensor whose accepted dtypes are of another size than the declared one.

    Shape and strides are then in the caller's elements: only a device helper that knows the dtype can find them.
    """
    nodes = walk(prim_func.body)
    addressed = {hash(node.args[0]) for node in nodes if operator_of(node) in ("tirx.address_of", "tl.access_ptr")}
    indexed = {
        parameters.tensors.find(node.buffer.data)
        for node in nodes
        if type(node).__name__ in ("BufferLoad", "BufferStore") and hash(node) not in addressed
    }
    for name, accepted in accepts.items():
        declared = parameters.dtypes.get(name)
        if name in indexed and any(itemsize(dtype) != itemsize(declared or dtype) for dtype in accepted):
            raise TraceError(
                f"accepts: {name} is declared {declared} and taken as {', '.join(accepted)}, of other sizes: "
                f'it must not be indexed, only handed to a device helper by T.access_ptr({name}[0, ...], "r")'
            )


# ---- tensors that may be null --------------------------------------------------------------------------------------


def find_nullable(prim_func: Any, tensors: VarNames, walk: Walk) -> set[str]:
    """The tensors that the kernel tests with T.isnullptr."""
    tested = [node.args[0] for node in walk(prim_func.body) if operator_of(node) == "tirx.isnullptr"]
    return {name for name in map(tensors.find, tested) if name is not None}


def check_null_tests(launches: list[Launch], parameters: Parameters, nullable: set[str], walk: Walk) -> None:
    """Raise TraceError where a tensor that may be null is touched outside of its test: TileLang may move loads out."""
    for launch in launches:
        names = device_names(launch, parameters)
        for tensor in sorted(nullable):
            touching = [
                access.node for access in accesses(launch.function, names.tensors, walk) if access.tensor == tensor
            ]
            tested = _nodes_under_test(launch.function, names.tensors, tensor, walk)
            for access in touching:
                if hash(access) not in tested:
                    raise TraceError(
                        f"{tensor} may be null, and {launch.symbol} touches it outside of the test: {access}. "
                        "Put the `if not T.isnullptr` around the whole loop (T.Parallel included)"
                    )


def _nodes_under_test(function: Any, tensors: VarNames, tensor: str, walk: Walk) -> set[int]:
    """Hashes of the nodes that run only after a condition that looks at `tensor`'s pointer."""
    nodes: set[int] = set()

    def looks_at(condition: Any) -> bool:
        tests = [node for node in walk(condition) if operator_of(node) == "tirx.isnullptr"]
        return any(tensors.find(test.args[0]) == tensor for test in tests)

    for node in walk(function.body):
        branches: list[Any] = []
        if type(node).__name__ == "IfThenElse" and looks_at(node.condition):
            branches = [node.then_case, node.else_case]
        elif operator_of(node) == "tirx.if_then_else" and looks_at(node.args[0]):
            branches = list(node.args)[1:]
        for branch in branches:
            nodes.update(hash(inner) for inner in (walk(branch) if branch is not None else ()))
    return nodes
