"""mhc_pre_split_mixes: to the bit of plain torch forward, against float64 autograd backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mhc import float64
from tilekernels import config
from tilekernels.mhc import mhc_pre_split_mixes_bwd, mhc_pre_split_mixes_fwd
from tilekernels.mhc.pre_split_mixes import mhc_pre_split_mixes_bwd_ref, mhc_pre_split_mixes_fwd_ref
from tilekernels.testing import assert_equal

NAME, NAME_BACKWARD = "mhc.mhc_pre_split_mixes_fwd", "mhc.mhc_pre_split_mixes_bwd"

# The published tests' bounds, for sums over the tokens too
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
MULT_VALUE, EPS = 2.0, 1e-2

SIZES = [(0, 4), (1, 4), (33, 4), (4097, 4), (5, 2), (257, 2), (3, 8), (130, 8)]
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

Tensors = tuple[torch.Tensor, ...]


def make_inputs(size: tuple[int, int], device: str) -> Tensors:
    num_tokens, mult = size
    columns = mult * (mult + 2)
    return (
        torch.randn((num_tokens, columns), device=device),
        torch.randn(3, device=device),
        torch.randn(columns, device=device),
    )


def make_grads(size: tuple[int, int], device: str) -> Tensors:
    num_tokens, mult = size
    return tuple(torch.randn((num_tokens, columns), device=device) for columns in (mult, mult, mult * mult))


def forward(inputs: Tensors, function: Callable[..., None] = mhc_pre_split_mixes_fwd) -> Tensors:
    num_tokens, columns = inputs[0].shape
    mult = {8: 2, 24: 4, 80: 8}[columns]
    outputs = tuple(inputs[0].new_full((num_tokens, size), 7.0) for size in (mult, mult, mult * mult))
    function(*inputs, *outputs, MULT_VALUE, EPS)
    return outputs


def backward(
    grads: Tensors, inputs: Tensors, post: torch.Tensor, function: Callable[..., None] = mhc_pre_split_mixes_bwd
) -> Tensors:
    outputs = tuple(torch.full_like(x, 7.0) for x in inputs)
    function(*grads, inputs[0], post, *inputs[1:], *outputs, MULT_VALUE)
    return outputs


@every_device
@every_size
def test_forward_splits(size: tuple[int, int], device: str) -> None:
    inputs = make_inputs(size, device)
    expected = float64.split_mixes(*(x.double() for x in inputs), size[1], MULT_VALUE, EPS)
    for actual, x in zip(forward(inputs), expected, strict=True):
        torch.testing.assert_close(actual, x.float(), **TOLERANCE)


@pytest.mark.gpu
@every_size
def test_forward_on_gpu_equals_the_reference(size: tuple[int, int]) -> None:
    inputs = make_inputs(size, "cuda")
    inputs = (inputs[0] * 20, *inputs[1:])  # sigmoids that saturate too
    for x, y in zip(forward(inputs), forward(inputs, mhc_pre_split_mixes_fwd_ref), strict=True):
        assert_equal(x, y)


@every_device
@every_size
def test_backward_is_the_gradient(size: tuple[int, int], device: str) -> None:
    inputs, grads = make_inputs(size, device), make_grads(size, device)
    leaves = [float64.leaf(x) for x in inputs]
    mixes = float64.split_mixes(*leaves, size[1], MULT_VALUE, EPS)
    torch.autograd.backward(mixes, [grad.double() for grad in grads])
    for actual, leaf in zip(backward(grads, inputs, forward(inputs)[1]), leaves, strict=True):
        expected = float64.grad_of(leaf).float()
        # Sums of thousands of numbers near zero: of the size of what is added
        scale = max(1.0, size[0] ** 0.5 / 8)
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE["rtol"], atol=TOLERANCE["atol"] * scale)


@pytest.mark.gpu
@every_size
@pytest.mark.parametrize("num_sms", [None, 1, 7])
def test_backward_on_gpu_equals_the_reference(size: tuple[int, int], num_sms: int | None) -> None:
    """The gradient of the mixes to the bit, sums over tokens in whatever order, for any number of blocks."""
    inputs, grads = make_inputs(size, "cuda"), make_grads(size, "cuda")
    post = forward(inputs)[1]
    try:
        if num_sms is not None:
            config.set_num_sms(num_sms)
        actual = backward(grads, inputs, post)
        again = backward(grads, inputs, post)
    finally:
        config.reset_runtime_config()
    expected = backward(grads, inputs, post, mhc_pre_split_mixes_bwd_ref)
    assert_equal(actual[0], expected[0])
    for x, y, z in zip(actual[1:], expected[1:], again[1:], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-3)
        assert_equal(x, z)


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("input_mixes", torch.zeros(3, 23), "input_mixes must have 8, 24 or 80 columns, got 23"),
        ("input_mixes", torch.zeros(2, 3, 24), "input_mixes must have 2 dimensions, got 3"),
        ("mhc_scale", torch.zeros(1), "mhc_scale must .*1.*"),
        ("mhc_base", torch.zeros(4), "mhc_base must .*4.*"),
        ("pre_layer_mix", torch.zeros(2, 4), "pre_layer_mix must .*2.*"),
        ("comb_res_mix", torch.zeros(3, 4, 4), "comb_res_mix must have 2 dimensions, got 3.*"),
    ],
    ids=["23 columns", "3 dimensions", "scale", "base", "tokens", "square comb"],
)
def test_forward_refused(name: str, value: torch.Tensor, text: str) -> None:
    kwargs: dict[str, Any] = {
        "input_mixes": torch.zeros(3, 24),
        "mhc_scale": torch.zeros(3),
        "mhc_base": torch.zeros(24),
        "pre_layer_mix": torch.zeros(3, 4),
        "post_layer_mix": torch.zeros(3, 4),
        "comb_res_mix": torch.zeros(3, 16),
        "mhc_post_mult_value": 2.0,
        "mhc_pre_eps": 0.0,
    }
    with pytest.raises(ValueError, match=rf"^{NAME}: {text}$"):
        mhc_pre_split_mixes_fwd(**{**kwargs, name: value})


@pytest.mark.usefixtures("needs_extension")
def test_backward_refused() -> None:
    inputs, grads = make_inputs((3, 4), "cpu"), make_grads((3, 4), "cpu")
    with pytest.raises(TypeError, match=rf"^{NAME_BACKWARD}: post_layer_mix must be float32, got float64$"):
        backward(grads, inputs, torch.zeros(3, 4).double())
    assert list(inspect.signature(mhc_pre_split_mixes_bwd).parameters)[:3] == [
        "pre_layer_mix_grad",
        "post_layer_mix_grad",
        "comb_res_mix_grad",
    ]
