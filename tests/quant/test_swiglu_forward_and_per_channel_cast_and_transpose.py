"""swiglu_forward_and_per_channel_cast_and_transpose: bit-exact against the reference, near every rounding limit too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.quant.cast_cases import with_gap
from tests.quant.channel_cases import BLOCKS
from tests.refusals import Refusal
from tilekernels.quant import (
    per_channel_cast_and_transpose,
    swiglu_forward_and_per_channel_cast_and_transpose,
)
from tilekernels.quant._channels import SWIGLU
from tilekernels.quant.swiglu_forward_and_per_channel_cast_and_transpose import (
    swiglu_forward_and_per_channel_cast_and_transpose_ref,
)
from tilekernels.testing import assert_equal, check_bias

on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
CLAMPS = (None, 10.0, 0.5, 0.3)  # 0.3 is no bf16 number


def check(x: torch.Tensor, *options: Any) -> None:
    expected = swiglu_forward_and_per_channel_cast_and_transpose_ref(x, "e4m3", *options)
    for actual, wanted in zip(
        swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", *options), expected, strict=True
    ):
        assert_equal(actual, wanted)


def every_gate(device: str) -> torch.Tensor:
    """(512, 256): all finite bf16 numbers as gates, each with a value of its own, up to 2^40 either way.

    Values beside the largest gates are smaller: a product that overflows would make an infinite scale."""
    bits = torch.arange(65536, dtype=torch.int32)
    gates = torch.where((bits & 0x7F80) == 0x7F80, 0, bits).to(torch.int16).view(torch.bfloat16)
    values = torch.randn(65536) * torch.exp2(torch.randint(-40, 40, (65536,)).float())
    values = values * limit_of(gates)
    return torch.cat((gates.view(512, 128), values.bfloat16().view(512, 128)), dim=1).to(device)


def limit_of(gates: torch.Tensor) -> torch.Tensor:
    """A factor for values, so that no product overflows."""
    return torch.where(gates.float().abs() > 2.0**80, 2.0**-60, 1.0)


SIZES = [(0, 64), (128, 64), (128, 192), (256, 320), (384, 1024), (128, 7168)]


@on_every_device
@pytest.mark.parametrize("clamp", CLAMPS, ids=lambda clamp: f"clamp {clamp}")
@pytest.mark.parametrize("without_transpose", [False, True], ids=["transposed", "rows"])
@pytest.mark.parametrize("num_per_tokens", BLOCKS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equals_the_reference(
    size: tuple[int, int], num_per_tokens: int, without_transpose: bool, clamp: float | None, device: str
) -> None:
    x = (torch.randn((size[0], 2 * size[1]), device=device) * 4).bfloat16()
    for round_sf in (False, True):
        check(x, num_per_tokens, round_sf, without_transpose, clamp)


@on_every_device
@pytest.mark.parametrize("clamp", CLAMPS, ids=lambda clamp: f"clamp {clamp}")
@pytest.mark.parametrize("num_per_tokens", BLOCKS)
def test_every_bf16_gate(num_per_tokens: int, clamp: float | None, device: str) -> None:
    check(every_gate(device), num_per_tokens, True, False, clamp)


@on_every_device
@pytest.mark.parametrize(("row_gap", "offset"), [(1, 0), (0, 1), (8, 0), (4, 4), (64, 8), (6, 2)])
@pytest.mark.parametrize("without_transpose", [False, True], ids=["transposed", "rows"])
def test_strides_and_addresses(without_transpose: bool, row_gap: int, offset: int, device: str) -> None:
    x = torch.randn((256, 384), device=device).bfloat16()
    check(with_gap(x, row_gap, offset), 32, True, without_transpose, None)


@on_every_device
def test_close_to_float64(device: str) -> None:
    x = torch.randn((512, 256), device=device).bfloat16()
    gate, value = x.double().chunk(2, dim=1)
    exact = gate / (1 + torch.exp(-gate)) * value
    data, sf = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 128, True, True)
    restored = data.float() * sf.repeat_interleave(128, dim=0)
    # Half a step of e4m3 is 1/16 of a value; below 2^-6 its steps are 2^-9 of a scale; bf16 adds 2^-9 of a value.
    assert ((restored - exact).abs() <= exact.abs() * 0.0665 + sf.repeat_interleave(128, dim=0) * 2.0**-10).all()
    check_bias(restored, exact.float())


@on_every_device
@pytest.mark.parametrize("num_per_tokens", BLOCKS)
def test_is_the_cast_of_rounded_values(num_per_tokens: int, device: str) -> None:
    """A gate of 1000 is a factor of 1000: silu(g) = g, the rest is the other operator."""
    value = (torch.randn((256, 128), device=device) * 2.0**-8).bfloat16()
    x = torch.cat((torch.full_like(value, 1024.0), value), dim=1)
    actual = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", num_per_tokens)
    for got, expected in zip(actual, per_channel_cast_and_transpose(value * 1024, "e4m3", num_per_tokens), strict=True):
        assert_equal(got, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_per_tokens", BLOCKS)
@pytest.mark.parametrize("hidden", [576, 2048, 2560, 3072, 4096, 6144, 7168])
def test_published_sizes(hidden: int, num_per_tokens: int) -> None:
    x = torch.randn((4096, 2 * hidden), device="cuda", dtype=torch.bfloat16)
    for without_transpose in (False, True):
        for clamp in (None, 10.0, 0.5):
            check(x, num_per_tokens, True, without_transpose, clamp)
    check(torch.randn((8064, 2 * hidden), device="cuda", dtype=torch.bfloat16), num_per_tokens, False)


@pytest.mark.gpu
def test_every_gate_with_many_values() -> None:
    """64 million pairs: some thousand of them lie beside the middle of two bf16 numbers."""
    gates = every_gate("cuda")[:, :128].repeat(1, 1024)
    for _ in range(4):
        values = torch.randn_like(gates) * torch.exp2(torch.randint(-8, 8, gates.shape, device="cuda").float())
        values = values * limit_of(gates)
        check(torch.cat((gates, values.bfloat16()), dim=1), 32, True, True)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    hidden = 7168
    num_tokens = (2**31 // hidden + 1001) // 128 * 128
    if 8 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = torch.randn((num_tokens, 2 * hidden), device="cuda", dtype=torch.bfloat16)
    data, sf = swiglu_forward_and_per_channel_cast_and_transpose(x, "e4m3", 128)
    for start in (0, num_tokens // 256 * 128, num_tokens - 1024):  # beginning, middle and beyond the boundary
        expected = swiglu_forward_and_per_channel_cast_and_transpose_ref(x[start : start + 1024], "e4m3", 128)
        assert_equal(data[:, start : start + 1024].contiguous(), expected[0])
        assert_equal(sf[start // 128 : start // 128 + 8], expected[1])


# ---- refusals --------------------------------------------------------------------------------------------------------


def call(label: str, text: str, **changes: Any) -> Refusal:
    """The valid default call with some arguments changed; a function among them makes its value on the device."""

    def make(device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"x": ones(128, 256), "fmt": "e4m3", "num_per_tokens": 128, **changes}
        return {name: value(device) if callable(value) else value for name, value in kwargs.items()}

    return Refusal(label, make, text)


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return lambda device: torch.ones(shape, device=device).to(dtype)


def refusals() -> Iterator[Refusal]:
    for value in (None, [[1.0]], 1, "x", (1, 2)):
        label = "None" if value is None else type(value).__name__
        yield call(f"x {label}", f"x must be a tensor, got {label}", x=value)
    for dtype in (torch.float16, torch.float32, torch.int32, torch.uint8, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        yield call(f"x of {name}", f"x must be bfloat16, got {name}", x=ones(128, 256, dtype=dtype))
    for rank in (0, 1, 3):
        yield call(f"x of rank {rank}", f"x must have 2 dimensions, got {rank}.*", x=ones(*(128,) * rank))
    for width in (1, 64, 129, 192):
        yield call(f"{width} columns", f"x must have a multiple of 128 channels, got {width}", x=ones(128, width))
    for num_tokens in (1, 32, 127, 160):
        text = f"x must have a multiple of 128 tokens, got {num_tokens}"
        yield call(f"{num_tokens} tokens", text, x=ones(num_tokens, 256))
    every_second = lambda device: torch.ones((128, 512), device=device).bfloat16()[:, ::2]  # noqa: E731
    yield call("x every second column", r"x must have strides .*, got .*", x=every_second)
    for fmt in ("e2m1", None):
        yield call(f"fmt {fmt!r}", f"fmt must be 'e4m3', got {fmt!r}", fmt=fmt)
    for value in (0, 16, 64, 256):
        yield call(f"block {value}", f"num_per_tokens must be 32 or 128, got {value}", num_per_tokens=value)
    for argument in ("round_sf", "without_transpose"):
        yield call(f"{argument} 1", f"{argument} must be a bool, got int", **{argument: 1})
    for value in (-1.0, -1, float("nan"), float("-inf")):
        text = f"swiglu_clamp_value must be at least 0, got {value}"
        yield call(f"clamp {value!r}", text, swiglu_clamp_value=value)
    for value in ("1", True, [1.0]):
        label = type(value).__name__
        yield call(f"clamp {label}", f"swiglu_clamp_value must be a number, got {label}", swiglu_clamp_value=value)


@pytest.mark.usefixtures("needs_extension")
@on_every_device
@pytest.mark.parametrize("refusal", [*refusals()], ids=lambda refusal: refusal.id)
def test_refused(refusal: Refusal, device: str) -> None:
    refusal.check(SWIGLU, swiglu_forward_and_per_channel_cast_and_transpose, device)
