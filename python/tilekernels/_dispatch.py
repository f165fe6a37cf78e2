"""The one place where a call finds its way: the compiled kernel, the reference on CPU, or the torch operator.

An operator file calls `kernel("moe.topk_gate", cpu=...)` once and then calls the result with every parameter of the
kernel, then every plain axis, by position.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch.compiler import is_dynamo_compiling

from ._library import check_devices, check_metadata, define_operator
from ._native import load_native
from ._outputs import is_request, make_output
from .errors import ArgumentError, ArgumentTypeError, DeviceError, NotBuiltError

__all__ = ["Launch", "kernel", "preload_kernels"]

_OLDEST_TORCH = "2.10"  # the first with a DLPack exchange API for C callers


class Launch(Protocol):
    """What `kernel` returns: a plain function with the argument check as an attribute."""

    check: Callable[..., None]  # the same arguments; written tensors may be None. Raises before anything is allocated

    # Outputs may be asked for (_outputs.py): they are returned, one by itself, several as a tuple.
    def __call__(self, *args: Any) -> Any: ...


def kernel(name: str, cpu: Callable[..., None]) -> Launch:
    """The function that runs kernel `name`. `cpu` takes the same arguments and writes the outputs by the reference."""
    extension = load_extension()
    entry = _table().get(name) if extension else None
    if extension is None or entry is None:
        return _make_unbuilt(name, cpu)
    symbol = name.replace(".", "_")
    native, native_check = getattr(extension, symbol), getattr(extension, f"check_{symbol}")
    operator = define_operator(entry, native, native_check, cpu)
    _OPERATORS[name], _PARAMS[name], _CHECKS[name] = operator, entry["params"], native_check

    # `is_dynamo_compiling` is a constant while torch.compile traces. Here the two functions add 60 ns to a call; found
    # through torch's modules on each call, it alone would add 200.
    def launch(*args: Any) -> Any:
        if is_dynamo_compiling():
            return _run_operator(operator, check, args)
        return native(*args)

    def check(*args: Any) -> None:
        if not is_dynamo_compiling():
            native_check(*args)

    return _as_launch(launch, check, name)


@functools.cache
def load_extension() -> ModuleType | None:
    """The extension with torch's types and our errors made known to it; None where it was never built."""
    extension = load_native()
    if extension is None:
        return None
    exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        raise ImportError(f"tilekernels needs torch >= {_OLDEST_TORCH}, got {torch.__version__}")
    extension.set_torch(torch.Tensor, torch.nn.Parameter, exchange)
    extension.set_allocator(torch.empty_strided, torch.device, torch.dtype)
    extension.set_errors(ArgumentError, ArgumentTypeError, NotBuiltError, DeviceError)
    extension.set_fallback(_fallback)
    extension.set_check_fallback(_check_fallback)
    return extension


def preload_kernels(names: Sequence[str] | None, device: int | str | torch.device | None) -> None:
    """`tilekernels.preload`, with the device as torch names it."""
    extension = load_extension()
    if extension is None:
        raise NotBuiltError(f"tilekernels.preload: {_NOT_BUILT}")
    extension.preload(None if names is None else list(names), _device_index(device))


def load_pack(path: str) -> None:
    """`tilekernels.load_pack`. Kernels that only the pack has take the place of what stood for them so far."""
    extension = load_extension()
    if extension is None:
        raise NotBuiltError(f"tilekernels.load_pack: {_NOT_BUILT}")
    extension.load_pack(path)
    _table.cache_clear()
    for name in _UNBUILT.keys() & _table().keys() - _LATE.keys():
        _LATE[name] = kernel(name, _UNBUILT[name])


_UNBUILT: dict[str, Callable[..., None]] = {}  # operators whose kernels this build lacks, with their references
_LATE: dict[str, Launch] = {}  # those of them that a pack brought
_OPERATORS: dict[str, Callable[..., None]] = {}
_PARAMS: dict[str, Sequence[Mapping[str, Any]]] = {}
_CHECKS: dict[str, Callable[..., None]] = {}
_EXACT_TYPES = (torch.Tensor, torch.nn.Parameter)
_NOT_BUILT = "tilekernels._C was never built here; install a wheel, or build one with `make wheel`"


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    extension = load_extension()
    return {entry["name"]: entry for entry in extension.kernels()} if extension else {}


