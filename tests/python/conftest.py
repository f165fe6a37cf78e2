"""A stand-in for the compiled extension, so that the Python side is tested without building anything.

It keeps to the contract of `tilekernels._C` for one small kernel, demo.scale: `out = x * factor` by a named mode.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilekernels import _dispatch
from tilekernels.errors import ArgumentError


def _tensor(name: str, dtype: str, *, written: bool = False, nullable: bool = False) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "tensor",
        "dtypes": [dtype],
        "raw": False,
        "rank": 2,
        "written": written,
        "nullable": nullable,
        "optional": False,
    }


DEMO_SCALE = {
    "name": "demo.scale",
    "params": [
        _tensor("x", "float32"),
        _tensor("bias", "float32", nullable=True),
        _tensor("out", "float32", written=True),
        {"name": "factor", "kind": "scalar", "dtype": "float32"},
        {"name": "num_rounds", "kind": "scalar", "dtype": "int64"},
    ],
    "axes": [
        {"name": "itemsize", "kind": "itemsize_of", "of": "x", "values": [4]},
        {"name": "mode", "kind": "value", "values": ["once", "twice"]},
        {"name": "num_groups", "kind": "value", "values": [1, 2]},
        {"name": "form", "kind": "forms", "values": ["aligned", "general"]},
    ],
}


class FakeExtension:
    """Like `tilekernels._C` on a machine without a GPU: checks, and hands every call to the fallback."""

    def __init__(self) -> None:
        self.checked: list[tuple[Any, ...]] = []
        self.packs: list[str] = []
        self.preloaded: list[tuple[list[str] | None, int]] = []
        self.set_calls: dict[str, tuple[Any, ...]] = {}

    def set_torch(self, *args: Any) -> None:
        self.set_calls["torch"] = args

    def set_allocator(self, *args: Any) -> None:
        self.set_calls["allocator"] = args

    def set_errors(self, *args: Any) -> None:
        self.set_calls["errors"] = args

    def set_check_fallback(self, fallback: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.check_fallback = fallback

    def set_fallback(self, fallback: Callable[[str, tuple[Any, ...]], Any]) -> None:
        self.fallback = fallback

    def kernels(self) -> list[dict[str, Any]]:
        return [DEMO_SCALE, *({**DEMO_SCALE, "name": "demo.late"} for _ in self.packs[:1])]

    def covers(self, kernel: str, axes: dict[str, Any], arch: str | None = None) -> bool:
        return kernel == "demo.scale"

    def load_pack(self, path: str) -> None:
        """Brings the kernel demo.late, which is demo.scale by another name."""
        self.packs.append(path)
        self.demo_late = lambda *args: self.fallback("demo.late", args)
        self.check_demo_late = self.check_demo_scale

    def preload(self, names: list[str] | None, device: int) -> None:
        self.preloaded.append((names, device))

    def demo_scale(self, *args: Any) -> Any:
        return self.fallback("demo.scale", args)

    def check_demo_scale(self, x: Any, bias: Any, out: Any, *rest: Any) -> None:
        if type(x) not in (torch.Tensor, torch.nn.Parameter) or x.is_meta:
            return
        self.checked.append((x, bias, out, *rest))
        if x.dim() != 2:
            raise ArgumentError(f"demo.scale: x must have 2 dimensions, got {x.dim()}")


def _scale_cpu(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    factor: float,
    num_rounds: int,
    mode: str,
    num_groups: int,
) -> None:
    power = num_rounds * (2 if mode == "twice" else 1)
    out.copy_(x * factor**power + (0 if bias is None else bias))


@pytest.fixture(scope="session")
def fake_extension() -> FakeExtension:
    """The stand-in, loaded in place of the real extension for the tests that use `demo_scale`."""
    return FakeExtension()


@pytest.fixture(scope="session")
def demo_scale(fake_extension: FakeExtension) -> _dispatch.Launch:
    """demo.scale as an operator file gets it. Once a session: torch defines an operator of one name only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_dispatch, "load_native", lambda: fake_extension)
        _dispatch.load_extension.cache_clear()
        _dispatch._table.cache_clear()
        launch = _dispatch.kernel("demo.scale", cpu=_scale_cpu)
    _dispatch.load_extension.cache_clear()
    _dispatch._table.cache_clear()
    return launch
