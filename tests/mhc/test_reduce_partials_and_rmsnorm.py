"""mhc_reduce_partials_and_rmsnorm_fwd and _bwd: sums in order, exact; norms and gradients against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mhc.inputs import randn
from tests.refusals import Refusal
from tilekernels.mhc import mhc_reduce_partials_and_rmsnorm_bwd, mhc_reduce_partials_and_rmsnorm_fwd
from tilekernels.testing import assert_equal

NAME = "mhc.mhc_reduce_partials_and_rmsnorm_fwd"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# (parts, tokens, groups, mixes)
SHAPES = [
    (1, 0, 1, 24), (1, 1, 1, 1), (16, 13, 1, 24), (7, 129, 1, 80), (3, 50, 4, 24), (64, 33, 2, 8), (0, 5, 1, 24),
]  # fmt: skip
GPU_SHAPES = [*SHAPES, (8, 4096, 1, 24), (16, 8191, 1, 24), (1, 2**20, 1, 24)]
EPS, SIZE = 1e-6, 4 * 1280

RTOL, ATOL = 1e-5, 1e-6  # a few fp32 roundings after the sums


def make(parts: int, tokens: int, groups: int, mixes: int, device: str) -> tuple[torch.Tensor, ...]:
    mul = randn(parts, tokens, groups, mixes, device=device)
    squares = randn(parts, tokens, groups, device=device).square() * SIZE
    outputs = (randn(tokens, groups, mixes, device=device), randn(tokens, groups, device=device))
    return mul, squares, *outputs, randn(tokens, mixes, device=device)


def check(shape: tuple[int, int, int, int], device: str) -> None:
    mul, squares, out_mul, sqrsum, out = make(*shape, device)
    mhc_reduce_partials_and_rmsnorm_fwd(mul, squares, out_mul, sqrsum, out, SIZE, EPS, shape[0])
    sums = [torch.zeros_like(out_mul), torch.zeros_like(sqrsum)]
    for part in range(shape[0]):
        sums = [sums[0] + mul[part], sums[1] + squares[part]]
    assert_equal(out_mul, sums[0])
    assert_equal(sqrsum, sums[1])
    wide = [each.double().requires_grad_() for each in sums]
    expected = (wide[0] * torch.rsqrt(wide[1] / SIZE + EPS).unsqueeze(-1)).sum(dim=1)
    scale = (wide[0].abs() * torch.rsqrt(wide[1] / SIZE + EPS).unsqueeze(-1)).sum(dim=1)
    assert ((out - expected).abs() <= RTOL * scale + ATOL).all()

    out_grad = torch.randn_like(out)
    expected.backward(out_grad.double())
    out_mul_grad, sqrsum_grad = torch.randn_like(out_mul), torch.randn_like(sqrsum)
    mhc_reduce_partials_and_rmsnorm_bwd(out_grad, out_mul, sqrsum, out_mul_grad, sqrsum_grad, SIZE, EPS)
    torch.testing.assert_close(out_mul_grad.double(), wide[0].grad, rtol=RTOL, atol=ATOL)
    size = (out_grad.unsqueeze(1) * out_mul).abs().sum(dim=-1).double()
    size = size * (sums[1].double() / SIZE + EPS).rsqrt() / (sums[1].double() + EPS * SIZE)
    assert ((sqrsum_grad - wide[1].grad).abs() <= RTOL * size).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu(shape: tuple[int, int, int, int]) -> None:
    check(shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_gpu(shape: tuple[int, int, int, int]) -> None:
    check(shape, "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_no_squares_leave_eps(device: str) -> None:
    mul, squares, out_mul, sqrsum, out = make(2, 3, 1, 24, device)
    squares.zero_()
    mhc_reduce_partials_and_rmsnorm_fwd(mul, squares, out_mul, sqrsum, out, SIZE, 0.25, 2)
    assert_equal(out, out_mul[:, 0] * 2)


def inputs(device: str) -> dict[str, Any]:
    names = ("out_mul_splitted", "sqrsum_splitted", "out_mul", "sqrsum", "out")
    return {
        **dict(zip(names, make(4, 6, 2, 24, device), strict=True)),
        "rms_group_size": SIZE,
        "rms_eps": EPS,
        "n_splits": 4,
    }


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[str], dict[str, Any]]:
    return lambda device: {**inputs(device), name: change(inputs(device)[name])}


REFUSALS = [
    Refusal("dtype", changed("sqrsum", lambda x: x.double()), r"sqrsum must be float32, got float64"),
    Refusal("rank", changed("out", lambda x: x[None]), r"out must have 2 dimensions, got 3.*"),
    Refusal("tokens", changed("out", lambda x: x[:5]), r"out must have shape .*, got \(5, 24\)"),
    Refusal("groups", changed("sqrsum_splitted", lambda x: x[:, :, :1].contiguous()), r"\w+ must have shape .*"),
    Refusal("strides", changed("out_mul_splitted", lambda x: x[..., ::2]), r"\w+ must have .*"),
    Refusal("parts", changed("n_splits", lambda x: 5), r"n_splits must be 4, the first size of .*, got 5"),
    Refusal("eps", changed("rms_eps", lambda x: "a"), r"rms_eps must be a .*, got str"),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
@pytest.mark.parametrize("device", DEVICES)
def test_refused(device: str, refusal: Refusal) -> None:
    refusal.check(NAME, mhc_reduce_partials_and_rmsnorm_fwd, device)
