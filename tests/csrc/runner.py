"""Carries out a list of steps on libtilekernels in a process of its own, since a process opens the driver only once.

    echo '[{"do": "call", ...}]' | python runner.py libtilekernels.so.0

Steps and their answers are JSON; `steps.py` makes and reads them. Uses ctypes alone: it starts in 50 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

Step = dict[str, Any]

# DLPack: code, bits, lanes
DTYPES = {
    "bool": (6, 8, 1),
    "int32": (0, 32, 1),
    "int64": (0, 64, 1),
    "int8": (0, 8, 1),
    "uint8": (1, 8, 1),
    "float16": (2, 16, 1),
    "float32": (2, 32, 1),
    "float64": (2, 64, 1),
    "bfloat16": (4, 16, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "strange": (99, 16, 1),
}


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Scalar(ctypes.Union):
    _fields_ = (("f32", ctypes.c_float), ("i32", ctypes.c_int32))


class KernelInfo(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("num_params", ctypes.c_int32),
        ("num_axes", ctypes.c_int32),
        ("num_variants", ctypes.c_int32),
    )


class DeviceInfo(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("name", ctypes.c_char * 128),
        ("major", ctypes.c_int32),
        ("minor", ctypes.c_int32),
        ("num_sms", ctypes.c_int32),
        ("max_shared_memory", ctypes.c_int32),
        ("total_memory", ctypes.c_uint64),
        ("arch", ctypes.c_char_p),
        ("wanted_arch", ctypes.c_char_p),
    )


class WorkspaceInfo(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("num_bytes", ctypes.c_int64),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 8),
    )


class Session:
    """The library and the contexts that steps have made."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.library.tk_last_error.restype = ctypes.c_char_p
        self.library.tk_status_name.restype = ctypes.c_char_p
        self.contexts: dict[str, ctypes.c_void_p] = {}

    def run(self, steps: Sequence[Step]) -> list[Any]:
        return [getattr(self, f"do_{step['do']}")(**{key: step[key] for key in step if key != "do"}) for step in steps]

    # ---- kernels ---------------------------------------------------------------------------------------------------

    def do_call(self, stream: int = 0, **call: Any) -> Any:
        return self._with_kernel("tk_launch", [ctypes.c_void_p(stream)], **call)

    def do_check(self, **call: Any) -> Any:
        return self._with_kernel("tk_check", [], **call)

    def do_workspace_size(self, param: int, num_sms: int, **call: Any) -> Any:
        info = WorkspaceInfo(size=ctypes.sizeof(WorkspaceInfo))
        answer = self._with_kernel("tk_workspace_size", [num_sms, ctypes.byref(info)], first=[param], **call)
        dtype = [info.code, info.bits, info.lanes]
        return answer | {"num_bytes": info.num_bytes, "dtype": dtype, "shape": list(info.shape[: info.ndim])}

    def do_preload(self, names: list[str] | None, device: int) -> Any:
        array = (ctypes.c_char_p * len(names or []))(*(name.encode() for name in names or []))
        return self._answer(self.library.tk_preload(array if names is not None else None, len(names or []), device))

    def do_fail(self, call: str, code: int) -> None:
        """From here on the fake driver refuses that call."""
        os.environ["FAKE_CUDA_FAIL"] = f"{call}:{code}"

    def do_set_pdl(self, enabled: bool) -> int:
        self.library.tk_set_pdl(int(enabled))
        return int(self.library.tk_get_pdl())

    def do_set_thread_pdl(self, mode: str) -> int:
        return int(self.library.tk_set_thread_pdl(("default", "off", "on").index(mode)))

    def do_status_names(self) -> list[str]:
        return [self.library.tk_status_name(status).decode() for status in range(13)]

    def do_find(self, name: str) -> Any:
        return self._answer(self.library.tk_find(name.encode(), ctypes.byref(ctypes.c_void_p())))

    def do_load_pack(self, path: str) -> Any:
        return self._answer(self.library.tk_load_pack(path.encode()))

    def do_packs(self) -> list[str]:
        self.library.tk_pack_at.restype = ctypes.c_char_p
        return [self.library.tk_pack_at(index).decode() for index in range(self.library.tk_num_packs())]

    def do_kernels(self) -> list[str]:
        names = []
        for index in range(self.library.tk_num_kernels()):
            info = KernelInfo(size=ctypes.sizeof(KernelInfo))
            self.library.tk_kernel_at.restype = ctypes.c_void_p
            self.library.tk_describe_kernel(ctypes.c_void_p(self.library.tk_kernel_at(index)), ctypes.byref(info))
            names.append(info.name.decode())
        return names

    def do_null_handle(self, function: str) -> Any:
        return self._answer(getattr(self.library, function)(None, None, None, None, None))

    def do_covers(self, kernel: str, labels: list[int] | None, arch: str | None) -> int:
        array = (ctypes.c_int32 * len(labels))(*labels) if labels is not None else None
        return int(self.library.tk_covers(self._find(kernel), array, arch.encode() if arch else None))

    # ---- machine ---------------------------------------------------------------------------------------------------

    def do_enter(self, device: int) -> Any:
        return self._answer(self.library.tk_enter_device(device, ctypes.byref(ctypes.c_void_p())))

    def do_driver_version(self) -> Any:
        version = ctypes.c_int32()
        return self._answer(self.library.tk_driver_version(ctypes.byref(version)), version=version.value)

    def do_num_devices(self) -> Any:
        count = ctypes.c_int32()
        status = self.library.tk_num_devices(ctypes.byref(count))
        return self._answer(status, count=count.value)

    def do_describe_device(self, device: int, size: int = ctypes.sizeof(DeviceInfo)) -> Any:
        info = DeviceInfo(size=size)
        status = self.library.tk_describe_device(device, ctypes.byref(info))
        texts = {name: (getattr(info, name) or b"").decode() for name in ("name", "arch", "wanted_arch")}
        return self._answer(status, num_sms=info.num_sms, capability=[info.major, info.minor], size=info.size, **texts)

    def do_create_context(self, name: str, device: int) -> Any:
        """A context of one's own, made current; the fake driver has the function that the library does not need."""
        context = ctypes.c_void_p()
        self.library.tk_num_devices(ctypes.byref(ctypes.c_int32()))  # initialises the driver
        result = ctypes.CDLL("libcuda.so.1").cuCtxCreate_v2(ctypes.byref(context), 0, device)
        self.contexts[name] = context
        return {"result": result}

    def do_destroy_context(self, name: str) -> Any:
        return {"result": ctypes.CDLL("libcuda.so.1").cuCtxDestroy_v2(self.contexts[name])}

    def do_set_context(self, name: str | None) -> Any:
        return {"result": ctypes.CDLL("libcuda.so.1").cuCtxSetCurrent(self.contexts[name] if name else None)}

    # ---- processes and threads -------------------------------------------------------------------------------------

    def do_threads(self, count: int, steps: list[Step]) -> list[list[Any]]:
        answers: list[list[Any]] = [[] for _ in range(count)]
        barrier = threading.Barrier(count)

        def work(index: int) -> None:
            barrier.wait()
            answers[index] = self.run(steps)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def do_fork(self, steps: list[Step]) -> list[Any]:
        read, write = os.pipe()
        if os.fork() == 0:
            os.write(write, json.dumps(self.run(steps)).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            answers: list[Any] = json.load(pipe)
        os.wait()
        return answers

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _with_kernel(
        self,
        function: str,
        rest: list[Any],
        kernel: str,
        tensors: list[Any],
        scalars: list[Any],
        axes: list[int],
        first: Sequence[int] = (),
    ) -> Any:
        views = [make_tensor(**tensor) if tensor else None for tensor in tensors]
        array = (ctypes.POINTER(Tensor) * len(views))(*(ctypes.pointer(view) if view else None for view in views))
        values = (Scalar * len(scalars))(*map(make_scalar, scalars))
        labels = (ctypes.c_int32 * len(axes))(*axes)
        call = getattr(self.library, function)
        return self._answer(call(self._find(kernel), *first, array, values, labels, *rest))

    def _find(self, name: str) -> ctypes.c_void_p:
        kernel = ctypes.c_void_p()
        if self.library.tk_find(name.encode(), ctypes.byref(kernel)):
            raise RuntimeError(self.library.tk_last_error().decode())
        return kernel

    def _answer(self, status: int, **more: Any) -> dict[str, Any]:
        message = self.library.tk_last_error().decode() if status else ""
        return {"status": self.library.tk_status_name(status).decode(), "message": message, **more}


def make_tensor(
    dtype: str, shape: list[int], strides: list[int] | None, device: list[int], data: int, byte_offset: int
) -> Tensor:
    code, bits, lanes = DTYPES[dtype]
    return Tensor(
        data=data,
        device_type=device[0],
        device_id=device[1],
        ndim=len(shape),
        code=code,
        bits=bits,
        lanes=lanes,
        shape=(ctypes.c_int64 * len(shape))(*shape),
        strides=(ctypes.c_int64 * len(strides))(*strides) if strides is not None else None,
        byte_offset=byte_offset,
    )


def make_scalar(value: float) -> Scalar:
    return Scalar(f32=value) if isinstance(value, float) else Scalar(i32=value)


if __name__ == "__main__":
    print(json.dumps(Session(sys.argv[1]).run(json.load(sys.stdin))))
