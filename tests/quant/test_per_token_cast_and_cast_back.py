"""per_token_cast_and_cast_back: exactly the two casts one after the other, in place, and nothing beside it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.quant.cast_cases import HIDDEN, SIZES, VALUES, Input
from tests.refusals import Refusal
from tilekernels import config
from tilekernels.quant import cast_back, per_token_cast, per_token_cast_and_cast_back
from tilekernels.quant.per_token_cast_and_cast_back import per_token_cast_and_cast_back_ref
from tilekernels.testing import assert_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAME = "quant.per_token_cast_and_cast_back"
SCALES = ({}, {"round_sf": True}, {"use_e4m3_sf": True})


def random_calls(count: int, seed: int) -> Iterator[tuple[Input, str, int, dict[str, bool]]]:
    choose = random.Random(seed)
    for _ in range(count):
        hidden = choose.choice(HIDDEN)
        num_tokens = choose.choice(SIZES if hidden <= 2112 else SIZES[:12])
        gap, offset = choose.choice((0, 0, 0, 1, 8, 64)), choose.choice((0, 0, 0, 1, 8))
        source = Input(choose.choice(("bf16", "fp32")), num_tokens, hidden, choose.choice(VALUES), gap, offset)
        group = choose.choice([each for each in (16, 32, 64, 128) if hidden % each == 0])
        yield source, choose.choice(("e4m3", "e2m1")), group, choose.choice(SCALES)


CALLS = [
    pytest.param(*call, id=f"{at:03}-{call[0].id}-{call[1]}-{call[2]}-{'-'.join(call[3]) or 'plain'}")
    for at, call in enumerate(random_calls(200, seed=14))
]


def check(source: Input, fmt: str, group: int, flags: dict[str, bool], device: str) -> None:
    x = source.make(device)
    beside = torch.empty(0, dtype=x.dtype, device=device).set_(x.untyped_storage()).clone()
    expected = cast_back(
        per_token_cast(x, fmt, group, **flags), "fp32" if source.kind == "fp32" else "bf16", (1, group)
    )
    by_reference = x.clone()
    per_token_cast_and_cast_back_ref(by_reference, fmt, group, **flags)
    per_token_cast_and_cast_back(x, fmt, group, **flags)
    assert_equal(x, expected, check_stride=False)
    assert_equal(by_reference, expected, check_stride=False)
    # Put back what was there: the memory between and around the rows has to be what it was
    view = beside.as_strided(x.shape, x.stride(), x.storage_offset())
    view.copy_(x)
    assert_equal(torch.empty(0, dtype=x.dtype, device=device).set_(x.untyped_storage()), beside)


@pytest.mark.parametrize(("source", "fmt", "group", "flags"), CALLS[::5])
def test_on_cpu(source: Input, fmt: str, group: int, flags: dict[str, bool]) -> None:
    check(source, fmt, group, flags, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("source", "fmt", "group", "flags"), CALLS)
def test_on_gpu(source: Input, fmt: str, group: int, flags: dict[str, bool]) -> None:
    check(source, fmt, group, flags, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("flags", SCALES, ids=lambda flags: "-".join(flags) or "plain")
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden", [2048, 3072, 7168])
def test_large_matrices(hidden: int, dtype: torch.dtype, fmt: str, flags: dict[str, bool]) -> None:
    x = torch.randn((4001, hidden), device="cuda").to(dtype)
    out = "fp32" if dtype == torch.float32 else "bf16"
    for group in (16, 32, 64, 128):
        expected = cast_back(per_token_cast(x, fmt, group, **flags), out, (1, group))
        rounded = x.clone()
        per_token_cast_and_cast_back(rounded, fmt, group, **flags)
        assert_equal(rounded, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_every_bf16_value(device: str) -> None:
    """Each finite bf16 number beside zeros and the format's largest number, so that scales are one."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for fmt, largest in (("e4m3", 448.0), ("e2m1", 6.0)):
        values = torch.where(bits.float().abs() <= largest, bits, 0)
        x = torch.zeros((65536, 64), dtype=torch.bfloat16)
        x[:, 0], x[:, 1] = values, largest
        x = x.to(device)
        expected = cast_back(per_token_cast(x, fmt, 64), "bf16", (1, 64))
        per_token_cast_and_cast_back(x, fmt, 64)
        assert_equal(x, expected)
        assert (x[:, 1] == largest).all()


@pytest.mark.parametrize("device", DEVICES)
def test_clamp_is_read_at_call_time(device: str) -> None:
    x = torch.full((3, 64), 0.25, device=device)
    try:
        config.set_amax_clamp_for_quant("e2m1", False, 12.0)  # scales are two, steps one
        per_token_cast_and_cast_back(x, "e2m1", 64)
    finally:
        config.reset_runtime_config()
    assert x.unique().tolist() == [0.0]


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    hidden = 7168
    num_tokens = 2**31 // hidden + 1001
    if 6 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = torch.randn((num_tokens, hidden), device="cuda", dtype=torch.bfloat16)
    parts = [slice(start, start + 4000) for start in (0, num_tokens // 2, num_tokens - 4000)]
    expected = [cast_back(per_token_cast(x[part], "e2m1", 32), "bf16", (1, 32)) for part in parts]
    per_token_cast_and_cast_back(x, "e2m1", 32)
    for part, rows in zip(parts, expected, strict=True):
        assert_equal(x[part], rows)


# ---- refusals --------------------------------------------------------------------------------------------------------


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.ones(shape, dtype=dtype, device=device)


def call(label: str, text: str, **changes: Any) -> Refusal:
    def make(device: str) -> dict[str, Any]:
        kwargs = {"x": torch.ones((4, 192), device=device), "fmt": "e4m3", "num_per_channels": 64, **changes}
        make_x: Callable[[str], torch.Tensor] | Any = kwargs["x"]
        return {**kwargs, "x": make_x(device) if callable(make_x) else make_x}

    return Refusal(label, make, text)


REFUSALS = [
    call("x None", "x must be a tensor, got None", x=None),
    call("x a pair", "x must be a tensor, got tuple", x=(1, 2)),
    call("x of fp16", "x must be bfloat16 or float32, got float16", x=ones(4, 64, dtype=torch.float16)),
    call("x of rank 1", "x must have 2 dimensions, got 1.*", x=ones(64)),
    call("100 channels", "x must have a multiple of 64 channels, got 100", x=ones(4, 100)),
    call("x transposed", r"x must have strides .*, got .*", x=lambda device: torch.ones((64, 4), device=device).t()),
    call("group 128 of 192", "num_per_channels must divide the 192 channels of x, got 128", num_per_channels=128),
    *(
        call(f"group {group}", f"num_per_channels must be one of 16, 32, 64, 128, got {group}", num_per_channels=group)
        for group in (0, 8, 192, -16)
    ),
    call("group a float", "num_per_channels must be an int, got float", num_per_channels=64.0),
    *(
        call(f"fmt {fmt}", rf"fmt must be one of 'e4m3', 'e2m1', got {re.escape(repr(fmt))}", fmt=fmt)
        for fmt in ("e5m6", None, "bf16")
    ),
    call(
        "both flags",
        "use_e4m3_sf must come without round_sf and use_packed_ue8m0, got round_sf=True",
        round_sf=True,
        use_e4m3_sf=True,
    ),
]  # fmt: skip


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused(refusal: Refusal, device: str) -> None:
    refusal.check(NAME, per_token_cast_and_cast_back, device)
