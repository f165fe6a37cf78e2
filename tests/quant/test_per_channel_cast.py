"""per_channel_cast and per_channel_cast_fused: bit-exact against the references and against formulas of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.quant.cast_cases import COL_PACKED, LAYOUTS
from tests.quant.channel_cases import Case, at_powers_of_two, every_bf16, random_casts
from tests.refusals import Refusal
from tilekernels import config
from tilekernels.quant import per_channel_cast, per_channel_cast_fused, per_token_cast
from tilekernels.quant._channels import CAST, FUSED
from tilekernels.quant._reference import cast_back_ref
from tilekernels.quant.per_channel_cast import per_channel_cast_fused_ref, per_channel_cast_ref
from tilekernels.testing import assert_equal, check_bias

E4M3 = torch.float8_e4m3fn
OPERATORS = {CAST: per_channel_cast, FUSED: per_channel_cast_fused}
REFERENCES = {CAST: per_channel_cast_ref, FUSED: per_channel_cast_fused_ref}
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def check(operator: str, case: Case, device: str) -> None:
    kwargs = case.kwargs(device)
    for actual, expected in zip(OPERATORS[operator](**kwargs), REFERENCES[operator](**kwargs), strict=True):
        assert_equal(actual, expected)


def parameters(cases: Any) -> list[Any]:
    return [pytest.param(case, id=f"{at:03}-{case.id}") for at, case in enumerate(cases)]


CASTS = parameters(random_casts(240, seed=1))
FUSED_CASTS = parameters(random_casts(240, seed=2, fused=True))


@pytest.mark.parametrize("case", CASTS[::6])
def test_cast_on_cpu(case: Case) -> None:
    check(CAST, case, "cpu")


@pytest.mark.parametrize("case", FUSED_CASTS[::6])
def test_fused_cast_on_cpu(case: Case) -> None:
    check(FUSED, case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASTS)
def test_cast_on_gpu(case: Case) -> None:
    check(CAST, case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", FUSED_CASTS)
def test_fused_cast_on_gpu(case: Case) -> None:
    check(FUSED, case, "cuda")


# ---- independent formulations ----------------------------------------------------------------------------------------


def define(x: np.ndarray, num_per_tokens: int, round_sf: bool) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, scales) in numpy, block by block; powers of two by frexp of the exact quotient."""
    num_tokens, hidden = x.shape
    data = np.zeros((num_tokens, hidden), dtype=np.uint8)
    scales = []
    for start in range(0, num_tokens, num_per_tokens):
        block = x[start : start + num_per_tokens]
        most = np.maximum(np.abs(block).max(axis=0), np.float32(1e-4))
        scale, inverse = most / np.float32(448), np.float32(448) / most
        if round_sf:
            # The quotient in fp64 may round, but not across a power of two: 448 has three bits.
            mantissa, exponent = np.frexp(most.astype(np.float64) / 448)
            exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
            scale, inverse = np.ldexp(1.0, exponent).astype(np.float32), np.ldexp(1.0, -exponent).astype(np.float32)
        scaled = np.clip(block * inverse, -448, 448)
        data[start : start + num_per_tokens] = scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
        scales.append(scale)
    return data, np.array(scales, dtype=np.float32).reshape(len(scales), hidden)


SPECIAL = {
    "every bf16": lambda: every_bf16().float(),
    "powers of two": at_powers_of_two,
    "zeros": lambda: torch.where(torch.randn(200, 128) > 0, 0.0, -0.0),
    "one ulp above the clamp": lambda: torch.full((128, 64), 1e-4).view(torch.int32).add(1).view(torch.float32),
    "ties": lambda: torch.cat((torch.full((1, 448), 448.0), torch.arange(448 * 127).view(127, 448) % 897 / 2.0)),
}