def _run_operator(operator: Callable[..., None], check: Callable[..., None], args: Sequence[Any]) -> Any:
    """The torch operator, after making the outputs that are asked for."""
    requested = [at for at, value in enumerate(args) if is_request(value)]
    if not requested:
        return operator(*args)
    check(*(None if at in requested else value for at, value in enumerate(args)))
    device = next((value.device for value in args if isinstance(value, torch.Tensor)), None)
    complete = [make_output(value, args, device) if at in requested else value for at, value in enumerate(args)]
    operator(*complete)
    outputs = [complete[at] for at in requested]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def _fallback(name: str, args: Sequence[Any]) -> Any:
    """Takes over from the extension for tensors that are not exactly torch's own on CUDA: CPU, fake, subclasses."""
    if any(map(is_request, args)):
        return _run_operator(functools.partial(_fallback_operator, name), _CHECKS[name], args)
    return _fallback_operator(name, *args)


def _fallback_operator(name: str, *args: Any) -> None:
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if any(each.is_cuda for each in tensors) and all(type(each) in _EXACT_TYPES for each in tensors):
        # The torch operator would only come back here. Either they lie on two devices, which the check words, or:
        _CHECKS[name](*args)
        kinds = ", ".join(f"{str(each.dtype).removeprefix('torch.')} ({each.layout})" for each in tensors)
        raise ArgumentTypeError(f"{name}: tensors must be dense and of dtypes that DLPack knows, got {kinds}")
    check_devices(name, _PARAMS[name], args)
    if not tensors:  # torch could not tell which implementation is meant
        _CHECKS[name](*args)
    _OPERATORS[name](*args)


def _check_fallback(name: str, args: Sequence[Any]) -> None:
    """The check of tensors that the extension cannot read."""
    params = _PARAMS[name]
    check_metadata(name, params, args)
    check_devices(name, params, args)


def _make_unbuilt(name: str, cpu: Callable[..., None]) -> Launch:
    """The operator in a build that lacks its kernel: the reference on CPU, an error that helps on a GPU."""
    _UNBUILT[name] = cpu

    def launch(*args: Any) -> Any:
        late = _LATE.get(name)
        return _run_operator(run, _no_check, args) if late is None else late(*args)

    def check(*args: Any) -> None:
        """Without the extension's table there is nothing to check against."""
        late = _LATE.get(name)
        if late is not None:
            late.check(*args)

    def run(*args: Any) -> None:
        devices = {value.device.type for value in args if isinstance(value, torch.Tensor)}
        if devices <= {"cpu"}:
            with torch.no_grad():
                cpu(*args)
        elif devices != {"meta"}:
            raise NotBuiltError(_explain_unbuilt(name))

    return _as_launch(launch, check, name)


def _explain_unbuilt(name: str) -> str:
    extension = load_extension()
    if extension is None:
        return f"{name}: {_NOT_BUILT}"
    extension.covers(name, {})  # looked for, so that TILEKERNELS_RECORD gets to know
    held = ", ".join(_table()) or "none"
    return (
        f"{name}: this build holds no such kernel, only {held}; a profile with the line "
        f'`operators.include = ["{name}"]` builds it: `make pack PROFILE=FILE.toml` beside this library, or '
        "`make wheel PROFILE=FILE.toml` with all that you call"
    )


def _no_check(*args: Any) -> None:
    """For `_run_operator`, where no extension knows the kernel."""


def _as_launch(launch: Callable[..., Any], check: Callable[..., None], name: str) -> Launch:
    launch.__name__ = launch.__qualname__ = name.replace(".", "_")
    result = cast(Launch, launch)
    result.check = check
    return result


def _device_index(device: int | str | torch.device | None) -> int:
    if isinstance(device, int):
        return device
    if device is not None:
        device = torch.device(device)
        if device.type != "cuda":
            raise ArgumentError(f"tilekernels.preload: device must be a CUDA device, got {device}")
        if device.index is not None:
            return device.index
    # Without a usable GPU the extension says what is missing, in the words of DeviceError.
    return torch.cuda.current_device() if torch.cuda.is_available() else 0
