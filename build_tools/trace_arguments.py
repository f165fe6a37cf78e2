"""What a lowered kernel takes and how it is launched: params, symbols and launches of TileLang's modules.

The host module calls each device function with its arguments, then its launch geometry. Variables of the host module
are those of the PrimFunc, so arguments are recognised by object; their names can repeat and unused ones are gone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kernels_src.declare import DTYPES, Arch

from .errors import TraceError
from .trace_print import Printer, VarNames, Walk, check_name, operator_of

SCALAR_DTYPES = ("float32", "float64", "int32", "int64", "bool")

_DEPENDENT_LAUNCH = ("tl.pdl_sync", "tl.pdl_trigger")
_LAUNCH_AXES = {
    "blockIdx.x": ("grid", 0), "blockIdx.y": ("grid", 1), "blockIdx.z": ("grid", 2),
    "threadIdx.x": ("block", 0), "threadIdx.y": ("block", 1), "threadIdx.z": ("block", 2),
    "tir.cluster_dim_x": ("cluster", 0), "tir.cluster_dim_y": ("cluster", 1), "tir.cluster_dim_z": ("cluster", 2),
    "tirx.use_dyn_shared_memory": ("smem", 0),
}  # fmt: skip


@dataclasses.dataclass
class Parameters:
    """The PrimFunc's parameters: what launch.json says of them and the variables by which the modules know them."""

    described: list[dict[str, Any]]
    symbols: list[dict[str, Any]]
    tensors: VarNames  # data pointers
    integers: VarNames  # scalar parameters and symbols
    dtypes: dict[str, str]

    def is_nullable(self, name: str) -> bool:
        return any(param["name"] == name and param.get("nullable", False) for param in self.described)


def check_before_lowering(prim_func: Any, walk: Walk, arch: Arch) -> None:
    """Raise TraceError for what TileLang would refuse without saying what to do."""
    if not arch.has_pdl and any(operator_of(node) in _DEPENDENT_LAUNCH for node in walk(prim_func.body)):
        raise TraceError(
            f"T.pdl_sync and T.pdl_trigger need sm_90, {arch.name} has neither: ask declare.arch().has_pdl"
        )


def read_parameters(prim_func: Any, walk: Walk, simplify: Any) -> Parameters:
    """Params and symbols of a PrimFunc, before it is lowered. `written` and `nullable` are set later."""
    buffers = [
        (param, prim_func.buffer_map[param]) if param in prim_func.buffer_map else (param, None)
        for param in prim_func.params
    ]
    tensors, integers = VarNames(), VarNames()
    dtypes: dict[str, str] = {}
    for param, buffer in buffers:
        name = str(param.name if buffer is None else buffer.name)
        check_name(name, "a parameter")
        if name in dtypes:
            raise TraceError(f"two parameters are named {name}")
        dtypes[name] = str(param.dtype if buffer is None else buffer.dtype)
        allowed = SCALAR_DTYPES if buffer is None else DTYPES
        if dtypes[name] not in allowed:
            hint = (
                "a pointer must be declared as T.Tensor"
                if dtypes[name] == "handle"
                else f"allowed: {', '.join(allowed)}"
            )
            raise TraceError(f"parameter {name} has dtype {dtypes[name]}; {hint}")
        (integers if buffer is None else tensors).add(param if buffer is None else buffer.data, name)
    symbols = _read_symbols([buffer for _, buffer in buffers if buffer is not None], walk, integers, set(dtypes))
    printer = Printer(integers, simplify)
    described = [
        {"name": str(param.name), "kind": "scalar", "dtype": str(param.dtype)}
        if buffer is None
        else _describe_tensor(buffer, printer)
        for param, buffer in buffers
    ]
    return Parameters(described, symbols, tensors, integers, dtypes)


