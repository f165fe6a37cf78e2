"""RMSNorm backward: the gradient of x exact in the kernels' order, that of the weight close, both those of autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.quant.sizes import on_devices
from tests.refusals import Refusal
from tilekernels.quant import norm_backward
from tilekernels.quant.norm_backward import norm_backward_ref
from tilekernels.testing import assert_equal

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", CPU_AND_GPU)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

SIZES = [(0, 64), (1, 32), (7, 128), (5, 992), (300, 2080), (3, 8192)]
LARGE = [(4001, hidden) for hidden in (192, 2048, 4096, 7168, 8192)]

# A sum over the rows of fp32 products, relative to the sum of their magnitudes; then rounding to the dtype
SUM_TOLERANCE = 2.0**-18
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-23}


def make(size: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(size, device=device).to(dtype)


def make_inputs(size: tuple[int, int], dtype: torch.dtype, device: str, residual: bool, weight: bool) -> dict[str, Any]:
    x = make(size, dtype, device)
    return {
        "out_grad": make(size, dtype, device),
        "x": x,
        "weight": make(size[1:], dtype, device) if weight else None,
        "rstd": torch.rsqrt(x.float().square().mean(dim=1) + 1e-6),
        "residual_out_grad": make(size, dtype, device) if residual else None,
        "out_scale": 1.5,
    }


def assert_close_weight_grad(actual: torch.Tensor, inputs: dict[str, Any], before: torch.Tensor | None = None) -> None:
    products = inputs["x"].double() * inputs["rstd"].double()[:, None] * inputs["out_grad"].double() * 1.5
    expected = products.sum(dim=0) + (0 if before is None else before.double())
    bound = SUM_TOLERANCE * products.abs().sum(dim=0) + ROUNDING[actual.dtype] * expected.abs()
    assert torch.all((actual.double() - expected).abs() <= bound)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("weight", [False, True], ids=["no_weight", "weight"])
@on_devices(SIZES, LARGE)
@every_dtype
def test_gradients(device: str, dtype: torch.dtype, size: tuple[int, int], weight: bool, residual: bool) -> None:
    inputs = make_inputs(size, dtype, device, residual, weight)
    x_grad, weight_grad = norm_backward(**inputs)
    assert_equal(x_grad, norm_backward_ref(**inputs)[0])
    assert (weight_grad is not None) == weight
    if weight_grad is not None:
        assert weight_grad.dtype == dtype
        assert_close_weight_grad(weight_grad, inputs)


@pytest.mark.parametrize("num_tokens", [0, 1, 700])
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float32], ids=["to_bf16", "to_fp32"])
@every_dtype
@every_device
def test_weight_grad_is_added_to(device: str, dtype: torch.dtype, grad_dtype: torch.dtype, num_tokens: int) -> None:
    inputs = make_inputs((num_tokens, 320), dtype, device, False, True)
    given = make((320,), grad_dtype, device)
    before = given.clone()
    _, weight_grad = norm_backward(**inputs, weight_grad=given)
    assert weight_grad is given
    if num_tokens == 0:
        assert_equal(given, before)
    assert_close_weight_grad(given, inputs, before)


@every_device
def test_gradients_are_those_of_autograd(device: str) -> None:
    inputs = make_inputs((40, 256), torch.float32, device, True, True)
    x, weight = (inputs[name].double().requires_grad_() for name in ("x", "weight"))
    out = x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-6) * weight * 1.5
    (out * inputs["out_grad"]).sum().backward()
    x_grad, weight_grad = norm_backward(**inputs)
    assert x.grad is not None
    torch.testing.assert_close(x_grad, (x.grad + inputs["residual_out_grad"]).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight_grad, weight.grad.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("first", [0, 16, 3])
@every_dtype
@every_device
def test_strided_and_unaligned_rows(device: str, dtype: torch.dtype, first: int) -> None:
    inputs = make_inputs((20, 320), dtype, device, True, True)
    expected = norm_backward(**inputs)
    wide = dict(inputs)
    for name in ("x", "out_grad", "residual_out_grad"):
        wide[name] = make((20, 500), dtype, device)[:, first : first + 320].copy_(inputs[name])
    actual = norm_backward(**wide)
    assert_equal(actual[0], expected[0])
    assert_equal(actual[1], expected[1])


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    size = (2**31 // 8192 + 5, 8192)
    x, grad = (torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    rstd = torch.rand(size[0], device="cuda")
    x_grad, _ = norm_backward(grad, x, None, rstd)
    for rows in (slice(0, 50), slice(-50, None)):
        assert_equal(x_grad[rows], norm_backward_ref(grad[rows], x[rows], None, rstd[rows])[0])


# ---- refused ---------------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def refusal(id: str, text: str, **changes: Any) -> Refusal:
    def make_kwargs(device: str) -> dict[str, Any]:
        made = {name: value(device) if callable(value) else value for name, value in changes.items()}
        kwargs = {name: zeros(4, 128)(device) for name in ("out_grad", "x")}
        return {**kwargs, "weight": zeros(128)(device), "rstd": torch.ones(4, device=device), **made}

    return Refusal(id, make_kwargs, text)


REFUSALS = [
    refusal("rank", r"x must have 2 dimensions, got 3", x=zeros(2, 2, 128)),
    refusal("hidden", r"x must have a multiple of 32 channels, at most 8192, got 48", x=zeros(4, 48)),
    refusal("grad", r"out_grad must have shape \(4, 128\), got \(4, 64\)", out_grad=zeros(4, 64)),
    refusal("grad dtype", r"out_grad must be bfloat16, got float32", out_grad=zeros(4, 128, dtype=torch.float32)),
    refusal("residual", r"residual_out_grad must have shape \(4, 128\), got \(5, 128\)",
            residual_out_grad=zeros(5, 128)),
    refusal("weight", r"weight must have shape \(128,\), got \(64,\)", weight=zeros(64)),
    refusal("weight_grad", r"weight_grad must be None where weight is None, got a tensor", weight=None,
            weight_grad=zeros(128)),
    refusal("scale", r"out_scale must be a number, got str", out_scale="1"),
]  # fmt: skip
BUILT_REFUSALS = [
    refusal("rstd", r"rstd must be float32, got bfloat16", rstd=zeros(4)),
    refusal("weight_grad dtype", r"weight_grad must be float32 or bfloat16, got float16",
            weight_grad=zeros(128, dtype=torch.float16)),
]  # fmt: skip


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda refused: refused.id)
@every_device
def test_invalid_calls(device: str, refused: Refusal) -> None:
    refused.check("quant.norm_backward", norm_backward, device)


@pytest.mark.parametrize("refused", BUILT_REFUSALS, ids=lambda refused: refused.id)
@every_device
def test_invalid_tensors(device: str, refused: Refusal, needs_extension: None) -> None:
    refused.check("quant.norm_backward", norm_backward, device)
