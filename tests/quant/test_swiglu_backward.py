"""SwiGLU backward: exact against the formula in plain torch but for the row sums, in every routing and layout."""

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
from tilekernels.quant import swiglu_backward, swiglu_backward_and_per_token_cast, swiglu_forward
from tilekernels.quant._reference import cast_ref
from tilekernels.quant.swiglu_backward import swiglu_backward_and_per_token_cast_ref, swiglu_backward_ref
from tilekernels.testing import assert_equal

OPERATOR_FILE = sys.modules[swiglu_backward.__module__]
CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", CPU_AND_GPU)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

COLUMN = {"use_tma_aligned_col_major_sf": True}
ROW_PACKED = {"round_sf": True, "use_packed_ue8m0": True}
FLAGS = ({}, {"round_sf": True}, COLUMN, ROW_PACKED, {**ROW_PACKED, **COLUMN})
LAYOUTS = [pytest.param(flags, id=SfLayout.from_flags("", **flags).label) for flags in FLAGS]

SIZES = [(0, 128), (1, 128), (3, 640), (20, 1152)]
LARGE = [(2001, hidden) for hidden in (384, 2048, 3584, 7168)]

# The sum over a row of fp32 products, in another order: relative to the sum of their magnitudes
SUM_TOLERANCE = 2.0**-20