def _describe_tensor(buffer: Any, printer: Printer) -> dict[str, Any]:
    name = str(buffer.name)
    strides = list(buffer.strides)
    if not strides:
        strides = [1]
        for size in reversed(list(buffer.shape)[1:]):
            strides.insert(0, strides[0] * size)
    return {
        "name": name,
        "kind": "tensor",
        "dtype": str(buffer.dtype),
        "shape": [printer.text(size, f"the size of {name}") for size in buffer.shape],
        "strides": [printer.text(stride, f"a stride of {name}") for stride in strides[: len(buffer.shape)]],
        "nullable": False,
        "written": False,
    }


def _read_symbols(buffers: list[Any], walk: Walk, integers: VarNames, taken: set[str]) -> list[dict[str, Any]]:
    """The variables of shapes and strides that are no parameters, each with the places that bind it as a bare name."""
    places: dict[int, list[list[Any]]] = {}
    found: dict[int, tuple[Any, str]] = {}
    for part in ("shape", "strides"):
        for buffer in buffers:
            for dimension, expression in enumerate(getattr(buffer, part)):
                if is_variable(expression):
                    places.setdefault(hash(expression), []).append([str(buffer.name), part, dimension])
                for var in _variables(expression, walk):
                    if integers.find(var) is None:
                        found.setdefault(hash(var), (var, str(buffer.name)))
    symbols = []
    for key, (var, tensor) in found.items():
        name = str(var.name)
        check_name(name, f"a size or stride of {tensor}")
        if key not in places:
            raise TraceError(
                f"no size or stride is {name} alone, so a call cannot tell its value (used in {tensor}): "
                "give a tensor this size or make it a scalar parameter"
            )
        if name in taken:
            raise TraceError(
                f"two symbols or parameters are named {name} (one in {tensor}): rename one, or use the same T.dynamic"
            )
        if str(var.dtype) not in ("int32", "int64"):
            raise TraceError(f"symbol {name} has dtype {var.dtype}; T.dynamic makes int32 or int64")
        taken.add(name)
        integers.add(var, name)
        symbols.append({"name": name, "dtype": str(var.dtype), "places": places[key]})
    return symbols


def settle_symbols(parameters: Parameters) -> list[dict[str, Any]]:
    """The symbols as launch.json wants them, each bound from a tensor that is always there, if one has it."""
    settled = []
    for symbol in parameters.symbols:
        present = [place for place in symbol["places"] if not parameters.is_nullable(place[0])]
        settled.append({"name": symbol["name"], "dtype": symbol["dtype"], "from": (present or symbol["places"])[0]})
    return settled


# ---- launches ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Launch:
    """One device function with the host's call of it. `variables` maps its parameters to the host's arguments."""

    symbol: str
    function: Any
    described: dict[str, Any]
    arguments: list[tuple[Any, Any]]  # (device parameter, host argument)


def read_launches(
    host: Any, device: dict[str, Any], parameters: Parameters, printer: Printer, walk: Walk, arch: Arch
) -> list[Launch]:
    """The launches in order, `described` as launch.json wants them except for symbols and tensor maps."""
    calls = _packed_calls(host.body, device, walk)
    _refuse_control_flow(host.body, device, walk)
    names = [str(call.args[0].value) for call in calls]
    if sorted(names) != sorted(device):
        raise TraceError(
            f"the host launches {', '.join(names) or 'nothing'}; compiled are {', '.join(device)}: "
            "each must be launched once"
        )
    return [_read_launch(call, device[name], name, printer, arch) for call, name in zip(calls, names, strict=True)]


def _packed_calls(body: Any, device: dict[str, Any], walk: Walk) -> list[Any]:
    calls = [node for node in walk(body) if operator_of(node).startswith("tirx.tvm_call_packed")]
    return [call for call in calls if type(call.args[0]).__name__ == "StringImm" and str(call.args[0].value) in device]


