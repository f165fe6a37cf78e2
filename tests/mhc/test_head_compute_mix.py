"""mhc_head_compute_mix: to the bit of plain torch forward, partial sums of the gradients backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.mhc import float64
from tilekernels.mhc import mhc_head_compute_mix_bwd, mhc_head_compute_mix_fwd
from tilekernels.mhc.head_compute_mix import mhc_head_compute_mix_bwd_ref, mhc_head_compute_mix_fwd_ref
from tilekernels.testing import assert_equal

NAME, NAME_BACKWARD = "mhc.mhc_head_compute_mix_fwd", "mhc.mhc_head_compute_mix_bwd"

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # the published tests' bounds
EPS = 1e-2

SIZES = [(0, 4), (1, 4), (33, 4), (4097, 4), (5, 2), (257, 2), (3, 8), (130, 8)]
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make_inputs(size: tuple[int, int], device: str) -> dict[str, torch.Tensor]:
    return {
        "input_mix": torch.randn(size, device=device),
        "mhc_scale": torch.randn(1, device=device),
        "mhc_base": torch.randn(size[1], device=device),
    }


def make_outputs(size: tuple[int, int], num_sms: int, device: str) -> dict[str, Any]:
    return {
        "input_mix_grad": torch.full(size, 7.0, device=device),
        "mhc_scale_grad_partial": torch.full((num_sms, 1), 7.0, device=device),
        "mhc_base_grad_partial": torch.full((num_sms, size[1]), 7.0, device=device),
        "num_sms": num_sms,
    }


@every_device
@every_size
def test_forward_is_a_sigmoid(size: tuple[int, int], device: str) -> None:
    inputs = make_inputs(size, device)
    out = torch.full(size, 7.0, device=device)
    mhc_head_compute_mix_fwd(**inputs, output_mix=out, mhc_pre_eps=EPS)
    expected = float64.head_mix(*(x.double() for x in inputs.values()), EPS)
    torch.testing.assert_close(out, expected.float(), **TOLERANCE)


@pytest.mark.gpu
@every_size
def test_forward_on_gpu_equals_the_reference(size: tuple[int, int]) -> None:
    inputs = make_inputs(size, "cuda")
    inputs["input_mix"] *= 20  # sigmoids that saturate too
    out, expected = (torch.full(size, 7.0, device="cuda") for _ in range(2))
    mhc_head_compute_mix_fwd(**inputs, output_mix=out, mhc_pre_eps=EPS, token_block_size=8)
    mhc_head_compute_mix_fwd_ref(**inputs, output_mix=expected, mhc_pre_eps=EPS)
    assert_equal(out, expected)


@every_device
@every_size
@pytest.mark.parametrize(("num_sms", "token_block_size"), [(132, 0), (1, 0), (7, 1), (3, 45)])
def test_backward_is_the_gradient(size: tuple[int, int], num_sms: int, token_block_size: int, device: str) -> None:
    """Partial sums against the reference's, row by row, and their total against autograd."""
    inputs, grad = make_inputs(size, device), torch.randn(size, device=device)
    outputs, expected = make_outputs(size, num_sms, device), make_outputs(size, num_sms, device)
    mhc_head_compute_mix_bwd(grad, **inputs, **outputs, token_block_size=token_block_size)
    mhc_head_compute_mix_bwd_ref(grad, **inputs, **expected, token_block_size=token_block_size)
    assert_equal(outputs["input_mix_grad"], expected["input_mix_grad"])
    leaves = [float64.leaf(x) for x in inputs.values()]
    float64.head_mix(*leaves, EPS).backward(grad.double())
    torch.testing.assert_close(outputs["input_mix_grad"], float64.grad_of(leaves[0]).float(), **TOLERANCE)
    for name, leaf in (("mhc_scale_grad_partial", leaves[1]), ("mhc_base_grad_partial", leaves[2])):
        torch.testing.assert_close(outputs[name], expected[name], **TOLERANCE)
        total = outputs[name].double().sum(0)
        torch.testing.assert_close(total, float64.grad_of(leaf), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("input_mix", torch.zeros(3, 3), "input_mix must have 2, 4 or 8 residual streams, got 3"),
        ("input_mix", torch.zeros(1, 3, 4), "input_mix must have 2 dimensions, got 3"),
        ("mhc_base", torch.zeros(3), "mhc_base must .*3.*"),
        ("output_mix", torch.zeros(2, 4), "output_mix must .*2.*"),
        ("token_block_size", -1, "token_block_size must be between 0 and 65536, got -1"),
    ],
    ids=["3 streams", "3 dimensions", "base", "tokens", "block size"],
)
def test_forward_refused(name: str, value: Any, text: str) -> None:
    kwargs = {**make_inputs((3, 4), "cpu"), "output_mix": torch.zeros(3, 4), "mhc_pre_eps": 0.0}
    with pytest.raises(ValueError, match=rf"^{NAME}: {text}$"):
        mhc_head_compute_mix_fwd(**{**kwargs, name: value})


@pytest.mark.usefixtures("needs_extension")
def test_backward_refused() -> None:
    inputs, outputs = make_inputs((3, 4), "cpu"), make_outputs((3, 4), 5, "cpu")
    text = "mhc_base_grad_partial must have num_sms = 6 rows, got 5"
    with pytest.raises(ValueError, match=rf"^{NAME_BACKWARD}: {text}$"):
        mhc_head_compute_mix_bwd(torch.zeros(3, 4), **inputs, **{**outputs, "num_sms": 6})
    with pytest.raises(ValueError, match=rf"^{NAME_BACKWARD}: num_sms must be at least 1, got 0$"):
        mhc_head_compute_mix_bwd(torch.zeros(3, 4), **inputs, **{**outputs, "num_sms": 0})