@on_every_device
@pytest.mark.parametrize("round_sf", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("num_per_tokens", [32, 128])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("name", SPECIAL)
def test_equals_the_definition(name: str, kind: str, num_per_tokens: int, round_sf: bool, device: str) -> None:
    x = SPECIAL[name]()
    if kind == "bf16":
        x = x.bfloat16()
    data, sf = per_channel_cast(x.to(device), "e4m3", num_per_tokens, round_sf)
    expected_data, expected_sf = define(x.float().numpy(), num_per_tokens, round_sf)
    assert_equal(data.cpu().view(torch.uint8), torch.from_numpy(expected_data))
    assert_equal(sf.cpu(), torch.from_numpy(expected_sf))


@on_every_device
@pytest.mark.parametrize("num_per_tokens", [32, 128])
def test_packed_words_hold_four_blocks_of_a_channel(num_per_tokens: int, device: str) -> None:
    x = torch.randn((700, 128), device=device) * torch.exp2(torch.randint(-9, 9, (700, 1), device=device).float())
    _, sf = per_channel_cast(x, "e4m3", num_per_tokens, True)
    data, packed = per_channel_cast(x, "e4m3", num_per_tokens, True, use_packed_ue8m0=True)
    num_blocks = sf.shape[0]
    assert packed.shape == (-(-num_blocks // 4), 128)
    exponents = packed.cpu().numpy().view(np.uint8).reshape(-1, 128, 4).transpose(0, 2, 1).reshape(-1, 128)
    assert_equal(torch.from_numpy(exponents[:num_blocks].astype(np.int32) << 23), sf.cpu().view(torch.int32))
    assert not exponents[num_blocks:].any()
    assert_equal(data, per_channel_cast(x, "e4m3", num_per_tokens, True)[0])


@on_every_device
@pytest.mark.parametrize("round_sf", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_pair_is_dequantised_and_cast(layout: Any, round_sf: bool, device: str) -> None:
    """Of fp32 data * sf, rounded once, the plain cast gives the same."""
    kwargs = Case("e4m3", 300, 320, 32, "faint", round_sf, group=32, sf_layout=layout).kwargs(device)
    values = cast_back_ref(kwargs["x"], "fp32", (1, 32))
    for actual, expected in zip(
        per_channel_cast(**kwargs), per_channel_cast(values, "e4m3", 32, round_sf), strict=True
    ):
        assert_equal(actual, expected)


@on_every_device
@pytest.mark.parametrize("kind", ["bf16", "fp32", "e4m3"])
def test_mapping_picks_rows(kind: str, device: str) -> None:
    kwargs = Case(kind, 70, 192, sf_layout=COL_PACKED, num_positions=400).kwargs(device)
    positions = kwargs.pop("pos_to_token")
    rows = torch.where((positions >= 0) & (positions < 70), positions, 70).long()
    x = kwargs.pop("x")
    plain = cast_back_ref(x, "fp32", (1, 128)) if kind == "e4m3" else x.float()
    picked = torch.nn.functional.pad(plain, (0, 0, 0, 1))[rows]
    kwargs.pop("num_per_channels", None)
    actual = per_channel_cast_fused(
        x, **kwargs, pos_to_token=positions, num_per_channels=128 if kind == "e4m3" else None
    )
    for got, expected in zip(actual, per_channel_cast(picked, **kwargs), strict=True):
        assert_equal(got, expected)


@on_every_device
def test_rows_of_other_blocks_do_not_count(device: str) -> None:
    """The last block of 16 rows is not touched by row 0, whose values are large."""
    x = torch.ones((16, 64), device=device, dtype=torch.bfloat16)
    x[0] = 1000.0
    positions = torch.arange(1, 9, device=device, dtype=torch.int32).repeat(18)
    _, sf = per_channel_cast_fused(x, "e4m3", 128, True, pos_to_token=positions)
    assert_equal(sf, torch.full((2, 64), 2.0**-8, device=device))


@on_every_device
def test_cast_and_back_is_unbiased(device: str) -> None:
    x = torch.randn((512, 576), device=device) * 10
    check_bias(cast_back_ref(per_channel_cast(x, "e4m3", 128), "fp32", (128, 1)), x)


@on_every_device
@pytest.mark.parametrize("operator", OPERATORS)
def test_amax_clamp_is_read_at_call_time(operator: str, device: str) -> None:
    x = torch.full((3, 64), 0.25, device=device)
    try:
        config.set_amax_clamp_for_quant("e4m3", False, 896.0)
        data, sf = OPERATORS[operator](x, "e4m3", 32)
    finally:
        config.reset_runtime_config()
    assert sf.unique().tolist() == [2.0]
    assert data.float().unique().tolist() == [0.125]


@on_every_device
def test_pair_from_per_token_cast(device: str) -> None:
    x = torch.randn((256, 256), device=device).bfloat16()
    options = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    pair = per_token_cast(x, "e4m3", 128, **options)
    for actual, expected in zip(
        per_channel_cast(pair, "e4m3", 128, True, 128), per_channel_cast_ref(pair, "e4m3", 128, True, 128), strict=True
    ):
        assert_equal(actual, expected)


# ---- on a GPU only ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("round_sf", [False, True], ids=["exact", "rounded"])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "e4m3"])
@pytest.mark.parametrize("hidden", [576, 2048, 2560, 3072, 4096, 6144, 7168, 128, 384])
def test_published_sizes(hidden: int, kind: str, round_sf: bool) -> None:
    for num_tokens in (4096, 8064):
        for num_per_tokens in (32, 128):
            check(CAST, Case(kind, num_tokens, hidden, num_per_tokens, round_sf=round_sf), "cuda")
    check(FUSED, Case(kind, 4001, hidden, 128, round_sf=round_sf, num_positions=8192), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_more_than_two_to_the_31_elements(kind: str) -> None:
    hidden = 7168
    num_tokens = (2**31 // hidden + 1001) // 128 * 128
    if 6 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x: Any = torch.randn((num_tokens, hidden), device="cuda", dtype=torch.bfloat16)
    if kind == "e4m3":
        x = per_token_cast(x, "e4m3", 128)
    group = 128 if kind == "e4m3" else None
    positions = torch.arange(num_tokens - 1, -1, -1, device="cuda", dtype=torch.int32)
    data, sf = per_channel_cast(x, "e4m3", 128, num_per_channels=group)
    picked_data, picked_sf = per_channel_cast_fused(x, "e4m3", 128, num_per_channels=group, pos_to_token=positions)
    for start in (0, num_tokens // 256 * 128, num_tokens - 1024):  # beginning, middle and beyond the boundary
        rows = slice(start, start + 1024)
        part = (x[0][rows], x[1][rows]) if isinstance(x, tuple) else x[rows]
        expected = per_channel_cast_ref(part, "e4m3", 128, num_per_channels=group)
        assert_equal(data[rows], expected[0])
        assert_equal(sf[start // 128 : start // 128 + 8], expected[1])
        last = num_tokens - start
        assert_equal(picked_data[last - 1024 : last].flip(0).view(torch.uint8), expected[0].view(torch.uint8))
        assert_equal(picked_sf[last // 128 - 8 : last // 128].flip(0), expected[1])


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_cpu_and_gpu_agree(operator: str) -> None:
    for case in (parameter.values[0] for parameter in (CASTS if operator == CAST else FUSED_CASTS)[::15]):
        kwargs = case.kwargs("cpu")
        on_gpu = {name: move(value) for name, value in kwargs.items()}
        for actual, expected in zip(OPERATORS[operator](**on_gpu), OPERATORS[operator](**kwargs), strict=True):
            assert_equal(actual.cpu(), expected)


def move(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return tuple(move(each) for each in value) if isinstance(value, tuple) else value


# ---- refusals --------------------------------------------------------------------------------------------------------


def call(label: str, text: str, **changes: Any) -> Refusal:
    """The valid default call with some arguments changed; a function among them makes its value on the device."""

    def make(device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"x": ones(4, 128), "fmt": "e4m3", "num_per_tokens": 128, **changes}
        return {name: build(value, device) for name, value in kwargs.items()}

    return Refusal(label, make, text)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return lambda device: torch.ones(shape, device=device).to(dtype)


def build(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(build(each, device) for each in value)
    return value(device) if callable(value) and not isinstance(value, type) else value


def refusals_of_both() -> Iterator[Refusal]:
    for value in (None, [[1.0]], 1, "x"):
        label = "None" if value is None else type(value).__name__
        yield call(f"x {label}", f"x must be a tensor, got {label}", x=value)
    for dtype in (torch.float16, torch.float64, torch.int32, torch.uint8, torch.int8, E4M3, torch.float8_e5m2):
        name = str(dtype).removeprefix("torch.")
        yield call(f"x of {name}", f"x must be bfloat16 or float32, got {name}", x=ones(4, 128, dtype=dtype))
    for rank in (0, 1, 3):
        yield call(f"x of rank {rank}", f"x must have 2 dimensions, got {rank}.*", x=ones(*(64,) * rank))
    for hidden in (1, 32, 63, 100):
        yield call(f"{hidden} channels", f"x must have a multiple of 64 channels, got {hidden}", x=ones(4, hidden))
    for label, view in (
        ("transposed", lambda device: torch.ones((128, 4), device=device).t()),
        ("every second column", lambda device: torch.ones((4, 256), device=device)[:, ::2]),
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

    pair = (ones(4, 128, dtype=E4M3), ones(4, 1))
    text = "num_per_channels must be None unless x is a pair .*, got 128"
    yield call("group of a plain x", text, num_per_channels=128)
    yield call("no group", "num_per_channels must be 32 or 128 where x is a pair .*, got None", x=pair)
    yield call("group 64", "num_per_channels must be 32 or 128, got 64", x=pair, num_per_channels=64)
    yield call("group 32.0", "num_per_channels must be an int, got float", x=pair, num_per_channels=32.0)
    text = r"x_sf must have shape \(4, 4\) for groups of 32 channels, got \(4, 1\)"
    yield call("scales of another group", text, x=pair, num_per_channels=32)
    for dtype in (torch.int8, torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        wrong = (ones(4, 128, dtype=dtype), pair[1])
        yield call(f"data of {name}", f"x must hold data of float8_e4m3fn, got {name}", x=wrong, num_per_channels=128)
    for dtype in (torch.bfloat16, torch.uint8, torch.int64):
        name = str(dtype).removeprefix("torch.")
        text = f"x_sf must be float32 or int32 or float8_e4m3fn, got {name}"
        yield call(f"scales of {name}", text, x=(pair[0], ones(4, 1, dtype=dtype)), num_per_channels=128)
    for count in (0, 1, 3):
        text = rf"x must be a tensor or a pair \(data, sf\), got a tuple of {count}"
        yield call(f"x of {count} tensors", text, x=(*pair, pair[1])[:count], num_per_channels=128)


def refusals_of_mappings() -> Iterator[Refusal]:
    for dtype in (torch.int64, torch.float32, torch.uint8):
        name = str(dtype).removeprefix("torch.")
        text = f"pos_to_token must be int32, got {name}"
        yield call(f"mapping of {name}", text, pos_to_token=ones(16, dtype=dtype))
    text = "pos_to_token must have 1 dimension.*, got 2.*"
    yield call("mapping of rank 2", text, pos_to_token=ones(4, 4, dtype=torch.int32))
    text = "pos_to_token must have strides .*, got .*"
    every_second = lambda device: torch.zeros(32, dtype=torch.int32, device=device)[::2]  # noqa: E731
    yield call("mapping strided", text, pos_to_token=every_second)
    yield call("mapping a list", "pos_to_token must be a .*tensor.*, got list", pos_to_token=[1, 2])


UNROUNDED = call("packed", "use_packed_ue8m0 must come with round_sf=True, got round_sf=False", use_packed_ue8m0=True)
PACKED_1 = call("packed 1", "use_packed_ue8m0 must be a bool, got int", use_packed_ue8m0=1, round_sf=True)
REFUSALS = {
    CAST: [*refusals_of_both(), UNROUNDED, PACKED_1],
    FUSED: [*refusals_of_both(), *refusals_of_mappings()],
}
REFUSED = [
    pytest.param(name, refusal, id=f"{name.removeprefix('quant.')}-{refusal.id}")
    for name, refusals in REFUSALS.items()
    for refusal in refusals
]


@pytest.mark.usefixtures("needs_extension")
@on_every_device
@pytest.mark.parametrize(("name", "refusal"), REFUSED)
def test_refused(name: str, refusal: Refusal, device: str) -> None:
    refusal.check(name, OPERATORS[name], device)