def _refuse_control_flow(body: Any, device: dict[str, Any], walk: Walk) -> None:
    for node in walk(body):
        kind = type(node).__name__
        if kind in ("IfThenElse", "For", "While") and _packed_calls(node, device, walk):
            condition = f" ({node.condition})" if kind == "IfThenElse" else ""
            raise TraceError(
                f"T.Kernel stands inside a {kind}{condition}: a launch must not depend on run-time values; "
                f"put the {kind} inside T.Kernel"
            )


def _read_launch(call: Any, function: Any, name: str, printer: Printer, arch: Arch) -> Launch:
    arguments = list(call.args)[1:]
    tags = [str(tag) for tag in function.attrs["tirx.kernel_launch_params"]]
    num_parameters = len(function.params)
    if len(arguments) != num_parameters + len(tags):
        raise TraceError(
            f"{name} is called with {len(arguments)} values for {num_parameters} parameters "
            f"and the launch values {', '.join(tags)}"
        )
    values: dict[str, list[Any]] = {"grid": ["1"] * 3, "block": ["1"] * 3, "cluster": [1, 1, 1], "smem": ["0"]}
    for tag, value in zip(tags, arguments[num_parameters:], strict=True):
        if tag not in _LAUNCH_AXES:
            raise TraceError(f"{name} needs the launch value {tag}, which the runtime does not know")
        field, index = _LAUNCH_AXES[tag]
        what = f"{name}'s {tag}"
        values[field][index] = printer.number(value, what) if field == "cluster" else printer.text(value, what)
    cooperative = bool(attribute_of(function, "use_cooperative_groups"))
    described = {
        "symbol": "",
        "source_symbol": name,
        "grid": values["grid"],
        "block": values["block"],
        "cluster": values["cluster"],
        "smem": values["smem"][0],
        "cooperative": cooperative,
        "pdl": arch.has_pdl and not cooperative,  # the driver takes no launch that is both
        "args": [],
    }
    _check_fits(described, arch)
    return Launch(name, function, described, list(zip(function.params, arguments[:num_parameters], strict=True)))


def _check_fits(launch: dict[str, Any], arch: Arch) -> None:
    if launch["cluster"] != [1, 1, 1] and not arch.has_cluster:
        raise TraceError(
            f"cluster_dims={launch['cluster']} needs sm_90, {arch.name} has no clusters: ask declare.arch().has_cluster"
        )
    if launch["smem"].isdigit() and int(launch["smem"]) > arch.smem_per_block:
        raise TraceError(
            f"a block takes {launch['smem']} bytes of shared memory, {arch.name} has {arch.smem_per_block}"
        )


def describe_arguments(launch: Launch, parameters: Parameters, descriptors: VarNames, printer: Printer) -> None:
    """Fill `described["args"]`; `descriptors` names tensor maps by their number."""
    for device_var, argument in launch.arguments:
        number = descriptors.find(argument) if is_variable(argument) else None
        tensor = parameters.tensors.find(argument) if is_variable(argument) else None
        if number is not None:
            described: dict[str, Any] = {"tma": int(number)}
        elif tensor is not None:
            described = {"tensor": tensor}
        else:
            dtype = str(device_var.dtype)
            if dtype not in SCALAR_DTYPES:
                raise TraceError(
                    f"{launch.symbol} takes {device_var} ({dtype}), which is no parameter; "
                    f"a value can be {', '.join(SCALAR_DTYPES)}"
                )
            described = {"value": printer.text(argument, f"argument {device_var}"), "dtype": dtype}
        launch.described["args"].append(described)


def attribute_of(function: Any, name: str) -> Any:
    """An attribute of a lowered function, None where it has none."""
    return function.attrs[name] if name in function.attrs else None  # noqa: SIM401 - TVM's attributes have no get()


def is_variable(node: Any) -> bool:
    """Whether an expression is a bare variable."""
    return type(node).__name__ in ("Var", "SizeVar")


def _variables(expression: Any, walk: Walk) -> list[Any]:
    return [] if isinstance(expression, int) else [node for node in walk(expression) if is_variable(node)]
