"""mhc_sinkhorn: to the bit of plain torch in the same order, against float64 and its autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.mhc import float64
from tests.mhc.streams import Batch, misaligned
from tilekernels.mhc import mhc_sinkhorn_bwd, mhc_sinkhorn_fwd
from tilekernels.mhc.sinkhorn import mhc_sinkhorn_bwd_ref, mhc_sinkhorn_fwd_ref
from tilekernels.testing import assert_equal

NAME, NAME_BACKWARD = "mhc.mhc_sinkhorn_fwd", "mhc.mhc_sinkhorn_bwd"

# Twenty divisions of fp32, one behind the other; the published tests' bounds
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}

SIZES = [(0, 4), (1, 4), (31, 4), (33, 4), (1024, 4), (5, 2), (129, 2), (3, 8), (65, 8)]
every_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def forward(x: torch.Tensor, repeat: int, eps: float, function: Callable[..., None] = mhc_sinkhorn_fwd) -> torch.Tensor:
    out = torch.full_like(x, 7.0)
    function(x, out, repeat, eps)
    return out


def backward(
    grad: torch.Tensor, x: torch.Tensor, repeat: int, eps: float, function: Callable[..., None] = mhc_sinkhorn_bwd
) -> torch.Tensor:
    grad_input = torch.full_like(x, 7.0)
    function(grad, x, grad_input, repeat, eps)
    return grad_input


@every_device
@every_size
@pytest.mark.parametrize("repeat", [1, 2, 10])
def test_forward_normalises(size: tuple[int, int], repeat: int, device: str) -> None:
    x = Batch(*size, 1, device).matrix()
    expected = float64.sinkhorn(x.double(), repeat, 1e-6)
    torch.testing.assert_close(forward(x, repeat, 1e-6), expected.float(), **TOLERANCE)


@every_device
def test_result_is_doubly_stochastic(device: str) -> None:
    matrix = forward(Batch(64, 4, 1, device).matrix(), 30, 0.0)
    torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]), rtol=1e-4, atol=0)
    torch.testing.assert_close(matrix.sum(-2), torch.ones_like(matrix[..., 0]), rtol=1e-5, atol=0)


@every_device
@every_size
@pytest.mark.parametrize("repeat", [1, 3, 10])
def test_backward_is_the_gradient(size: tuple[int, int], repeat: int, device: str) -> None:
    batch = Batch(*size, 1, device)
    x, grad = batch.matrix(), batch.matrix()
    leaf = float64.leaf(x)
    float64.sinkhorn(leaf, repeat, 1e-6).backward(grad.double())
    torch.testing.assert_close(backward(grad, x, repeat, 1e-6), float64.grad_of(leaf).float(), **TOLERANCE)


@pytest.mark.gpu
@every_size
@pytest.mark.parametrize("repeat", [1, 10, 128])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_gpu_equals_the_reference(size: tuple[int, int], repeat: int, scale: float) -> None:
    """Bit for bit, also from large inputs, whose softmax underflows; misaligned tensors take another form."""
    batch = Batch(*size, 1, "cuda")
    x, grad = batch.matrix() * scale, batch.matrix()
    expected = forward(x, repeat, 1e-6, mhc_sinkhorn_fwd_ref)
    assert_equal(forward(x, repeat, 1e-6), expected)
    assert_equal(forward(misaligned(x), repeat, 1e-6), expected)
    expected = backward(grad, x, repeat, 1e-6, mhc_sinkhorn_bwd_ref)
    assert_equal(backward(grad, x, repeat, 1e-6), expected)
    assert_equal(backward(misaligned(grad), x, repeat, 1e-6), expected)


@every_device
def test_infinities_stay_in_their_matrix(device: str) -> None:
    x = Batch(9, 4, 1, device).matrix()
    expected = forward(x, 10, 1e-6)
    x[4, 1, 2] = float("inf")
    actual = forward(x, 10, 1e-6)
    assert actual[4].isnan().all()
    others = [token for token in range(9) if token != 4]
    assert_equal(actual[others], expected[others])


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(
    ("shape", "repeat", "text"),
    [
        ((3, 3, 3), 1, "comb_res_mix must have 2, 4 or 8 residual streams, got 3"),
        ((3, 4), 1, "comb_res_mix must have 3 dimensions, got 2"),
        ((3, 4, 2), 1, "comb_res_mix must .*2.*"),
        ((3, 4, 4), 0, "repeat must be at least 1, got 0"),
    ],
    ids=["3 streams", "flat", "not square", "no repeat"],
)
def test_forward_refused(shape: tuple[int, ...], repeat: int, text: str) -> None:
    x = torch.zeros(shape)
    with pytest.raises(ValueError, match=rf"^{NAME}: {text}$"):
        mhc_sinkhorn_fwd(x, x.clone(), repeat, 1e-6)


@pytest.mark.usefixtures("needs_extension")
def test_backward_refused() -> None:
    x = torch.zeros(3, 4, 4)
    with pytest.raises(ValueError, match=rf"^{NAME_BACKWARD}: repeat must be between 1 and 128, got 129$"):
        mhc_sinkhorn_bwd(x, x, x.clone(), 129, 1e-6)
    with pytest.raises(ValueError, match=rf"^{NAME_BACKWARD}: x must have shape .*"):
        mhc_sinkhorn_bwd(x[:2], x, x.clone(), 1, 1e-6)
    with pytest.raises(TypeError, match=rf"^{NAME_BACKWARD}: grad_input must be float32, got float64$"):
        mhc_sinkhorn_bwd(x, x, x.double(), 1, 1e-6)
    with pytest.raises(TypeError, match=rf"^{NAME_BACKWARD}: repeat must be an int, got float$"):
        mhc_sinkhorn_bwd(x, x, x.clone(), 1.5, 1e-6)  # type: ignore[arg-type]
