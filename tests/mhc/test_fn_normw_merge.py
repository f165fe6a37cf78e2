"""mhc_fn_normw_merge_fwd and _bwd: exact products; gradients that accumulate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mhc.inputs import randn
from tests.refusals import Refusal
from tilekernels.mhc import mhc_fn_normw_merge_bwd, mhc_fn_normw_merge_fwd
from tilekernels.testing import assert_equal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(0, 8), (8, 0), (1, 1), (3, 129), (24, 1000), (24, 4 * 1280), (80, 333), (24, 4 * 7168)]

# Each sum of a column is of at most 80 fp32 products
RTOL, ATOL = 1e-5, 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("device", DEVICES)
def test_forward_is_exact(device: str, offset: int, shape: tuple[int, int]) -> None:
    fn, normw = randn(*shape, device=device, offset=offset), randn(shape[1], device=device)
    out_fn = randn(*shape, device=device)
    mhc_fn_normw_merge_fwd(fn, normw, out_fn)
    assert_equal(out_fn, (fn.double() * normw.double()).float())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_backward_adds_the_gradients(device: str, shape: tuple[int, int]) -> None:
    fn, normw, grad = (randn(*each, device=device) for each in (shape, shape[1:], shape))
    fn_grad, normw_grad = randn(*shape, device=device), randn(shape[1], device=device)
    wide = [each.double().requires_grad_() for each in (fn, normw)]
    (wide[0] * wide[1]).backward(grad.double())
    expected = [fn_grad.double() + wide[0].grad, normw_grad.double() + wide[1].grad]
    mhc_fn_normw_merge_bwd(fn, normw, grad, fn_grad, normw_grad)
    torch.testing.assert_close(fn_grad.double(), expected[0], rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(normw_grad.double(), expected[1], rtol=RTOL, atol=ATOL)


def inputs(device: str) -> dict[str, torch.Tensor]:
    names = ("fn", "normw", "out_fn_grad", "fn_grad", "normw_grad")
    return {name: torch.ones((16,) if "normw" in name else (4, 16), device=device) for name in names}


def changed(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[str], dict[str, Any]]:
    return lambda device: {**inputs(device), name: change(inputs(device)[name])}


REFUSALS = [
    Refusal("dtype", changed("fn", lambda x: x.bfloat16()), r"fn must be float32, got bfloat16"),
    Refusal("length", changed("normw", lambda x: x[:15]), r"normw must have shape .*num_columns.*, got \(15,\)"),
    Refusal("rank", changed("normw_grad", lambda x: x[None]), r"normw_grad must have 1 dimension.*, got 2.*"),
    Refusal("rows", changed("out_fn_grad", lambda x: x[:3]), r"out_fn_grad must have shape .*, got \(3, 16\)"),
    Refusal("strides", changed("fn_grad", lambda x: x.t().contiguous().t()), r"fn_grad must have strides .*"),
    Refusal("None", changed("fn", lambda x: None), r"fn must be a .*tensor, got None"),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
@pytest.mark.parametrize("device", DEVICES)
def test_refused(device: str, refusal: Refusal) -> None:
    refusal.check("mhc.mhc_fn_normw_merge_bwd", mhc_fn_normw_merge_bwd, device)
