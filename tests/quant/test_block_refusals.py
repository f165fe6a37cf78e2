"""Invalid calls of the per-block casts and of the way back: refused with the sentence that names what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.refusals import Refusal
from tilekernels.quant import (
    cast_back,
    per_block_cast,
    per_block_cast_lossless,
    per_block_cast_with_precomputed_sf,
    per_block_cast_with_sf_only,
    per_token_cast_back,
)

CAST = "quant.per_block_cast"
SF_ONLY = "quant.per_block_cast_with_sf_only"
PRECOMPUTED = "quant.per_block_cast_with_precomputed_sf"
LOSSLESS = "quant.per_block_cast_lossless"
CAST_BACK = "quant.cast_back"
PER_TOKEN = "quant.per_token_cast_back"
OPERATORS: dict[str, Callable[..., Any]] = {
    CAST: per_block_cast,
    SF_ONLY: per_block_cast_with_sf_only,
    PRECOMPUTED: per_block_cast_with_precomputed_sf,
    LOSSLESS: per_block_cast_lossless,
    CAST_BACK: cast_back,
    PER_TOKEN: per_token_cast_back,
}
E4M3 = torch.float8_e4m3fn
TOKENS, HIDDEN = 40, 192


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.ones(shape, device=device).to(dtype)


def defaults(name: str) -> dict[str, Any]:
    """A valid call."""
    if name in (CAST, SF_ONLY, PRECOMPUTED):
        kwargs: dict[str, Any] = {"x": ones(TOKENS, HIDDEN), "fmt": "e4m3", "block_size": (32, 128)}
        return {**kwargs, "sf": ones(2, 2)} if name == PRECOMPUTED else kwargs
    if name == LOSSLESS:
        pair = (ones(TOKENS, HIDDEN // 2, dtype=torch.int8), ones(TOKENS, 6))
        return {"x": pair, "fmt": "e4m3", "x_block_size": (1, 32), "out_block_size": (32, 32)}
    pair = (ones(TOKENS, HIDDEN, dtype=E4M3), ones(TOKENS, 6))
    sizes = {"x_block_size": (1, 32)} if name == CAST_BACK else {"num_per_channels": 32}
    return {"x": pair, "fmt": "bf16", **sizes}


def call(name: str, label: str, text: str, **changes: Any) -> Refusal:
    """The valid call with some arguments changed; a function among them makes its value on the device."""
    return Refusal(
        label, lambda device: {key: build(value, device) for key, value in {**defaults(name), **changes}.items()}, text
    )


def build(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(build(each, device) for each in value)
    return value(device) if callable(value) and not isinstance(value, type) else value


def of_block_casts(name: str) -> Iterator[Refusal]:
    for value, kind in ((None, "None"), ([[1.0]], "list"), ((ones(4, 64), ones(4, 2)), "tuple"), ("x", "str")):
        yield call(name, f"x {kind}", f"x must be a tensor, got {kind}", x=value)
    for dtype in (torch.float16, torch.int8, E4M3, torch.int32):
        text = f"x must be bfloat16 or float32, got {str(dtype).removeprefix('torch.')}"
        yield call(name, f"x of {dtype}", text, x=ones(TOKENS, HIDDEN, dtype=dtype))
    yield call(name, "x of rank 3", "x must have 2 dimensions, got 3.*", x=ones(2, TOKENS, HIDDEN))
    for hidden in (32, 100, 224):
        sf = {"sf": ones(2, -(-hidden // 128))} if name == PRECOMPUTED else {}
        text = f"x must have a multiple of 64 channels, got {hidden}"
        yield call(name, f"{hidden} channels", text, x=ones(TOKENS, hidden), **sf)
    yield call(
        name, "x transposed", r"x must have strides .*, got .*", x=lambda device: torch.ones(192, 40, device=device).t()
    )
    for fmt in ("e5m6", "bf16", None, ["e4m3"]):
        text = rf"fmt must be one of 'e4m3', 'e2m1', got {re.escape(repr(fmt))}"
        yield call(name, f"fmt {fmt}", text, fmt=fmt)
    for block in ((32, 64), (1, 128), (128, 1), (0, 0), (-32, 32), (256, 128)):
        text = rf"block_size must hold 32 or 128 each, got {re.escape(str(block))}"
        yield call(name, f"block {block}", text, block_size=block)
    for value in (128, None, (128,), (32, 32, 32), "32x32"):
        text = r"block_size must be a pair \(rows, columns\), got .*"
        yield call(name, f"block {value!r}", text, block_size=value)
    for value in ((32.0, 128), (32, "128"), (True, 128)):
        yield call(name, f"block {value!r}", r"block_size must hold two ints, got .*", block_size=value)
    yield call(name, "round_sf an int", "round_sf must be a bool, got int", round_sf=2)


def of_scales(name: str, give: Callable[[Any], dict[str, Any]]) -> Iterator[Refusal]:
    packed = {"round_sf": True, "use_packed_ue8m0": True}
    unrounded = "use_packed_ue8m0 must come with round_sf=True, got round_sf=False"
    yield call(name, "packed, not rounded", unrounded, use_packed_ue8m0=True)
    text = "out_sf must be float32 without packed or e4m3 scales, got int32"
    yield call(name, "out_sf of int32", text, **give(ones(2, 2, dtype=torch.int32)))
    text = "out_sf must be int32 with use_packed_ue8m0=True, got float32"
    yield call(name, "packed out_sf of fp32", text, **packed, **give(ones(2, 1)))
    for shape in ((1, 2), (2, 3), (3, 2), (TOKENS, 2)):
        text = rf"out_sf must have shape \(2, 2\), got {re.escape(str(shape))}"
        yield call(name, f"out_sf of shape {shape}", text, **give(ones(*shape)))
    text = "use_tma_aligned_col_major_sf must be False where out_sf is given, got True"
    yield call(name, "column-major out_sf", text, use_tma_aligned_col_major_sf=True, **give(ones(2, 2)))
    yield call(name, "out_sf a list", "out_sf must be a tensor, got list", **give([1.0]))


def of_data(name: str, give: Callable[[Any], dict[str, Any]]) -> Iterator[Refusal]:
    text = "out must be float8_e4m3fn for this fmt, got int8"
    yield call(name, "out of int8", text, **give(ones(TOKENS, HIDDEN, dtype=torch.int8)))
    for shape in ((TOKENS, 96), (TOKENS - 1, HIDDEN), (TOKENS + 1, HIDDEN)):
        text = r"out must have shape .*, got \(\d+, \d+\)"
        yield call(name, f"out of shape {shape}", text, **give(ones(*shape, dtype=E4M3)))
    wide = lambda device: torch.ones((TOKENS, 2 * HIDDEN), device=device).to(E4M3)[:, :HIDDEN]  # noqa: E731
    yield call(name, "out not dense", r"out must have strides .*, got .*", **give(wide))


def of_precomputed() -> Iterator[Refusal]:
    for shape in ((1, 2), (2, 1), (TOKENS, 2)):
        text = rf"sf must have shape \(2, 2\), got {re.escape(str(shape))}"
        yield call(PRECOMPUTED, f"sf of shape {shape}", text, sf=ones(*shape))
    for dtype in (torch.int32, E4M3, torch.bfloat16):
        text = f"sf must be float32, got {str(dtype).removeprefix('torch.')}"
        yield call(PRECOMPUTED, f"sf of {dtype}", text, sf=ones(2, 2, dtype=dtype))
    yield call(PRECOMPUTED, "sf None", "sf must be a tensor, got None", sf=None)
    for flag in ("use_tma_aligned_col_major_sf", "use_packed_ue8m0"):
        text = f"{flag} must be False where the scales are given, got True"
        yield call(PRECOMPUTED, flag, text, **{flag: True, "round_sf": True})


def of_pairs(name: str) -> Iterator[Refusal]:
    """What the operators that take quantised data refuse alike."""
    data, sf = defaults(name)["x"]
    for value, kind in ((data, "Tensor"), (None, "NoneType"), ((data,), "tuple of 1"), ((data, sf, sf), "tuple of 3")):
        yield call(name, f"x {kind}", rf"x must be a pair \(data, sf\), got {kind}", x=value)
    yield call(name, "data None", "x must be a tensor, got None", x=(None, sf))
    yield call(name, "sf None", "x_sf must be a tensor, got None", x=(data, None))
    yield call(name, "data of rank 1", "x must have 2 dimensions, got 1", x=(ones(64, dtype=E4M3), sf))
    for shape in ((TOKENS, 5), (TOKENS - 1, 6), (TOKENS, 192)):
        text = rf"x_sf must have shape \(40, 6\) for blocks of 1 x 32, got {re.escape(str(shape))}"
        yield call(name, f"sf of shape {shape}", text, x=(data, ones(*shape)))
    text = r"x_sf must have shape \(40, 2\) for blocks of 1 x 32, got \(40, 6\)"
    yield call(name, "packed sf not packed", text, x=(data, ones(TOKENS, 6, dtype=torch.int32)))
    text = "x_sf must be float32 or int32 or float8_e4m3fn, got bfloat16"
    yield call(name, "sf of bf16", text, x=(data, ones(TOKENS, 6, dtype=torch.bfloat16)))
    spread = lambda device: torch.ones((2 * TOKENS, 12), device=device)[::2, ::2]  # noqa: E731
    yield call(name, "sf with gaps", r"x_sf must have a stride of 1 in one dimension, got \(24, 2\)", x=(data, spread))
    transposed = lambda device: build(data, device).t().contiguous().t()  # noqa: E731
    yield Refusal(
        "data column-major",
        lambda device: {**call(name, "", "").make(device), "x": (transposed(device), sf(device))},
        r"x must have strides .*, got .*",
    )


def of_cast_back(name: str) -> Iterator[Refusal]:
    sf = defaults(name)["x"][1]
    for fmt in ("e4m3", None, ["bf16"], torch.bfloat16):
        yield call(name, f"fmt {fmt}", rf"fmt must be 'bf16' or 'fp32', got {re.escape(repr(fmt))}", fmt=fmt)
    for special in ("e4m3", "", 3):
        text = f"x_special_fmt must be None or 'e5m6', got {special!r}"
        yield call(name, f"special {special}", text, x_special_fmt=special)
    for dtype in (torch.uint8, torch.bfloat16):
        text = f"x must hold data of float8_e4m3fn or int8, got {str(dtype).removeprefix('torch.')}"
        yield call(name, f"data of {dtype}", text, x=(ones(TOKENS, HIDDEN, dtype=dtype), sf))
    text = "x must hold data of uint8 with x_special_fmt='e5m6', got float8_e4m3fn"
    yield call(name, "e5m6 in e4m3", text, x_special_fmt="e5m6")
    text = "x must have a multiple of 12 bytes in a row of e5m6, got 100"
    yield call(name, "e5m6 of 100 bytes", text, x=(ones(TOKENS, 100, dtype=torch.uint8), sf), x_special_fmt="e5m6")
    yield call(
        name, "100 channels", "x must have a multiple of 64 channels, got 100", x=(ones(40, 100, dtype=E4M3), sf)
    )
    if name == PER_TOKEN:
        yield call(name, "no channels", "x_block_size must be positive, got .*", num_per_channels=0)
        return
    for block in ((0, 32), (1, -32)):
        yield call(name, f"block {block}", "x_block_size must be positive, got .*", x_block_size=block)
    yield call(name, "one number", r"x_block_size must be a pair \(rows, columns\), got 32", x_block_size=32)
    yield call(name, "a float", "x_block_size must hold two ints, got .*", x_block_size=(1.0, 32))


def of_lossless() -> Iterator[Refusal]:
    data, sf = defaults(LOSSLESS)["x"]
    yield call(LOSSLESS, "fmt e2m1", "fmt must be 'e4m3', got 'e2m1'", fmt="e2m1")
    text = "x must hold data of int8, got float8_e4m3fn"
    yield call(LOSSLESS, "data of e4m3", text, x=(ones(TOKENS, 96, dtype=E4M3), sf))
    text = "x must have a multiple of 32 channels, got 40"
    yield call(LOSSLESS, "40 channels", text, x=(ones(TOKENS, 20, dtype=torch.int8), sf))
    text = "x_sf must be float32 or int32, got float8_e4m3fn"
    yield call(LOSSLESS, "scales in e4m3", text, x=(data, ones(TOKENS, 6, dtype=E4M3)))
    for block in ((1, 24), (1, 96)):
        text = rf"x_block_size must have a power of two as columns, got {re.escape(str(block))}"
        yield call(LOSSLESS, f"x block {block}", text, x_block_size=block)
    text = r"out_block_size must have a power of two as columns, got \(32, 96\)"
    yield call(LOSSLESS, "out block of 96", text, out_block_size=(32, 96))
    for block in ((32, 16), (0, 32), (1, 0)):
        text = r"out_block_size must (hold multiples of x_block_size \(1, 32\)|be positive), got .*"
        yield call(LOSSLESS, f"out block {block}", text, out_block_size=block)
    text = r"out_block_size must hold multiples of x_block_size \(3, 32\), got \(32, 32\)"
    yield call(LOSSLESS, "32 rows of 3", text, x=(data, ones(14, 6)), x_block_size=(3, 32))
    text = r"x_block_size must have at least 2 columns where scales are packed, got \(1, 1\)"
    packed = ones(TOKENS // 4, HIDDEN, dtype=torch.int32)
    yield call(LOSSLESS, "packed single channels", text, x=(data, packed), x_block_size=(1, 1))
    text = "use_packed_ue8m0 must come with round_sf=True, got round_sf=False"
    yield call(LOSSLESS, "packed, not rounded", text, use_packed_ue8m0=True)


REFUSALS = {
    CAST: [
        *of_block_casts(CAST),
        *of_scales(CAST, lambda sf: {"out": (None, sf)}),
        *of_data(CAST, lambda data: {"out": (data, None)}),
        call(CAST, "out a tensor", r"out must be a pair \(data, sf\), got Tensor", out=ones(2, 2)),
    ],
    SF_ONLY: [*of_block_casts(SF_ONLY), *of_scales(SF_ONLY, lambda sf: {"out_sf": sf})],
    PRECOMPUTED: [
        *of_block_casts(PRECOMPUTED),
        *of_data(PRECOMPUTED, lambda data: {"out": data}),
        *of_precomputed(),
    ],
    LOSSLESS: [*of_pairs(LOSSLESS), *of_lossless()],
    CAST_BACK: [*of_pairs(CAST_BACK), *of_cast_back(CAST_BACK)],
    PER_TOKEN: [*of_pairs(PER_TOKEN), *of_cast_back(PER_TOKEN)],
}
PARAMETERS = [
    pytest.param(name, refusal, id=f"{name.removeprefix('quant.')}-{refusal.id}")
    for name, refusals in REFUSALS.items()
    for refusal in refusals
]


def check(name: str, refusal: Refusal, device: str) -> None:
    # The kernel of per_token_cast_back is that of cast_back, and so is the name in what it refuses.
    by_kernel = name == PER_TOKEN and "strides" in refusal.text
    refusal.check(CAST_BACK if by_kernel else name, OPERATORS[name], device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_call_that_is_changed_is_valid(name: str, device: str) -> None:
    OPERATORS[name](**call(name, "", "").make(device))


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(("name", "refusal"), PARAMETERS)
def test_refused_on_cpu(name: str, refusal: Refusal) -> None:
    check(name, refusal, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "refusal"), PARAMETERS)
def test_refused_on_gpu(name: str, refusal: Refusal) -> None:
    check(name, refusal, "cuda")
