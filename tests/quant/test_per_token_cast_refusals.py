"""Every invalid call of the per-token casts: refused with the sentence that names what is wrong, nothing written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.refusals import Refusal
from tilekernels.quant import per_token_cast, per_token_cast_with_precomputed_sf, per_token_cast_with_sf_only

CAST = "quant.per_token_cast"
SF_ONLY = "quant.per_token_cast_with_sf_only"
PRECOMPUTED = "quant.per_token_cast_with_precomputed_sf"
OPERATORS = {
    CAST: per_token_cast,
    SF_ONLY: per_token_cast_with_sf_only,
    PRECOMPUTED: per_token_cast_with_precomputed_sf,
}
TOKENS, HIDDEN, GROUP = 4, 128, 64
E4M3 = torch.float8_e4m3fn
NOT_TENSORS = (None, [[1.0]], 1, "x", {}, 0.5, torch.Tensor, np.ones((4, 128), dtype=np.float32))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:

    return lambda device: torch.ones(shape, device=device).to(dtype)


def call(name: str, label: str, text: str, **changes: Any) -> Refusal:
    """The valid default call with some arguments changed; a function among them makes its value on the device."""

    def make(device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"x": ones(TOKENS, HIDDEN), "fmt": "e4m3", "num_per_channels": GROUP}
        if name == PRECOMPUTED:
            kwargs["sf"] = ones(TOKENS, HIDDEN // GROUP)
        kwargs.update(changes)
        return {key: build(value, device) for key, value in kwargs.items()}

    return Refusal(label, make, text)


def build(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(build(each, device) for each in value)
    return value(device) if callable(value) and not isinstance(value, type) else value


def of_every_operator(name: str) -> Iterator[Refusal]:
    """What the three operators refuse alike."""
    for value in NOT_TENSORS:
        label = "None" if value is None else type(value).__name__
        yield call(name, f"x {label}", f"x must be a tensor, got {label}", x=value)
    wrong = (torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool, E4M3)
    for dtype in (*wrong, torch.float8_e5m2, torch.complex64):
        text = f"x must be bfloat16 or float32, got {name_of(dtype)}"
        yield call(name, f"x of {name_of(dtype)}", text, x=ones(TOKENS, HIDDEN, dtype=dtype))
    for rank in (0, 1, 3, 4):
        yield call(name, f"x of rank {rank}", f"x must have 2 dimensions, got {rank}.*", x=ones(*(64,) * rank))
    for hidden in (1, 2, 16, 32, 63, 65, 96, 100, 7200):
        sf = {"sf": ones(TOKENS, -(-hidden // GROUP))} if name == PRECOMPUTED else {}
        text = f"x must have a multiple of 64 channels, got {hidden}"
        yield call(name, f"{hidden} channels", text, x=ones(TOKENS, hidden), **sf)
    views: dict[str, Callable[[str], torch.Tensor]] = {
        "transposed": lambda device: torch.ones((HIDDEN, TOKENS), device=device).t(),
        "every second column": lambda device: torch.ones((TOKENS, 2 * HIDDEN), device=device)[:, ::2],
        "one column expanded": lambda device: torch.ones((TOKENS, 1), device=device).expand(-1, HIDDEN),
    }
    for label, view in views.items():
        yield call(name, f"x {label}", r"x must have strides .*, got .*", x=view)

    formats = "'e4m3', 'e2m1', 'e5m6'" if name == CAST else "'e4m3', 'e2m1'"
    values: tuple[Any, ...] = ("e4m2", "E4M3", "", "bf16", "fp8", "e5m2", None, 3, ["e4m3"], {}, b"e4m3", ("e4m3",))
    for value in values:
        shown = repr(value).replace("[", r"\[").replace("]", r"\]").replace("(", r"\(").replace(")", r"\)")
        yield call(name, f"fmt {value!r}", f"fmt must be one of {formats}, got {shown}", fmt=value)
    sizes = f"16, 32, 64, 128{f' or the number of channels {HIDDEN}' if name == CAST else ''}"
    for group in (0, -1, 1, 8, 15, 17, 31, 48, 63, 65, 96, 127, 129, 256, 7168, 2**31, -64):
        text = f"num_per_channels must be one of {sizes}, got {group}"
        yield call(name, f"group {group}", text, num_per_channels=group)
    for value in (64.5, "64", None, [64], (64,), 64.5j):
        label = type(value).__name__
        yield call(name, f"group {label}", f"num_per_channels must be an int, got {label}", num_per_channels=value)

    e4m3_alone = "use_e4m3_sf must come without round_sf and use_packed_ue8m0, got round_sf=True"
    yield call(name, "e4m3 and rounded scales", e4m3_alone, use_e4m3_sf=True, round_sf=True)


def of_layouts(name: str) -> Iterator[Refusal]:
    """Flags that have no meaning together, for the operators that return scales."""
    unrounded = "use_packed_ue8m0 must come with round_sf=True, got round_sf=False"
    for col_major in (False, True):
        flags = {"use_tma_aligned_col_major_sf": col_major}
        yield call(name, f"packed, not rounded, {col_major}", unrounded, use_packed_ue8m0=True, **flags)
    yield call(name, "packed e4m3", unrounded, use_packed_ue8m0=True, use_e4m3_sf=True)
    text = "use_e4m3_sf must come without round_sf and use_packed_ue8m0, got use_packed_ue8m0=True"
    yield call(name, "all flags", text, use_packed_ue8m0=True, use_e4m3_sf=True, round_sf=True)


def of_given_sf(name: str, give: Callable[[Any], dict[str, Any]]) -> Iterator[Refusal]:
    """Scale tensors to write into that do not fit; `give` makes the argument that holds one."""
    packed = {"round_sf": True, "use_packed_ue8m0": True}
    for options, reason, needed in (
        ({}, "without packed or e4m3 scales", torch.float32),
        (packed, "with use_packed_ue8m0=True", torch.int32),
        ({"use_e4m3_sf": True}, "with use_e4m3_sf=True", E4M3),
    ):
        for dtype in (torch.float32, torch.int32, E4M3, torch.bfloat16, torch.uint8):
            if dtype != needed:
                text = f"out_sf must be {name_of(needed)} {reason}, got {name_of(dtype)}"
                label = f"out_sf of {name_of(dtype)}, {name_of(needed)} needed"
                yield call(name, label, text, **give(ones(TOKENS, 2, dtype=dtype)), **options)
    for shape in ((TOKENS, 1), (TOKENS, 3), (TOKENS - 1, 2), (TOKENS + 1, 2), (2, TOKENS), (8,), (1, TOKENS, 2)):
        text = rf"out_sf must have shape \({TOKENS}, 2\), got \({', '.join(map(str, shape))},?\)"
        yield call(name, f"out_sf of shape {shape}", text, **give(ones(*shape)))
    text = rf"out_sf must have shape \({TOKENS}, 1\), got \({TOKENS}, 2\)"
    yield call(name, "packed out_sf not packed", text, **give(ones(TOKENS, 2, dtype=torch.int32)), **packed)

    def column_major(device: str) -> torch.Tensor:
        return torch.ones((2, TOKENS), device=device).t()

    text = "use_tma_aligned_col_major_sf must be False where out_sf is given, got True"
    for label, out_sf in (("column-major", column_major), ("row-major", ones(TOKENS, 2))):
        yield call(name, f"out_sf {label} with flag", text, use_tma_aligned_col_major_sf=True, **give(out_sf))
    for value in ([1.0], 1, "sf"):
        label = type(value).__name__
        yield call(name, f"out_sf {label}", f"out_sf must be a tensor, got {label}", **give(value))


def of_given_data(name: str, give: Callable[[Any], dict[str, Any]]) -> Iterator[Refusal]:
    """Data tensors to write into that do not fit."""
    for fmt, needed, width in (("e4m3", E4M3, HIDDEN), ("e2m1", torch.int8, HIDDEN // 2)):
        for dtype in (E4M3, torch.int8, torch.uint8, torch.float32, torch.bfloat16, torch.float8_e5m2):
            if dtype != needed:
                text = f"out must be {name_of(needed)} for this fmt, got {name_of(dtype)}"
                out = give(ones(TOKENS, width, dtype=dtype))
                yield call(name, f"{fmt} out of {name_of(dtype)}", text, fmt=fmt, **out)
    for shape in ((TOKENS, HIDDEN // 2), (TOKENS, HIDDEN + 64), (TOKENS - 1, HIDDEN), (TOKENS + 1, HIDDEN)):
        out = give(ones(*shape, dtype=E4M3))
        yield call(name, f"out of shape {shape}", r"out must have shape .*, got \(\d+, \d+\)", **out)
    out = give(ones(1, TOKENS, HIDDEN, dtype=E4M3))
    yield call(name, "out of rank 3", r"out must have 2 dimensions, got 3.*", **out)

    def rows_of_wider(device: str) -> torch.Tensor:
        return torch.ones((TOKENS, 2 * HIDDEN), device=device).to(E4M3)[:, :HIDDEN]

    yield call(name, "out not dense", r"out must have strides .*, got .*", **give(rows_of_wider))
    for value in ([1.0], 1, "data"):
        label = type(value).__name__
        yield call(name, f"out {label}", f"out must be a tensor, got {label}", **give(value))


def of_pairs() -> Iterator[Refusal]:
    """Quantised inputs of per_token_cast that do not hold together."""
    data, sf = ones(TOKENS, HIDDEN, dtype=E4M3), ones(TOKENS, HIDDEN // 32)
    block = {"x_block_size": (1, 32)}
    needs_pair = r"x_block_size must be a pair \(rows, columns\) where x is a pair \(data, sf\), got .*"
    blocks: tuple[Any, ...] = (None, 32, (32,), (1, 32, 32), "1x32", {})
    for value in blocks:
        yield call(CAST, f"x_block_size {value!r}", needs_pair, x=(data, sf), x_block_size=value)
    for value in ((1.0, 32), (1, 32.0), ("1", "32"), (None, 32)):
        text = r"x_block_size must hold two ints, got .*"
        yield call(CAST, f"x_block_size {value!r}", text, x=(data, sf), x_block_size=value)
    for value in ((0, 32), (1, 0), (-1, 32), (1, -32)):
        text = r"x_block_size must be positive, got .*"
        yield call(CAST, f"x_block_size {value!r}", text, x=(data, sf), x_block_size=value)
    for columns in (1, 8, 15, 17, 24, 40, 100, 127):
        text = rf"x_block_size must have a multiple of 16 columns, or at least the 128 of x, got \(1, {columns}\)"
        label = f"x_block_size of {columns} columns"
        yield call(CAST, label, text, x=(data, ones(TOKENS, -(-HIDDEN // columns))), x_block_size=(1, columns))
    text = r"x_block_size must be None unless x is a pair \(data, sf\), got \(1, 32\)"
    yield call(CAST, "x_block_size for a plain x", text, **block)

    for count in (0, 1, 3):
        text = rf"x must be a tensor or a pair \(data, sf\), got a tuple of {count}"
        yield call(CAST, f"x of {count} tensors", text, x=(data, sf, sf)[:count], **block)
    for value in NOT_TENSORS:
        label = "None" if value is None else type(value).__name__
        yield call(CAST, f"x_sf {label}", f"x_sf must be a tensor, got {label}", x=(data, value), **block)
        yield call(CAST, f"data {label}", f"x must be a tensor, got {label}", x=(value, sf), **block)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.float8_e5m2, torch.int32):
        text = f"x must hold data of float8_e4m3fn or int8, got {name_of(dtype)}"
        yield call(CAST, f"data of {name_of(dtype)}", text, x=(ones(TOKENS, HIDDEN, dtype=dtype), sf), **block)
    for dtype in (torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.float8_e5m2):
        text = f"x_sf must be float32 or int32 or float8_e4m3fn, got {name_of(dtype)}"
        wrong_sf = ones(TOKENS, HIDDEN // 32, dtype=dtype)
        yield call(CAST, f"x_sf of {name_of(dtype)}", text, x=(data, wrong_sf), **block)
    for shape in ((TOKENS, 3), (TOKENS, 5), (TOKENS - 1, 4), (TOKENS + 1, 4), (TOKENS, 1)):
        text = rf"x_sf must have shape \({TOKENS}, 4\) for blocks of 1 x 32, got \({shape[0]}, {shape[1]}\)"
        yield call(CAST, f"x_sf of shape {shape}", text, x=(data, ones(*shape)), **block)
    text = rf"x_sf must have shape \({TOKENS}, 1\) for blocks of 1 x 32, got \({TOKENS}, 4\)"
    packed = ones(TOKENS, 4, dtype=torch.int32)
    yield call(CAST, "x_sf int32 not packed", text, x=(data, packed), **block)
    yield call(CAST, "x_sf of rank 1", "x_sf must have 2 dimensions, got 1", x=(data, ones(16)), **block)
    yield call(CAST, "data of rank 1", "x must have 2 dimensions, got 1", x=(ones(64, dtype=E4M3), sf), **block)

    def spread_sf(device: str) -> torch.Tensor:
        return torch.ones((2 * TOKENS, 8), device=device)[::2, ::2]

    text = r"x_sf must have a stride of 1 in one dimension, got \(16, 2\)"
    yield call(CAST, "x_sf with gaps everywhere", text, x=(data, spread_sf), **block)
    text = "num_per_channels must be one of 16, 32, 64, 128, got 192"
    wide = (ones(TOKENS, 192, dtype=E4M3), ones(TOKENS, 6))
    yield call(CAST, "whole rows of a pair", text, x=wide, num_per_channels=192, **block)
    text = "x must have a multiple of 64 channels, got 32"
    narrow = (ones(TOKENS, 32, dtype=E4M3), ones(TOKENS, 1))
    yield call(CAST, "32 channels of a pair", text, x=narrow, **block)
    odd = (ones(TOKENS, 17, dtype=torch.int8), ones(TOKENS, 2))
    yield call(CAST, "34 channels of a packed pair", "x must have a multiple of 64 channels, got 34", x=odd, **block)


def of_e5m6() -> Iterator[Refusal]:
    for group in (16, 32, 64, 127, 256, 0):
        text = f"num_per_channels must equal the number of channels 128 for fmt 'e5m6', got {group}"
        yield call(CAST, f"e5m6 group {group}", text, fmt="e5m6", num_per_channels=group)
    for hidden in (1, 4, 7, 9, 12, 100):
        text = f"x must have a multiple of 8 channels, got {hidden}"
        yield call(CAST, f"e5m6 {hidden} channels", text, fmt="e5m6", x=ones(4, hidden), num_per_channels=hidden)
    whole = {"fmt": "e5m6", "num_per_channels": HIDDEN}
    yield call(
        CAST, "e5m6 e4m3 scales", "use_e4m3_sf must be False for fmt 'e5m6', got True", use_e4m3_sf=True, **whole
    )
    text = "stochastic_cast must be False for fmt 'e5m6', got True"
    yield call(CAST, "e5m6 stochastic", text, stochastic_cast=True, **whole)
    text = r"x must be a bfloat16 or float32 tensor for fmt 'e5m6', got a pair \(data, sf\)"
    pair = (ones(TOKENS, HIDDEN, dtype=E4M3), ones(TOKENS, 1))
    yield call(CAST, "e5m6 pair", text, x=pair, x_block_size=(1, 128), **whole)


def of_out() -> Iterator[Refusal]:
    values: tuple[Any, ...] = (1, "out", {}, (), (None,), (None, None, None), [None])
    for value in values:
        text = r"out must be a pair \(data, sf\), got .*"
        yield call(CAST, f"out {value!r}", text, out=value)
    yield call(CAST, "out a tensor", r"out must be a pair \(data, sf\), got Tensor", out=ones(2, 2))


def of_precomputed_sf() -> Iterator[Refusal]:
    for value in NOT_TENSORS:
        label = "None" if value is None else type(value).__name__
        yield call(PRECOMPUTED, f"sf {label}", f"sf must be a tensor, got {label}", sf=value)
    for dtype in (torch.int32, torch.bfloat16, torch.float64, torch.uint8, E4M3):
        text = f"sf must be float32 with use_e4m3_sf=False, got {name_of(dtype)}"
        yield call(PRECOMPUTED, f"sf of {name_of(dtype)}", text, sf=ones(TOKENS, 2, dtype=dtype))
    for dtype in (torch.float32, torch.int32, torch.float8_e5m2):
        text = f"sf must be float8_e4m3fn with use_e4m3_sf=True, got {name_of(dtype)}"
        sf = ones(TOKENS, 2, dtype=dtype)
        yield call(PRECOMPUTED, f"sf of {name_of(dtype)}, e4m3 needed", text, sf=sf, use_e4m3_sf=True)
    for shape in ((TOKENS, 1), (TOKENS, 3), (TOKENS - 1, 2), (TOKENS + 1, 2), (2, TOKENS)):
        text = rf"sf must have shape \({TOKENS}, 2\), got \({shape[0]}, {shape[1]}\)"
        yield call(PRECOMPUTED, f"sf of shape {shape}", text, sf=ones(*shape))
    for rank in (0, 1, 3):
        text = rf"sf must have shape \({TOKENS}, 2\), got \(.*\)"
        yield call(PRECOMPUTED, f"sf of rank {rank}", text, sf=ones(*(2,) * rank))

    def column_major(device: str) -> torch.Tensor:
        return torch.ones((2, TOKENS), device=device).t()

    yield call(PRECOMPUTED, "sf column-major", r"sf must have strides .*, got .*", sf=column_major)
    for flag in ("use_tma_aligned_col_major_sf", "use_packed_ue8m0"):
        text = f"{flag} must be False where the scales are given, got True"
        yield call(PRECOMPUTED, flag, text, **{flag: True, "round_sf": True})


REFUSALS = {
    CAST: [
        *of_every_operator(CAST),
        *of_layouts(CAST),
        *of_given_sf(CAST, lambda sf: {"out": (None, sf)}),
        *of_given_data(CAST, lambda data: {"out": (data, None)}),
        *of_pairs(),
        *of_e5m6(),
        *of_out(),
    ],
    SF_ONLY: [*of_every_operator(SF_ONLY), *of_layouts(SF_ONLY), *of_given_sf(SF_ONLY, lambda sf: {"out_sf": sf})],
    PRECOMPUTED: [
        *of_every_operator(PRECOMPUTED),
        *of_given_data(PRECOMPUTED, lambda data: {"out": data}),
        *of_precomputed_sf(),
    ],
}
PARAMETERS = [
    pytest.param(name, refusal, id=f"{name.removeprefix('quant.')}-{refusal.id}")
    for name, refusals in REFUSALS.items()
    for refusal in refusals
]


@pytest.mark.parametrize("name", OPERATORS)
def test_enough_invalid_calls_are_tried(name: str) -> None:
    assert len(REFUSALS[name]) >= 50


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(("name", "refusal"), PARAMETERS)
def test_refused_on_cpu(name: str, refusal: Refusal) -> None:
    refusal.check(name, OPERATORS[name], "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "refusal"), PARAMETERS)
def test_refused_on_gpu(name: str, refusal: Refusal) -> None:
    refusal.check(name, OPERATORS[name], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["data", "sf"])
def test_outputs_on_another_device_are_refused(argument: str) -> None:
    devices = {"data": "cuda", "sf": "cuda", argument: "cpu"}
    out = (ones(TOKENS, HIDDEN, dtype=E4M3)(devices["data"]), ones(TOKENS, 2)(devices["sf"]))
    make = call(CAST, argument, r".*(cpu|CPU).*", out=(lambda device: out[0], lambda device: out[1]))
    make.check(CAST, per_token_cast, "cuda")
