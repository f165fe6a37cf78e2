"""SwiGLU forward: exact against the formula in plain torch, in every routing, clamp and layout."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from tests.quant.cast_cases import assert_same_sf
from tests.quant.sizes import on_devices
from tests.quant.swiglu_cases import GATES, fill_outputs, segments, token_alignment
from tests.refusals import Refusal
from tilekernels.layout import SfLayout
from tilekernels.quant import per_token_cast, swiglu_forward, swiglu_forward_and_per_token_cast
from tilekernels.quant.swiglu_forward import swiglu_forward_and_per_token_cast_ref, swiglu_forward_ref
from tilekernels.testing import assert_equal, check_bias
from tilekernels.testing.generator import generate_rand_float

OPERATOR_FILE = sys.modules[swiglu_forward.__module__]

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", CPU_AND_GPU)
every_input = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

ROW, ROUNDED = {}, {"round_sf": True}
COLUMN = {"use_tma_aligned_col_major_sf": True}
ROW_PACKED = {"round_sf": True, "use_packed_ue8m0": True}
PACKED = {**ROW_PACKED, **COLUMN}
LAYOUTS = [pytest.param(flags, id=SfLayout.from_flags("", **flags).label) for flags in (ROW, ROUNDED, COLUMN, PACKED)]
LAYOUTS.append(pytest.param(ROW_PACKED, id="row_packed"))

# (tokens, hidden): nothing, one row, tiles that do not divide, several tiles a row, shares of rows and whole rows
SIZES = [(0, 128), (1, 128), (3, 640), (70, 1152), (129, 2048)]
LARGE = [(8001, hidden) for hidden in (384, 2048, 3584, 7168)]


def make_x(num_tokens: int, hidden: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn((num_tokens, 2 * hidden), device=device).to(dtype)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", LAYOUTS)
@pytest.mark.parametrize("group", [32, 128])
@on_devices(SIZES, LARGE)
@every_input
def test_cast_is_exact(
    device: str, dtype: torch.dtype, size: tuple[int, int], group: int, flags: dict[str, Any]
) -> None:
    x = make_x(*size, dtype, device)
    data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", group, **flags)
    expected = swiglu_forward_and_per_token_cast_ref(x, "e4m3", group, **flags)
    assert_equal(data, expected[0])
    assert_same_sf(sf, expected[1], SfLayout.from_flags("", **flags), size[1] // group)


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@on_devices([(0, 64), (5, 64), (33, 576), (129, 2048)], LARGE)
@every_input
def test_values_are_exact(device: str, dtype: torch.dtype, size: tuple[int, int], fmt: str) -> None:
    x = make_x(*size, dtype, device)
    assert_equal(swiglu_forward(x, fmt), swiglu_forward_ref(x, fmt))


@pytest.mark.parametrize("group", [32, 128])
@every_device
def test_cast_is_the_cast_of_the_values(device: str, group: int) -> None:
    """Another way to the same bytes: the fp32 result, cast by the operator that only casts."""
    x = make_x(129, 1024, torch.bfloat16, device)
    data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", group)
    expected = per_token_cast(swiglu_forward(x, "fp32"), "e4m3", group)
    assert_equal(data, expected[0])
    assert_equal(sf, expected[1])


@every_device
def test_values_are_close_to_float64(device: str) -> None:
    x = make_x(100, 1024, torch.float32, device)
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate * torch.sigmoid(gate) * up
    # exp, addition, division and multiplication: one unit in the last place each, and a half
    assert torch.all((swiglu_forward(x, "fp32") - expected).abs() <= 4 * 2.0**-23 * expected.abs() + 1e-44)
    check_bias(swiglu_forward(x, "bf16"), expected)


@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@pytest.mark.parametrize("clamp_value", [None, 0.0, 7.0, 90.0])
@every_input
@every_device
def test_extreme_gates(device: str, dtype: torch.dtype, clamp_value: float | None, fmt: str) -> None:
    gates = torch.tensor(GATES, device=device).repeat_interleave(64).repeat(1, 4)
    ups = torch.tensor([1.0, -1.0, 0.0, -0.0, 3e38, 1e-30, 448.0, 1.5], device=device).repeat(1, gates.shape[1] // 8)
    x = torch.cat((gates, ups), dim=1).to(dtype)
    expected = swiglu_forward_ref(x, fmt, clamp_value=clamp_value)
    actual = swiglu_forward(x, fmt, clamp_value=clamp_value)
    is_nan = expected.isnan()
    assert torch.equal(actual.isnan(), is_nan)
    assert_equal(actual.masked_fill(is_nan, 0), expected.masked_fill(is_nan, 0))


@every_device
def test_values_over_the_whole_range(device: str) -> None:
    x = generate_rand_float((40, 1024), device)
    assert_equal(swiglu_forward(x, "fp32"), swiglu_forward_ref(x, "fp32"))


@pytest.mark.gpu
def test_every_bf16_gate() -> None:
    gates = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cuda").view(torch.bfloat16)
    x = torch.cat((gates.view(128, 512), torch.ones(128, 512, device="cuda", dtype=torch.bfloat16)), dim=1)
    expected, actual = swiglu_forward_ref(x, "fp32"), swiglu_forward(x, "fp32")
    is_nan = expected.isnan()
    assert torch.equal(actual.isnan(), is_nan)
    assert_equal(actual.masked_fill(is_nan, 0), expected.masked_fill(is_nan, 0))


@pytest.mark.gpu
def test_every_fp32_gate() -> None:
    """All 2^32: the division is written out, for numbers that need no care."""
    rows, hidden = 8192, 4096
    x = torch.ones(rows, 2 * hidden, device="cuda")
    for first in range(-(2**31), 2**31, rows * hidden):
        bits = torch.arange(first, first + rows * hidden, dtype=torch.int64, device="cuda").to(torch.int32)
        gates = bits.view(torch.float32).view(rows, hidden)
        x[:, :hidden] = gates
        expected, actual = gates / (1 + torch.exp(-gates)), swiglu_forward(x, "fp32")
        differ = (expected.view(torch.int32) != actual.view(torch.int32)) & ~(expected.isnan() & actual.isnan())
        assert not differ.any(), gates[differ][:5].tolist()


# ---- weights, segments, clamps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("clamp_value", [None, 0.5, 10.0])
@every_input
@every_device
def test_weights_and_clamp(device: str, dtype: torch.dtype, clamp_value: float | None, scaling: float | None) -> None:
    x = make_x(70, 384, dtype, device)
    options = {"topk_weights": torch.randn(70, device=device), "routed_scaling_factor": scaling}
    options |= {"clamp_value": clamp_value}
    assert_equal(swiglu_forward(x, "fp32", **options), swiglu_forward_ref(x, "fp32", **options))
    data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", 128, **options)
    expected = swiglu_forward_and_per_token_cast_ref(x, "e4m3", 128, **options)
    assert_equal(data, expected[0])
    assert_equal(sf, expected[1])


@pytest.mark.parametrize("alignment", [1, 8, 128, 100])
@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [0, 0], [7] * 70, [0, 300]], ids=["few", "none", "many", "one"])
@every_input
@every_device
def test_rows_of_no_expert_are_left_alone(
    device: str, dtype: torch.dtype, counts: list[int], alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    psum, valid = segments(counts, alignment, device)
    valid = torch.nn.functional.pad(valid, (0, 3))  # behind the last segment
    num_rows = valid.numel()
    x = make_x(num_rows, 128, dtype, device)
    x[~valid] = float("nan")
    options: dict[str, Any] = {"psum_num_tokens_per_expert": psum, "topk_weights": torch.rand(num_rows, device=device)}
    count = torch.tensor([1, 10, 100, 1000], device=device)
    expected_count = count.clone()
    fill_outputs(monkeypatch, OPERATOR_FILE, "_swiglu_forward", "_swiglu_forward_and_per_token_cast")
    with token_alignment(alignment):
        out = swiglu_forward(x, "bf16", **options, clamp_value=0.5, clamped_count=count)
        expected = swiglu_forward_ref(x, "bf16", **options, clamp_value=0.5, clamped_count=expected_count)
        data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", 32, **options)
        expected_data, expected_sf = swiglu_forward_and_per_token_cast_ref(x, "e4m3", 32, **options)
    assert_equal(count, expected_count)
    assert count[3] == 1000 + int(valid.sum()) * 128
    assert_equal(out[valid], expected[valid])
    assert torch.all(out[~valid].contiguous().view(torch.uint8) == 0x5A)
    assert_equal(data.view(torch.uint8)[valid], expected_data.view(torch.uint8)[valid])
    assert torch.all(data.view(torch.uint8)[~valid] == 0x5A)
    assert_equal(sf[valid], expected_sf[valid])


@pytest.mark.parametrize("clamp_value", [0.0, 0.5, 0.3, 10.0, float("inf")])
@on_devices([(0, 64), (1, 64), (50, 576), (300, 2048)], LARGE)
@every_input
def test_counts_are_exact(device: str, dtype: torch.dtype, size: tuple[int, int], clamp_value: float) -> None:
    x = make_x(*size, dtype, device)
    gate, up = x.double().chunk(2, dim=-1)
    limit = float(torch.tensor(clamp_value))  # in fp32
    expected = [(gate > limit).sum(), (up > limit).sum(), (up < -limit).sum(), gate.numel()]
    count = torch.zeros(4, dtype=torch.int64, device=device)
    out = swiglu_forward(x, "bf16", clamp_value=clamp_value, clamped_count=count)
    assert count.tolist() == [int(each) for each in expected]
    assert_equal(out, swiglu_forward_ref(x, "bf16", clamp_value=clamp_value))
    if size[1] % 128 == 0:
        swiglu_forward_and_per_token_cast(x, "e4m3", 128, clamp_value=clamp_value, clamped_count=count)
        assert count.tolist() == [2 * int(each) for each in expected]


# ---- memory ----------------------------------------------------------------------------------------------------------


@every_input
@every_device
def test_strided_and_unaligned_rows(device: str, dtype: torch.dtype) -> None:
    wide = torch.randn((40, 2 * 640 + 9), device=device).to(dtype)
    for x in (wide[:, 1:1281], wide[:, :1280], wide[::2, 3:1283]):
        dense = x.contiguous()
        assert_equal(swiglu_forward(x, "bf16"), swiglu_forward(dense, "bf16"))
        for actual, expected in zip(
            swiglu_forward_and_per_token_cast(x, "e4m3", 32),
            swiglu_forward_and_per_token_cast(dense, "e4m3", 32),
            strict=True,
        ):
            assert_equal(actual, expected)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    num_tokens, hidden = 2**31 // 4096 + 5, 4096
    x = torch.empty((num_tokens, 2 * hidden), dtype=torch.bfloat16, device="cuda").normal_()
    data, sf = swiglu_forward_and_per_token_cast(x, "e4m3", 128)
    for rows in (slice(0, 100), slice(-100, None)):
        expected = swiglu_forward_and_per_token_cast_ref(x[rows], "e4m3", 128)
        assert_equal(data[rows], expected[0])
        assert_equal(sf[rows], expected[1])


# ---- refused ---------------------------------------------------------------------------------------------------------


def refusal(id: str, text: str, **changes: Any) -> Refusal:
    def make(device: str) -> dict[str, Any]:
        kwargs: dict[str, Any] = {"x": torch.zeros((4, 256), dtype=torch.bfloat16, device=device), "fmt": "e4m3"}
        kwargs["num_per_channels"] = 128
        made = {name: value(device) if callable(value) else value for name, value in changes.items()}
        return {**kwargs, **made}

    return Refusal(id, make, text)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


REFUSALS = [
    refusal("fmt", r"fmt must be 'e4m3', got 'e2m1'", fmt="e2m1"),
    refusal("group", r"num_per_channels must be 32 or 128, got 64", num_per_channels=64),
    refusal("hidden", r"x must have a multiple of 256 columns, got 192", x=zeros(4, 192, dtype=torch.bfloat16)),
    refusal("rank", r"x must have 2 dimensions, got 3", x=zeros(4, 2, 256)),
    refusal("no tensor", r"x must be a tensor, got int", x=lambda device: 5),
    refusal("packed", r"use_packed_ue8m0 must come with round_sf=True, got round_sf=False", use_packed_ue8m0=True),
    refusal("scaling", r"routed_scaling_factor must be None where topk_weights is None, got 2\.0",
            routed_scaling_factor=2.0),
    refusal("weights", r"topk_weights must have shape \(4,\), got \(5,\)", topk_weights=zeros(5)),
    refusal("clamp", r"clamp_value must be at least 0, got -1\.0", clamp_value=-1.0),
    refusal("nan", r"clamp_value must be at least 0, got nan", clamp_value=float("nan")),
    refusal("clamp type", r"clamp_value must be a number, got str", clamp_value="1"),
    refusal("count", r"clamped_count must be None where clamp_value is None, got a tensor",
            clamped_count=zeros(4, dtype=torch.int64)),
    refusal("counts", r"clamped_count must have shape \(4,\), got \(3,\)", clamp_value=1.0,
            clamped_count=zeros(3, dtype=torch.int64)),
]  # fmt: skip
BUILT_REFUSALS = [
    refusal("dtype", r"x must be bfloat16 or float32, got float16", x=zeros(4, 256, dtype=torch.float16)),
    refusal("psum", r"psum_num_tokens_per_expert must be int32, got int64",
            psum_num_tokens_per_expert=zeros(3, dtype=torch.int64)),
    refusal("count dtype", r"clamped_count must be int64, got int32", clamp_value=1.0,
            clamped_count=zeros(4, dtype=torch.int32)),
]  # fmt: skip


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda refused: refused.id)
@every_device
def test_invalid_calls(device: str, refused: Refusal) -> None:
    refused.check("quant.swiglu_forward_and_per_token_cast", swiglu_forward_and_per_token_cast, device)


@pytest.mark.parametrize("refused", BUILT_REFUSALS, ids=lambda refused: refused.id)
@every_device
def test_invalid_tensors(device: str, refused: Refusal, needs_extension: None) -> None:
    refused.check("quant.swiglu_forward_and_per_token_cast", swiglu_forward_and_per_token_cast, device)


def test_values_have_their_own_formats() -> None:
    with pytest.raises(ValueError, match=r"quant\.swiglu_forward: fmt must be 'bf16' or 'fp32', got 'e4m3'"):
        swiglu_forward(torch.zeros(2, 128), "e4m3")
