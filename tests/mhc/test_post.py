"""mhc_post: exact streams forward and backward, mixes' gradients as sums, against float64 autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.mhc import float64
from tests.mhc.streams import SHAPES, Batch, assert_near, misaligned
from tests.refusals import Refusal
from tilekernels.mhc import mhc_post_bwd, mhc_post_fwd
from tilekernels.mhc.post import mhc_post_bwd_ref, mhc_post_fwd_ref
from tilekernels.testing import assert_equal, check_bias

NAME, NAME_BACKWARD = "mhc.mhc_post_fwd", "mhc.mhc_post_bwd"

BF16 = 2.0**-8  # one rounding, of the largest value
FP32_SUM = 1e-5  # a sum of up to 7168 products in fp32, of the largest sum

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make_inputs(shape: tuple[int, int, int], device: str) -> dict[str, torch.Tensor]:
    batch = Batch(*shape, device)
    return {
        "x": batch.layer(),
        "residual": batch.streams(),
        "post_layer_mix": batch.mix().unsqueeze(-1),
        "comb_res_mix": batch.matrix(),
    }


def in_float64(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: float64.leaf(value) for name, value in inputs.items()}


def exact_post(x: torch.Tensor, residual: torch.Tensor, **mixes: torch.Tensor) -> torch.Tensor:
    return float64.post(x, residual, mixes["post_layer_mix"].squeeze(-1), mixes["comb_res_mix"])


@every_device
@every_shape
def test_forward_mixes_the_streams(shape: tuple[int, int, int], device: str) -> None:
    inputs = make_inputs(shape, device)
    assert_near(mhc_post_fwd(**inputs), exact_post(**in_float64(inputs)).detach(), BF16)


@every_device
def test_forward_takes_any_leading_dimensions_and_out(device: str) -> None:
    inputs = make_inputs((6, 4, 64), device)
    expected = mhc_post_fwd(**inputs)
    inputs = {name: value.view(2, 3, *value.shape[1:]) for name, value in inputs.items()}
    out = torch.empty_like(inputs["residual"])
    assert mhc_post_fwd(**inputs, out=out) is out
    assert_equal(out.view(6, 4, 64), expected)
    inputs["residual"] = inputs["residual"].transpose(0, 1).contiguous().transpose(0, 1)  # made dense
    assert_equal(mhc_post_fwd(**inputs), out)
    grads = mhc_post_bwd(**inputs, d_o=out)
    assert [grad.shape for grad in grads] == [value.shape for value in inputs.values()]


@every_device
def test_forward_is_unbiased(device: str) -> None:
    inputs = make_inputs((32, 4, 1024), device)
    check_bias(mhc_post_fwd(**inputs), exact_post(**in_float64(inputs)).detach())


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("which", ["aligned", "x", "residual", "post_layer_mix", "comb_res_mix", "out"])
def test_forward_on_gpu_equals_the_reference(shape: tuple[int, int, int], which: str) -> None:
    """Misaligned tensors take another form."""
    inputs = make_inputs(shape, "cuda")
    inputs["out"] = torch.empty_like(inputs["residual"])
    expected = mhc_post_fwd_ref(**{**inputs, "out": None})
    if which != "aligned":
        inputs[which] = misaligned(inputs[which])
    assert_equal(mhc_post_fwd(**inputs), expected)


@every_device
@every_shape
def test_backward_is_the_gradient(shape: tuple[int, int, int], device: str) -> None:
    inputs = make_inputs(shape, device)
    d_o = Batch(*shape, device).streams()
    leaves = in_float64(inputs)
    exact_post(**leaves).backward(d_o.double())
    tolerances = BF16, BF16, FP32_SUM, FP32_SUM
    for grad, x, tolerance in zip(mhc_post_bwd(**inputs, d_o=d_o), leaves.values(), tolerances, strict=True):
        assert_near(grad, float64.grad_of(x), tolerance)


@pytest.mark.gpu
@every_shape
@pytest.mark.parametrize("which", ["aligned", "x", "residual", "post_layer_mix", "comb_res_mix", "d_o"])
def test_backward_on_gpu_equals_the_reference(shape: tuple[int, int, int], which: str) -> None:
    """The gradients of streams to the bit, those of mixes as sums in another order."""
    inputs = {**make_inputs(shape, "cuda"), "d_o": Batch(*shape, "cuda").streams()}
    expected = mhc_post_bwd_ref(**inputs)
    if which != "aligned":
        inputs[which] = misaligned(inputs[which])
    actual = mhc_post_bwd(**inputs)
    assert_equal(actual[0], expected[0])
    assert_equal(actual[1], expected[1])
    assert_near(actual[2], expected[2], FP32_SUM)
    assert_near(actual[3], expected[3], FP32_SUM)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape", [(4096, 4, 1280), (1189, 4, 7168), (793, 8, 2568), (1700, 2, 1032), (400, 4, 16384)], ids=str
)
def test_backward_of_more_tokens_than_blocks_fit_the_gpu(shape: tuple[int, int, int]) -> None:
    inputs = {**make_inputs(shape, "cuda"), "d_o": Batch(*shape, "cuda").streams()}
    tolerances = 0.0, 0.0, FP32_SUM, FP32_SUM
    for grad, expected, tolerance in zip(mhc_post_bwd(**inputs), mhc_post_bwd_ref(**inputs), tolerances, strict=True):
        assert_near(grad, expected, tolerance)


@pytest.mark.gpu
def test_gradients_are_the_same_each_time() -> None:
    inputs = {**make_inputs((129, 4, 2560), "cuda"), "d_o": Batch(129, 4, 2560, "cuda").streams()}
    for first, second in zip(mhc_post_bwd(**inputs), mhc_post_bwd(**inputs), strict=True):
        assert_equal(first, second)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    num_tokens, hidden = 2**31 // (4 * 7168) + 9, 7168
    residual = torch.zeros((num_tokens, 4, hidden), dtype=torch.bfloat16, device="cuda")
    x = torch.zeros((num_tokens, hidden), dtype=torch.bfloat16, device="cuda")
    post, comb = (torch.ones((num_tokens, 4, size), device="cuda") for size in (1, 4))
    residual[-3:], x[-3:] = Batch(3, 4, hidden, "cuda").streams(), Batch(3, 4, hidden, "cuda").layer()
    out = mhc_post_fwd(x, residual, post, comb)
    last = [value[-3:] for value in (x, residual, post, comb)]
    assert_equal(out[-3:], mhc_post_fwd_ref(*last))
    assert not out[:-3].any()
    grads = mhc_post_bwd(x, residual, post, comb, out)
    for grad, expected in zip(grads[:2], mhc_post_bwd_ref(*last, out[-3:])[:2], strict=True):
        assert_equal(grad[-3:], expected)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals() -> Iterator[Refusal]:
    def refusal(label: str, text: str, **changes: Any) -> Refusal:
        def make(device: str) -> dict[str, Any]:
            valid = {
                "x": torch.zeros(3, 16).bfloat16(),
                "residual": torch.zeros(3, 4, 16).bfloat16(),
                "post_layer_mix": torch.zeros(3, 4, 1),
                "comb_res_mix": torch.zeros(3, 4, 4),
                "out": torch.ones(3, 4, 16).bfloat16(),
            }
            return {**valid, **changes}

        return Refusal(label, make, text)

    bf16 = torch.bfloat16
    yield refusal("x None", "x must be a tensor, got NoneType", x=None)
    yield refusal("x fp32", "x must be bfloat16, got float32", x=torch.zeros(3, 16))
    yield refusal("x of 2 tokens", r"x must have shape \(3, 16\), got \(2, 16\)", x=torch.zeros(2, 16, dtype=bf16))
    yield refusal("residual fp32", "residual must be bfloat16, got float32", residual=torch.zeros(3, 4, 16))
    yield refusal("flat residual", "residual must have 3 dimensions, got 1", residual=torch.zeros(16, dtype=bf16))
    residual = torch.zeros(3, 5, 16, dtype=bf16)
    yield refusal("5 streams", "residual must have 2, 4 or 8 residual streams, got 5", residual=residual)
    strided = torch.zeros(3, 32, dtype=bf16)[:, :16]
    yield refusal("x strided", r"x must be contiguous, got strides \(32, 1\)", x=strided)
    yield refusal("post flat", r"post_layer_mix must have shape \(3, 4, 1\), .*", post_layer_mix=torch.zeros(3, 4))
    comb = torch.zeros(3, 4, 4, dtype=bf16)
    yield refusal("comb bf16", "comb_res_mix must be float32, got bfloat16", comb_res_mix=comb)
    yield refusal("out fp32", "out must be bfloat16, got float32", out=torch.ones(3, 4, 16))
    yield refusal("out of 2 tokens", r"out must have shape .*", out=torch.ones(2, 4, 16, dtype=bf16))


REFUSALS = list(refusals())


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
def test_refused(refusal: Refusal) -> None:
    refusal.check(NAME, mhc_post_fwd, "cpu")


def test_backward_refused() -> None:
    inputs = make_inputs((3, 4, 16), "cpu")
    with pytest.raises(ValueError, match=rf"^{NAME_BACKWARD}: d_o must have shape \(3, 4, 16\), got \(3, 16\)$"):
        mhc_post_bwd(**inputs, d_o=inputs["x"])
