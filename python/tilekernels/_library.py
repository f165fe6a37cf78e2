"""The kernels as torch operators, `torch.ops.tilekernels.<family>_<kernel>`: what torch.compile, fake tensors and
tensor subclasses go through. Schemas and fake implementations derive from the extension's own table.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .errors import argument_error, argument_type_error

__all__ = ["define_operator", "make_schema"]

_LIBRARY = torch.library.Library("tilekernels", "DEF")

# Integers may be symbolic under torch.compile with dynamic shapes.
_SCALAR_TYPES = {"float32": "float", "float64": "float", "int32": "SymInt", "int64": "SymInt", "bool": "bool"}
_AXIS_TYPES: dict[type, str] = {bool: "bool", int: "int", str: "str"}

# torch.compile passes an operator's arguments by keyword through functions whose own parameters have these names.
_RESERVED_NAMES = ("ctx", "mode")

_ANY_RANK = -1  # the rank differs between configurations

Params = Sequence[Mapping[str, Any]]


def define_operator(
    kernel: Mapping[str, Any], launch: Callable[..., None], check: Callable[..., None], cpu: Callable[..., None]
) -> Callable[..., None]:
    """Registers one kernel of `_C.kernels()` and returns its torch operator.

    launch and check are the extension's functions, cpu the reference that writes into the given outputs. No gradient
    is recorded: outputs are arguments, and autograd is told to look away.
    """
    symbol = kernel["name"].replace(".", "_")

    def on_cuda(*args: Any) -> None:
        plain = [_as_plain(value) for value in args]
        check(*plain)
        launch(*plain)

    def on_cpu(*args: Any) -> None:
        plain = [_as_plain(value) for value in args]
        check(*plain)
        with torch.no_grad():
            cpu(*plain)

    def on_fake(*args: Any) -> None:
        check_metadata(kernel["name"], kernel["params"], args)

    _LIBRARY.define(f"{symbol}{make_schema(kernel)}")
    _LIBRARY.impl(symbol, on_cuda, "CUDA")
    _LIBRARY.impl(symbol, on_cpu, "CPU")
    _LIBRARY.impl(symbol, torch.library.fallthrough_kernel, "Autograd")
    # Not torch.library.register_fake, which reads source files to note its caller: 2 ms an operator at import.
    _LIBRARY.impl(symbol, on_fake, "Meta")
    operator: Callable[..., None] = getattr(torch.ops.tilekernels, symbol).default
    return operator


def make_schema(kernel: Mapping[str, Any]) -> str:
    """The operator's signature: `(Tensor scores, Tensor(a0!) out) -> ()`."""
    arguments = [_tensor_argument(param, at) for at, param in enumerate(kernel["params"])]
    axes = [axis for axis in kernel["axes"] if axis["kind"] == "value"]
    arguments += [f"{_AXIS_TYPES[type(axis['values'][0])]} {_argument_name(axis)}" for axis in axes]
    return f"({', '.join(arguments)}) -> ()"


def check_devices(operator: str, params: Params, args: Sequence[Any]) -> None:
    """Refuses tensors of two devices, a meta tensor among others included: one of them would decide what runs."""
    first: torch.Tensor | None = None
    first_name = ""
    for param, value in zip(params, args, strict=False):
        if not isinstance(value, torch.Tensor):
            continue
        if first is None:
            first, first_name = value, param["name"]
        elif value.device != first.device:
            raise argument_error(operator, param["name"], f"be on {first.device} like {first_name}", value.device)


def check_metadata(operator: str, params: Params, args: Sequence[Any]) -> None:
    """The part of the argument check that needs no data and no concrete sizes, for fake and meta tensors.

    A written tensor may be absent, as before it is allocated."""
    for param, value in zip(params, args, strict=False):
        if param["kind"] == "scalar":
            continue
        if value is None:
            if not (param["nullable"] or param["optional"] or param["written"]):
                raise argument_type_error(operator, param["name"], "be a tensor", "None")
            continue
        _check_dtype(operator, param, value.dtype)
        if param["rank"] not in (_ANY_RANK, value.dim()):
            raise argument_error(operator, param["name"], f"have {param['rank']} dimensions", value.dim())


def _check_dtype(operator: str, param: Mapping[str, Any], dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if param["raw"]:
        sizes = sorted({getattr(torch, each).itemsize for each in param["dtypes"]})
        if dtype.itemsize not in sizes:
            requirement = f"have elements of {_join(map(str, sizes))} bytes"
            raise argument_type_error(operator, param["name"], requirement, f"{name} of {dtype.itemsize}")
    elif name not in param["dtypes"]:
        raise argument_type_error(operator, param["name"], f"be {_join(param['dtypes'])}", name)


def _join(choices: Iterable[str]) -> str:
    """Choices as the extension words them: "1, 2 or 4"."""
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last


def _tensor_argument(param: Mapping[str, Any], at: int) -> str:
    if param["kind"] == "scalar":
        return f"{_SCALAR_TYPES[param['dtype']]} {_argument_name(param)}"
    alias = f"(a{at}!)" if param["written"] else ""
    absent = "?" if param["nullable"] or param["optional"] else ""
    return f"Tensor{alias}{absent} {_argument_name(param)}"


def _argument_name(entry: Mapping[str, Any]) -> str:
    name: str = entry["name"]
    return f"{name}_" if name in _RESERVED_NAMES else name


def _as_plain(value: Any) -> Any:
    # A subclass that reaches a backend's implementation is only a name on ordinary memory; the extension wants it off.
    if isinstance(value, torch.Tensor) and type(value) not in (torch.Tensor, torch.nn.Parameter):
        return value.as_subclass(torch.Tensor)
    return value
