"""Runs the kernels of this folder on a GPU, each against plain torch, and prints a line for each.

    python3 tests/csrc/launch_kinds/run_on_gpu.py libtilekernels.so.0

Needs torch and the library alone: calls go through the C functions by ctypes. Exits with 1 if a result is wrong.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

_runner_file = Path(__file__).resolve().parents[1] / "runner.py"
_spec = importlib.util.spec_from_file_location("runner", _runner_file)
assert _spec is not None
assert _spec.loader is not None
runner = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runner)


class Library:
    """Calls by name in torch's context and on its stream."""

    def __init__(self, path: str) -> None:
        self.session = runner.Session(path)
        self.kept: list[Any] = []

    def call(self, kernel: str, *tensors: torch.Tensor, scalars: Sequence[int] = ()) -> None:
        views = [self._view(tensor) for tensor in tensors]
        array = (ctypes.POINTER(runner.Tensor) * len(views))(*map(ctypes.pointer, views))
        values = (ctypes.c_int64 * len(scalars))(*scalars)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        handle = self.session._find(f"kinds.{kernel}")
        status = self.session.library.tk_launch(handle, array, values, None, stream)
        if status:
            raise RuntimeError(self.session.library.tk_last_error().decode())

    def set_pdl(self, enabled: bool) -> None:
        self.session.library.tk_set_pdl(int(enabled))

    @staticmethod
    def _view(tensor: torch.Tensor) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        strides = list(tensor.stride())
        return runner.make_tensor(name, list(tensor.shape), strides, [2, 0], tensor.data_ptr(), 0)


def check_cooperative(library: Library) -> None:
    x = torch.randint(-9, 9, (100_003,), dtype=torch.int32, device="cuda")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    out, workspace = torch.empty_like(x), torch.empty(num_sms, dtype=torch.int32, device="cuda")
    library.call("cooperative", x, workspace, out)
    assert torch.equal(out, torch.full_like(x, int(x.sum())))


def check_cluster(library: Library) -> None:
    x = torch.randn(256 * 1001, device="cuda")
    out = torch.empty_like(x)
    library.call("cluster", x, out)
    assert torch.equal(out.view(-1, 2, 128), x.view(-1, 2, 128).flip(1))


def check_tensor_maps(library: Library) -> None:
    for batch, m, n, k in ((3, 200, 132, 136), (1, 64, 64, 64), (5, 1, 4, 8), (2, 65, 260, 1000)):
        a = torch.randint(-4, 5, (batch, m + 3, k + 8), device="cuda").bfloat16()[:, :m, :k]
        b = torch.randint(-4, 5, (n, k), device="cuda").bfloat16()
        out = torch.empty((batch, m, n), device="cuda")
        library.call("tensor_maps", a, b, out)
        assert torch.equal(out, a.float() @ b.float().t()), (batch, m, n, k)


def check_dependent(library: Library, kernel: str = "dependent") -> None:
    """A chain of calls, each reading what other blocks wrote in the one before: plain launches, then dependent ones."""
    for enabled in (False, True):
        library.set_pdl(enabled)
        x = torch.arange(300_001, dtype=torch.int32, device="cuda")
        here, there = x.clone(), torch.empty_like(x)
        for _ in range(200):
            library.call(kernel, here, there)
            here, there = there, here
        library.set_pdl(False)
        assert torch.equal(here, x + 200), f"pdl {enabled}"


def check_own_wait(library: Library) -> None:
    check_dependent(library, "own_wait")


def check_much_shared_memory(library: Library) -> None:
    most = torch.cuda.get_device_properties(0).shared_memory_per_block_optin // 4
    for num_columns in (1, 12_289, most):
        x = torch.randn((7, num_columns), device="cuda")
        out = torch.empty_like(x)
        library.call("much_shared_memory", x, out)
        assert torch.equal(out, x.flip(1)), num_columns
    refused = ""
    try:
        library.call("much_shared_memory", *torch.zeros((2, 1, most + 1), device="cuda"))
    except RuntimeError as error:
        refused = str(error)
    assert "bytes of shared memory a block" in refused


def check_three_kernels(library: Library) -> None:
    for enabled in (False, True):
        library.set_pdl(enabled)
        for _ in range(20):
            x = torch.randint(-9, 9, (1000, 333), dtype=torch.int32, device="cuda")
            workspace = torch.empty((16, 333), dtype=torch.int32, device="cuda")
            sums, out = (torch.empty(333, dtype=torch.int32, device="cuda") for _ in range(2))
            library.call("three_kernels", x, workspace, sums, out)
            expected = x.sum(0) - x.sum(0).max()
            assert torch.equal(out.long(), expected)
        library.set_pdl(False)


def check_pointer_table(library: Library) -> None:
    vectors = [torch.randint(-9, 9, (5000,), device="cuda").float() for _ in range(4)]
    table, out = torch.empty(4, dtype=torch.int64, device="cuda"), torch.empty(5000, device="cuda")
    library.call("pointer_table", table, out, scalars=[vector.data_ptr() for vector in vectors])
    assert torch.equal(out, sum(vectors))
    assert table.tolist() == [vector.data_ptr() for vector in vectors]


def checks() -> Iterator[tuple[str, Callable[[Library], None]]]:
    for name, value in globals().items():
        if name.startswith("check_"):
            yield name.removeprefix("check_"), value


def main() -> None:
    torch.zeros(1, device="cuda")  # makes the primary context current
    library = Library(sys.argv[1])
    failed = False
    for name, check in checks():
        try:
            check(library)
            torch.cuda.synchronize()
            print(f"{name}: right")
        except (AssertionError, RuntimeError) as error:
            failed = True
            print(f"{name}: WRONG: {type(error).__name__}: {error}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