def make_pair(num_tokens: int, hidden: int, group: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return cast_ref(torch.randn((num_tokens, 2 * hidden), device=device), "e4m3", (1, group))


def assert_close_sums(
    actual: torch.Tensor,
    expected: torch.Tensor,
    x: torch.Tensor,
    grad: torch.Tensor,
    limit: float | None,
    scaling: float,
) -> None:
    act = swiglu_forward(x, "fp32", clamp_value=limit)
    bound = SUM_TOLERANCE * (grad.float() * act).abs().sum(dim=1) * abs(scaling)
    assert actual.dtype == torch.float32
    assert torch.all((actual - expected).abs() <= bound)


def dequantise(x: tuple[torch.Tensor, torch.Tensor], group: int) -> torch.Tensor:
    return x[0].float() * x[1].repeat_interleave(group, dim=1)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", LAYOUTS)
@pytest.mark.parametrize("group", [32, 128])
@on_devices(SIZES, LARGE)
@every_dtype
def test_cast_is_exact(
    device: str, dtype: torch.dtype, size: tuple[int, int], group: int, flags: dict[str, Any]
) -> None:
    x, grad = make_pair(*size, group, device), torch.randn(size, device=device).to(dtype)
    arguments = {"topk_weights": torch.randn(size[0], device=device), "do_recompute": True, "clamp_value": 1.0, **flags}
    actual = swiglu_backward_and_per_token_cast(x, grad, "e4m3", group, **arguments)
    expected = swiglu_backward_and_per_token_cast_ref(x, grad, "e4m3", group, **arguments)
    assert_equal(actual[0], expected[0])
    assert_equal(actual[1][0], expected[1][0])
    assert_same_sf(actual[1][1], expected[1][1], SfLayout.from_flags("", **flags), 2 * size[1] // group)
    assert_close_sums(actual[2], expected[2], dequantise(x, group), grad, 1.0, 1.0)
    assert_equal(actual[3], expected[3])


@pytest.mark.parametrize("scaling", [None, 2.5])
@pytest.mark.parametrize("clamp_value", [None, 0.5])
@pytest.mark.parametrize("fmt", ["bf16", "fp32"])
@on_devices([(0, 64), (5, 64), (33, 576)], LARGE)
@every_dtype
def test_values_are_exact(
    device: str, dtype: torch.dtype, size: tuple[int, int], fmt: str, clamp_value: float | None, scaling: float | None
) -> None:
    x = torch.randn((size[0], 2 * size[1]), device=device).to(dtype)
    grad = torch.randn(size, device=device).to(dtype)
    weights = torch.randn(size[0], device=device)
    arguments: dict[str, Any] = {"topk_weights": weights, "routed_scaling_factor": scaling, "clamp_value": clamp_value}
    actual = swiglu_backward(x, grad, fmt, **arguments, do_recompute=True)
    expected = swiglu_backward_ref(x, grad, fmt, **arguments, do_recompute=True)
    assert_equal(actual[0], expected[0])
    assert_close_sums(actual[1], expected[1], x, grad, clamp_value, scaling or 1.0)
    assert_equal(actual[2], expected[2])
    assert_equal(actual[2], swiglu_forward(x, fmt, **arguments))


@pytest.mark.parametrize("do_recompute", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
def test_what_is_returned(with_weights: bool, do_recompute: bool) -> None:
    x, grad = torch.randn(6, 256), torch.randn(6, 128)
    weights = torch.rand(6) if with_weights else None
    results = swiglu_backward(x, grad, "bf16", topk_weights=weights, do_recompute=do_recompute)
    shapes = [(6, 256)] + [(6,)] * with_weights + [(6, 128)] * do_recompute
    assert [tuple(result.shape) for result in results] == shapes
    quantised = swiglu_backward_and_per_token_cast(
        cast_ref(x, "e4m3", (1, 32)), grad, "e4m3", 32, topk_weights=weights, do_recompute=do_recompute
    )
    assert [tuple(each.shape) for each in quantised[1]] == [(6, 256), (6, 8)]
    assert [tuple(each.shape) for each in (quantised[0], *quantised[2:])] == shapes


@every_device
def test_gradients_are_those_of_autograd(device: str) -> None:
    """Another way to the same numbers, in float64; 0.7 clamps some of each."""
    x = torch.randn((30, 512), device=device)
    grad, weights = torch.randn((30, 256), device=device), torch.randn(30, device=device)
    leaf, weight_leaf = x.double().requires_grad_(), weights.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    gate, up = gate.clamp(max=0.7), up.clamp(-0.7, 0.7)
    result = gate * torch.sigmoid(gate) * up * weight_leaf[:, None] * 1.5
    result.backward(grad.double())
    x_grad, weight_grad, act_out = swiglu_backward(x, grad, "fp32", None, weights, 1.5, 0.7, True)
    torch.testing.assert_close(x_grad, leaf.grad.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weight_grad, weight_leaf.grad.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(act_out, result.detach().float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clamp_value", [None, 7.0, 90.0])
@every_device
def test_extreme_gates(device: str, clamp_value: float | None) -> None:
    gates = torch.tensor(GATES, device=device).repeat_interleave(64).repeat(1, 4)
    ups = torch.tensor([1.0, -1.0, 0.0, -0.0, 3e38, 1e-30, 448.0, 1.5], device=device).repeat(1, gates.shape[1] // 8)
    x = torch.cat((gates, ups), dim=1)
    grad = torch.randn_like(gates)
    actual = swiglu_backward(x, grad, "fp32", clamp_value=clamp_value, do_recompute=True)
    expected = swiglu_backward_ref(x, grad, "fp32", clamp_value=clamp_value, do_recompute=True)
    for one, other in zip(actual, expected, strict=True):
        is_nan = other.isnan()
        assert torch.equal(one.isnan(), is_nan)
        assert_equal(one.masked_fill(is_nan, 0), other.masked_fill(is_nan, 0))


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alignment", [1, 8, 128, 100])
@pytest.mark.parametrize("counts", [[5, 0, 130, 1], [0, 0], [7] * 70, [0, 300]], ids=["few", "none", "many", "one"])
@every_dtype
@every_device
def test_padding_gets_zeros(
    device: str, dtype: torch.dtype, counts: list[int], alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    psum, valid = segments(counts, alignment, device)
    valid = torch.nn.functional.pad(valid, (0, 3), value=True)  # rows behind the last segment are computed
    num_rows = valid.numel()
    x = torch.randn((num_rows, 256), device=device).to(dtype)
    grad = torch.randn((num_rows, 128), device=device).to(dtype)
    x[~valid], grad[~valid] = float("nan"), float("nan")
    options: dict[str, Any] = {"psum_num_tokens_per_expert": psum, "topk_weights": torch.rand(num_rows, device=device)}
    fill_outputs(monkeypatch, OPERATOR_FILE, "_swiglu_backward", "_swiglu_backward_and_per_token_cast")
    with token_alignment(alignment):
        plain = swiglu_backward(x, grad, "bf16", **options, do_recompute=True)
        expected = swiglu_backward_ref(x, grad, "bf16", **options, do_recompute=True)
        pair = cast_ref(x.nan_to_num(), "e4m3", (1, 32))
        cast = swiglu_backward_and_per_token_cast(pair, grad, "e4m3", 32, **options, do_recompute=True)
        expected_cast = swiglu_backward_and_per_token_cast_ref(pair, grad, "e4m3", 32, **options, do_recompute=True)
    for tensor in (*plain, cast[0], *cast[1], *cast[2:]):
        assert torch.all(tensor[~valid].float() == 0)
    assert_equal(plain[0], expected[0])
    assert_equal(plain[2], expected[2])
    assert_equal(cast[0], expected_cast[0])
    assert_equal(cast[1][0], expected_cast[1][0])
    assert_equal(cast[1][1], expected_cast[1][1])
    assert_equal(cast[3], expected_cast[3])


# ---- memory ----------------------------------------------------------------------------------------------------------


@every_dtype
@every_device
def test_leading_dimensions_and_unaligned_tensors(device: str, dtype: torch.dtype) -> None:
    x = torch.randn((2, 10, 256), device=device).to(dtype)
    grad = torch.randn((2, 10, 128), device=device).to(dtype)
    flat = swiglu_backward(x.view(20, 256), grad.view(20, 128), "bf16")[0]
    assert_equal(swiglu_backward(x, grad, "bf16")[0], flat)
    shifted = torch.empty(20 * 256 + 1, dtype=dtype, device=device)[1:].view(20, 256).copy_(x.view(20, 256))
    assert_equal(swiglu_backward(shifted, grad, "bf16")[0], flat)
    pair = cast_ref(x.view(20, 256), "e4m3", (1, 32))
    expected = swiglu_backward_and_per_token_cast(pair, grad, "e4m3", 32)
    raw = torch.empty(20 * 256 + 1, dtype=torch.uint8, device=device)[1:].view(20, 256).copy_(pair[0].view(torch.uint8))
    actual = swiglu_backward_and_per_token_cast((raw.view(torch.float8_e4m3fn), pair[1]), grad, "e4m3", 32)
    assert_equal(actual[0], expected[0])
    assert_equal(actual[1][0], expected[1][0])
    assert_equal(actual[1][1], expected[1][1])


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    num_tokens, hidden = 2**31 // 8192 + 5, 4096
    x = torch.empty((num_tokens, 2 * hidden), dtype=torch.bfloat16, device="cuda").normal_()
    grad = torch.empty((num_tokens, hidden), dtype=torch.bfloat16, device="cuda").normal_()
    x_grad = swiglu_backward(x, grad, "bf16")[0]
    for rows in (slice(0, 100), slice(-100, None)):
        assert_equal(x_grad[rows], swiglu_backward_ref(x[rows], grad[rows], "bf16")[0])


# ---- refused ---------------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def pair(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((4, 256), device=device).to(torch.float8_e4m3fn), torch.ones((4, 2), device=device)


def refusal(id: str, text: str, **changes: Any) -> Refusal:
    def make(device: str) -> dict[str, Any]:
        made = {name: value(device) if callable(value) else value for name, value in changes.items()}
        kwargs = {"x": pair(device), "act_x_grad": torch.zeros((4, 128), device=device), "fmt": "e4m3"}
        return {**kwargs, "num_per_channels": 128, **made}

    return Refusal(id, make, text)


REFUSALS = [
    refusal("fmt", r"fmt must be 'e4m3', got 'bf16'", fmt="bf16"),
    refusal("group", r"num_per_channels must be 32 or 128, got 64", num_per_channels=64),
    refusal("no pair", r"x must be a tuple of two tensors \(data, sf\), got a Tensor", x=zeros(4, 256)),
    refusal("sf", r"x_sf must have shape \(4, 8\), got \(4, 2\)", num_per_channels=32),
    refusal("grad", r"act_x_grad must have shape \(4, 128\), got \(4, 64\)", act_x_grad=zeros(4, 64)),
    refusal("no grad", r"act_x_grad must be a tensor, got NoneType", act_x_grad=None),
    refusal("weights", r"topk_weights must have shape \(4,\), got \(5,\)", topk_weights=zeros(5)),
    refusal("scaling", r"routed_scaling_factor must be None where topk_weights is None, got 2\.0",
            routed_scaling_factor=2.0),
    refusal("clamp", r"clamp_value must be at least 0, got -1\.0", clamp_value=-1.0),
]  # fmt: skip
BUILT_REFUSALS = [
    refusal("grad dtype", r"act_x_grad must be bfloat16 or float32, got float16",
            act_x_grad=zeros(4, 128, dtype=torch.float16)),
    refusal("psum", r"psum_num_tokens_per_expert must be int32, got int64",
            psum_num_tokens_per_expert=zeros(3, dtype=torch.int64)),
]  # fmt: skip


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda refused: refused.id)
@every_device
def test_invalid_calls(device: str, refused: Refusal) -> None:
    refused.check("quant.swiglu_backward_and_per_token_cast", swiglu_backward_and_per_token_cast, device)


@pytest.mark.parametrize("refused", BUILT_REFUSALS, ids=lambda refused: refused.id)
@every_device
def test_invalid_tensors(device: str, refused: Refusal, needs_extension: None) -> None:
    refused.check("quant.swiglu_backward_and_per_token_cast", swiglu_backward_and_per_token_cast, device)


def test_plain_gradients_have_one_dtype() -> None:
    text = r"quant\.swiglu_backward: act_x_grad must have the dtype bfloat16 of x, got float32"
    with pytest.raises(ValueError, match=text):
        swiglu_backward(torch.zeros((2, 128), dtype=torch.bfloat16), torch.zeros(2, 64), "bf16")
