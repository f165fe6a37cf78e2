"""Launches through `_C` without a GPU or torch: objects made here pass for CUDA tensors, by an exchange API of our own.

    LD_LIBRARY_PATH=<fake driver> python -m tests.python.c_module_cuda_runner _C.cpython-311-x86_64-linux-gnu.so

Prints what the calls answered as JSON; what the driver was asked is in its own log.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from typing import Any

from tests.csrc.runner import Tensor, make_tensor
from tests.python.c_module_runner import (
    Answer,
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    NotBuiltError,
    evaluate,
    load_module,
)

STREAM = 0x5000
CUDA, CPU = 2, 1


class FakeTensor:
    """What the exchange API below reads."""

    def __init__(self, dtype: str, *shape: int, device: int = 0, device_type: int = CUDA, data: int = 0x10000) -> None:
        # kept here, as a tensor keeps its own shape: the view that is handed out borrows it
        self.view = make_tensor(dtype, list(shape), None, [device_type, device], data, 0)
        self.dtype = dtype

    def set_strides(self, strides: Sequence[int]) -> None:
        self.strides = (ctypes.c_int64 * len(strides))(*strides)  # kept for the view, as the shape is
        self.view.strides = self.strides

    def __getitem__(self, rows: slice) -> FakeTensor:
        first = FakeTensor(self.dtype, rows.stop, self.view.shape[1], device=self.view.device_id)
        first.set_strides(self.strides)
        return first


class FakeParameter(FakeTensor):
    pass


class Subclass(FakeTensor):
    pass


made: list[tuple[Any, ...]] = []


def empty_strided(size: tuple[int, ...], stride: tuple[int, ...], *, dtype: str, device: Any) -> FakeTensor:
    """The allocator's part: notes what it was asked for."""
    made.append((size, stride, dtype, device.kind, device.index))
    if dtype == "no memory":
        raise MemoryError("out of memory")
    kind = Subclass if dtype == "watched" else FakeTensor
    tensor = kind("bfloat16" if dtype == "watched" else dtype, *size, device=device.index, data=0x40000)
    tensor.set_strides(stride)
    return tensor


class FakeDevice:
    def __init__(self, kind: str, index: int) -> None:
        self.kind, self.index = kind, index


FromObject = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(Tensor))
CurrentStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
streams_asked: list[tuple[int, int]] = []


def from_object(value: Any, out: Any) -> int:
    if not hasattr(value, "view"):
        return -1  # an error that was set would leave this function, and with it what it answers
    ctypes.memmove(out, ctypes.byref(value.view), ctypes.sizeof(Tensor))
    return 0


def current_stream(device_type: int, device: int, out: Any) -> int:
    streams_asked.append((device_type, device))
    out[0] = STREAM + device
    return 0


class Exchange(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("previous", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("managed_from", ctypes.c_void_p),
        ("managed_to", ctypes.c_void_p),
        ("from_object", FromObject),
        ("current_stream", CurrentStream),
    )


def make_capsule(exchange: Exchange) -> Any:
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(exchange), b"dlpack_exchange_api", None)


def main() -> None:
    module = load_module(sys.argv[1])
    first = Exchange(1, 3, None, None, None, None, FromObject(from_object), CurrentStream(current_stream))
    # a later major version of DLPack, which offers ours behind it
    newest = Exchange(2, 0, ctypes.addressof(first), None, None, None)
    answers: dict[str, Answer] = {}
    lonely = Exchange(2, 0)
    unknown = vars(module) | {"tensor": FakeTensor, "parameter": FakeParameter, "capsule": make_capsule(lonely)}
    answers["too new"] = evaluate("set_torch(tensor, parameter, capsule)", unknown)
    module.set_torch(FakeTensor, FakeParameter, make_capsule(newest))
    early = vars(module) | {"Tensor": FakeTensor}
    module.set_fallback(lambda name, arguments: ("fallback", name, len(arguments)))
    answers["no allocator"] = evaluate("demo_transpose(Tensor('uint8', 3, 5), ('uint8', 0, 5, 3))", early)
    module.set_allocator(empty_strided, FakeDevice, str)
    module.set_errors(ArgumentError, ArgumentTypeError, NotBuiltError, DeviceError)
    unreadable = FakeTensor("bfloat16", 64, 128)
    del unreadable.view
    names = vars(module) | {
        "Tensor": FakeTensor,
        "Parameter": FakeParameter,
        "Subclass": Subclass,
        "unreadable": unreadable,
    }
    names |= {"module": module, "path": sys.argv[2] if len(sys.argv) > 2 else ""}
    names |= {"CPU": CPU, "describe": lambda value: (type(value).__name__, list(value.view.shape[: value.view.ndim]))}
    answers |= {name: evaluate(expression, names) for name, expression in json.load(sys.stdin).items()}
    driver = ctypes.CDLL("libcuda.so.1")
    current = ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(current))
    print(json.dumps({"answers": answers, "streams": streams_asked, "made": made, "context_left": bool(current)}))


if __name__ == "__main__":
    main()
