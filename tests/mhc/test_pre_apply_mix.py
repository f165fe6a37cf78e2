"""mhc_pre_apply_mix: exact forward, and in place backward, against sums of exact products."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tests.mhc import float64
from tests.mhc.streams import SHAPES, Batch, assert_near, misaligned
from tests.refusals import Refusal
from tilekernels.mhc import mhc_pre_apply_mix_bwd, mhc_pre_apply_mix_fwd
from tilekernels.mhc.pre_apply_mix import mhc_pre_apply_mix_bwd_ref, mhc_pre_apply_mix_fwd_ref
from tilekernels.testing import assert_equal, check_bias

NAME, NAME_BACKWARD = "mhc.mhc_pre_apply_mix_fwd", "mhc.mhc_pre_apply_mix_bwd"

BF16 = 2.0**-8  # one rounding, of the largest value
FP32_SUM = 1e-5  # a sum of up to 7168 products in fp32, of the largest sum

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def forward(x: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    o = x.new_full((x.shape[0], x.shape[2]), 7.0)
    mhc_pre_apply_mix_fwd(x, mix, o)
    return o


@every_device
@every_shape
def test_forward_is_the_sum_over_the_streams(shape: tuple[int, int, int], device: str) -> None:
    batch = Batch(*shape, device)
    x, mix = batch.streams(), batch.mix()
    assert_near(forward(x, mix), float64.apply_mix(x.double(), mix.double()), BF16)


def test_forward_rounds_a_chain_of_fused_multiply_adds() -> None:
    """In numpy: fp64 holds the product, whose sum with an fp32 number it rounds once, far from ties of fp32."""
    batch = Batch(4, 4, 64)
    x, mix = batch.streams(), batch.mix()
    total = np.zeros((4, 64), np.float32)
    for i in range(4):
        product = mix[:, i, None].numpy().astype(np.float64) * x[:, i].float().numpy().astype(np.float64)
        total = (product + total).astype(np.float32)
    expected = torch.from_numpy(total.astype(ml_dtypes.bfloat16).view(np.int16)).view(torch.bfloat16)
    assert_equal(forward(x, mix), expected)


@pytest.mark.gpu
@every_shape
def test_forward_on_gpu_equals_the_reference(shape: tuple[int, int, int]) -> None:
    batch = Batch(*shape, "cuda")
    x, mix = batch.streams(), batch.mix()
    expected = torch.empty((shape[0], shape[2]), dtype=torch.bfloat16, device="cuda")
    mhc_pre_apply_mix_fwd_ref(x, mix, expected)
    assert_equal(forward(x, mix), expected)
    assert_equal(forward(misaligned(x), mix), expected)
    assert_equal(forward(x, misaligned(mix)), expected)


@every_device
def test_forward_is_unbiased(device: str) -> None:
    x, mix = Batch(64, 4, 1024, device).streams(), Batch(64, 4, 1024, device).mix()
    check_bias(forward(x, mix), float64.apply_mix(x.double(), mix.double()))


@every_device
def test_forward_of_special_values(device: str) -> None:
    """Zeros times minus one give plus zero, as the sum starts there; NaN and infinity stay in their channel."""
    x = torch.zeros((1, 2, 8), device=device).bfloat16()
    x[0, 0, 1], x[0, 1, 2], x[0, 0, 3], x[0, 1, 3] = float("nan"), float("inf"), float("inf"), float("-inf")
    x[0, 0, 4] = torch.finfo(torch.bfloat16).max
    o = forward(x, torch.tensor([[-1.0, 1.0]], device=device))[0].float().cpu()
    assert o[0].item() == 0
    assert not o[0].signbit()
    assert o[1].isnan()
    assert o[2].item() == float("inf")
    assert o[3].item() == float("-inf")
    assert o[4].item() == -torch.finfo(torch.bfloat16).max


@every_device
@every_shape
def test_backward_is_the_gradient(shape: tuple[int, int, int], device: str) -> None:
    batch = Batch(*shape, device)
    o_grad, x, mix, x_grad = batch.layer(), batch.streams(), batch.mix(), batch.streams()
    x64, mix64 = float64.leaf(x), float64.leaf(mix)
    float64.apply_mix(x64, mix64).backward(o_grad.double())
    expected = float64.grad_of(x64) + x_grad.double()
    assert_near(mhc_pre_apply_mix_bwd(o_grad, x, mix, x_grad), float64.grad_of(mix64), FP32_SUM)
    assert_near(x_grad, expected, BF16)


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("which", ["aligned", "o_grad", "x", "mix", "x_grad"])
def test_backward_on_gpu_equals_the_reference(shape: tuple[int, int, int], which: str) -> None:
    """The gradient of x to the bit; misaligned tensors take another form."""
    batch = Batch(*shape, "cuda")
    kwargs = {"o_grad": batch.layer(), "x": batch.streams(), "mix": batch.mix(), "x_grad": batch.streams()}
    expected_grad = kwargs["x_grad"].clone()
    expected = mhc_pre_apply_mix_bwd_ref(**{**kwargs, "x_grad": expected_grad})
    if which != "aligned":
        kwargs[which] = misaligned(kwargs[which])
    assert_near(mhc_pre_apply_mix_bwd(**kwargs), expected, FP32_SUM)
    assert_equal(kwargs["x_grad"], expected_grad)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    num_tokens, hidden = 2**31 // (4 * 7168) + 9, 7168
    x = torch.zeros((num_tokens, 4, hidden), dtype=torch.bfloat16, device="cuda")
    mix = torch.ones((num_tokens, 4), device="cuda")
    x[-3:] = Batch(3, 4, hidden, "cuda").streams()
    expected = torch.empty((3, hidden), dtype=torch.bfloat16, device="cuda")
    mhc_pre_apply_mix_fwd_ref(x[-3:], mix[-3:], expected)
    o = forward(x, mix)
    assert_equal(o[-3:], expected)
    assert not o[:-3].any()
    x_grad = torch.zeros_like(x)
    mix_grad = mhc_pre_apply_mix_bwd(o, x, mix, x_grad)
    expected_grad = torch.zeros_like(x[-3:])
    assert_near(mix_grad[-3:], mhc_pre_apply_mix_bwd_ref(o[-3:], x[-3:], mix[-3:], expected_grad), FP32_SUM)
    assert_equal(x_grad[-3:], expected_grad)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals() -> Iterator[Refusal]:
    def refusal(label: str, text: str, **changes: Any) -> Refusal:
        def make(device: str) -> dict[str, Any]:
            valid = {"x": torch.zeros(3, 4, 16).bfloat16(), "mix": torch.zeros(3, 4), "o": torch.ones(3, 16).bfloat16()}
            return {name: _to(changes.get(name, value), device) for name, value in valid.items()}

        return Refusal(label, make, text)

    yield refusal("x None", "x must be a tensor, got NoneType", x=None)
    yield refusal("x fp32", "x must be bfloat16, got float32", x=torch.zeros(3, 4, 16))
    yield refusal("x of 2 dimensions", "x must have 3 dimensions, got 2", x=torch.zeros(3, 16).bfloat16())
    yield refusal("3 streams", "x must have 2, 4 or 8 residual streams, got 3", x=torch.zeros(3, 3, 16).bfloat16())
    yield refusal("x strided", "x must have strides .*", x=torch.zeros(3, 4, 32).bfloat16()[..., :16])
    yield refusal("mix bf16", "mix must be float32, got bfloat16", mix=torch.zeros(3, 4).bfloat16())
    yield refusal("mix of 2 streams", "mix must .*2.*", mix=torch.zeros(3, 2))
    yield refusal("o of 2 tokens", "o must .*2.*", o=torch.zeros(2, 16).bfloat16())
    yield refusal("o of 15 channels", "o must .*15.*", o=torch.zeros(3, 15).bfloat16())


def _to(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) and device != "cpu" else value


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused_on_cpu(refusal: Refusal) -> None:
    refusal.check(NAME, mhc_pre_apply_mix_fwd, "cpu")


@pytest.mark.usefixtures("needs_extension")
def test_backward_refused() -> None:
    x = torch.zeros(3, 4, 16).bfloat16()
    with pytest.raises(ValueError, match=rf"^{NAME_BACKWARD}: x must have shape .*"):
        mhc_pre_apply_mix_bwd(torch.zeros(2, 16).bfloat16(), x, torch.zeros(3, 4), x.clone())
    with pytest.raises(TypeError, match=rf"^{NAME_BACKWARD}: x_grad must be bfloat16, got float32$"):
        mhc_pre_apply_mix_bwd(torch.zeros(3, 16).bfloat16(), x, torch.zeros(3, 4), x.float())
