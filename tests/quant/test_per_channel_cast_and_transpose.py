"""per_channel_cast_and_transpose: the transpose of what per_channel_cast gives, and bit-exact against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.quant.channel_cases import Case, every_bf16, random_transposing_casts
from tests.refusals import Refusal
from tilekernels import config
from tilekernels.quant import per_channel_cast, per_channel_cast_and_transpose
from tilekernels.quant._channels import TRANSPOSE
from tilekernels.quant.per_channel_cast_and_transpose import per_channel_cast_and_transpose_ref
from tilekernels.testing import assert_equal

on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def check(case: Case, device: str) -> None:
    kwargs = case.kwargs(device)
    expected = per_channel_cast_and_transpose_ref(**kwargs)
    for actual, wanted in zip(per_channel_cast_and_transpose(**kwargs), expected, strict=True):
        assert_equal(actual, wanted)


CASTS = [pytest.param(case, id=f"{at:03}-{case.id}") for at, case in enumerate(random_transposing_casts(120, seed=1))]


@pytest.mark.parametrize("case", CASTS[::8])
def test_cast_on_cpu(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASTS)
def test_cast_on_gpu(case: Case) -> None:
    check(case, "cuda")


@on_every_device
@pytest.mark.parametrize("round_sf", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("num_per_tokens", [32, 128])
@pytest.mark.parametrize("name", ["every bf16", "ramp"])
def test_is_the_transpose_of_per_channel_cast(name: str, num_per_tokens: int, round_sf: bool, device: str) -> None:
    """The ramp shows where each element went: no two in a row or column are alike."""
    ramp = torch.arange(384 * 320).view(384, 320) % 251 * 2.0 ** (torch.arange(384)[:, None] // 32 % 3)
    x = (every_bf16() if name == "every bf16" else ramp.bfloat16()).to(device)
    data, sf = per_channel_cast(x, "e4m3", num_per_tokens, round_sf)
    transposed, transposed_sf = per_channel_cast_and_transpose(x, "e4m3", num_per_tokens, round_sf)
    assert_equal(transposed, data.t().contiguous())
    assert_equal(transposed_sf, sf)


@on_every_device
def test_no_tokens(device: str) -> None:
    data, sf = per_channel_cast_and_transpose(torch.empty((0, 192), device=device).bfloat16(), "e4m3", 32)
    assert (data.shape, data.dtype, sf.shape, sf.dtype) == ((192, 0), torch.float8_e4m3fn, (0, 192), torch.float32)


@on_every_device
def test_amax_clamp_is_read_at_call_time(device: str) -> None:
    x = torch.full((128, 64), 0.25, device=device).bfloat16()
    try:
        config.set_amax_clamp_for_quant("e4m3", False, 896.0)
        data, sf = per_channel_cast_and_transpose(x, "e4m3", 32)
    finally:
        config.reset_runtime_config()
    assert sf.unique().tolist() == [2.0]
    assert data.float().unique().tolist() == [0.125]


@pytest.mark.gpu
@pytest.mark.parametrize("num_per_tokens", [32, 128])
@pytest.mark.parametrize("hidden", [576, 2048, 2560, 3072, 4096, 6144, 7168])
def test_published_sizes(hidden: int, num_per_tokens: int) -> None:
    for num_tokens in (4096, 8064):
        for round_sf in (False, True):
            check(Case("bf16", num_tokens, hidden, num_per_tokens, round_sf=round_sf), "cuda")


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    hidden = 7168
    num_tokens = (2**31 // hidden + 1001) // 128 * 128
    if 6 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = torch.randn((num_tokens, hidden), device="cuda", dtype=torch.bfloat16)
    data, sf = per_channel_cast_and_transpose(x, "e4m3", 128)
    for start in (0, num_tokens // 256 * 128, num_tokens - 1024):  # beginning, middle and beyond the boundary
        expected = per_channel_cast_and_transpose_ref(x[start : start + 1024], "e4m3", 128)
        assert_equal(data[:, start : start + 1024].contiguous(), expected[0])
        assert_equal(sf[start // 128 : start // 128 + 8], expected[1])


# ---- refusals --------------------------------------------------------------------------------------------------------


def call(label: str, text: str, **changes: Any) -> Refusal:
    """The valid default call with some arguments changed; a function among them makes its value on the device."""

    def make(device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"x": ones(128, 128), "fmt": "e4m3", "num_per_tokens": 128, **changes}
        return {name: value(device) if callable(value) else value for name, value in kwargs.items()}

    return Refusal(label, make, text)


def ones(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return lambda device: torch.ones(shape, device=device).to(dtype)


def refusals() -> Iterator[Refusal]:
    for value in (None, [[1.0]], 1, "x", (1, 2)):
        label = "None" if value is None else type(value).__name__
        yield call(f"x {label}", f"x must be a tensor, got {label}", x=value)
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn):
        name = str(dtype).removeprefix("torch.")
        yield call(f"x of {name}", f"x must be bfloat16, got {name}", x=ones(128, 128, dtype=dtype))
    for rank in (0, 1, 3):
        yield call(f"x of rank {rank}", f"x must have 2 dimensions, got {rank}.*", x=ones(*(128,) * rank))
    for hidden in (1, 32, 63, 100):
        yield call(f"{hidden} channels", f"x must have a multiple of 64 channels, got {hidden}", x=ones(128, hidden))
    for num_tokens in (1, 32, 127, 129, 160):
        text = f"x must have a multiple of 128 tokens, got {num_tokens}"
        yield call(f"{num_tokens} tokens", text, x=ones(num_tokens, 128))
    for label, view in (
        ("transposed", lambda device: torch.ones((256, 128), device=device).bfloat16().t()),
        ("every second column", lambda device: torch.ones((128, 256), device=device).bfloat16()[:, ::2]),
    ):
        yield call(f"x {label}", r"x must have strides .*, got .*", x=view)
    for fmt in ("e2m1", "E4M3", None, 3):
        yield call(f"fmt {fmt!r}", f"fmt must be 'e4m3', got {fmt!r}", fmt=fmt)
    for value in (0, -1, 16, 64, 127, 256):
        yield call(f"block {value}", f"num_per_tokens must be 32 or 128, got {value}", num_per_tokens=value)
    for value in (128.0, "128", None, True):
        label = type(value).__name__
        yield call(f"block {value!r}", f"num_per_tokens must be an int, got {label}", num_per_tokens=value)
    yield call("round_sf 1", "round_sf must be a bool, got int", round_sf=1)


@pytest.mark.usefixtures("needs_extension")
@on_every_device
@pytest.mark.parametrize("refusal", [*refusals()], ids=lambda refusal: refusal.id)
def test_refused(refusal: Refusal, device: str) -> None:
    refusal.check(TRANSPOSE, per_channel_cast_and_transpose, device)
