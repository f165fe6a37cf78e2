"""The lists of sizes that the operators' published tests go through, in their tolerances, against plain torch.

With leading dimensions (1 or 2, number of tokens). Other tests look closer, at fewer of these sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mhc.inputs import needs_memory
from tilekernels.modeling.mhc import ops
from tilekernels.modeling.mhc import reference as ref

pytestmark = pytest.mark.gpu

EPS = 1e-6
MIXES = {"rtol": 1e-5, "atol": 2e-5}

every_number = pytest.mark.parametrize("tokens", [(1, 1024), (2, 1024), (1, 4096), (2, 4096)], ids=str)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def bf16(*shape: int) -> torch.Tensor:
    return randn(*shape, dtype=torch.bfloat16)


def compare(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: list[torch.Tensor],
    tolerances: list[dict[str, float]],
    out_tolerance: dict[str, float],
) -> None:
    """Results, and the gradients of all inputs."""
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    outputs, expected = function(*inputs), reference(*copies)
    if isinstance(outputs, torch.Tensor):
        outputs, expected = (outputs,), (expected,)
    grads = [torch.randn_like(x) for x in outputs]
    for x, y in zip(outputs, expected, strict=True):
        torch.testing.assert_close(x, y, **out_tolerance)
    torch.autograd.backward(outputs, grads)
    torch.autograd.backward(expected, grads)
    for x, y, tolerance in zip(inputs, copies, tolerances, strict=True):
        torch.testing.assert_close(x.grad, y.grad, **tolerance)


@every_number
@pytest.mark.parametrize("mult", [2, 4, 8])
@pytest.mark.parametrize("hidden", [1280, 2560, 7168])
def test_expand(tokens: tuple[int, int], mult: int, hidden: int) -> None:
    x = bf16(*tokens, hidden)
    compare(lambda x: ops.expand_to_mhc(x, mult), lambda x: ref.expand_to_mhc_ref(x, mult), [x], [{}], {})


@pytest.mark.parametrize("num_tokens", [4096, 8192])
@pytest.mark.parametrize("hidden", [1280, 2560, 7168])
@pytest.mark.parametrize("has_weight", [False, True], ids=["plain", "weight"])
def test_pre_norm_fn(num_tokens: int, hidden: int, has_weight: bool) -> None:
    """The gradient of the residual is left in what its storage holds."""
    residual, fn = bf16(1, num_tokens, 4, hidden), (randn(24, 4 * hidden).detach() * 1e-4).requires_grad_()
    weight = (torch.rand(4 * hidden, device="cuda") + 0.5).requires_grad_() if has_weight else None
    exact = [None if x is None else x.detach().clone().requires_grad_() for x in (residual, fn, weight)]
    left = torch.zeros_like(residual)
    storage: Any = residual.untyped_storage()
    storage.grad_from_mhc_post = left
    out, expected = ops.mhc_pre_norm_fn(residual, fn, weight, EPS), ref.mhc_pre_norm_fn_ref(*exact, EPS)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)
    # An eighth: nothing is rounded to tf32 in the reference. That costs each product up to 2^-11 of it, and the sum
    # over 8192 tokens 0.034 at a quarter: errors grow with the gradients that come in, the tolerance is one number.
    grad = torch.randn_like(out) / 8
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(left, exact[0].grad)  # type: ignore[union-attr]
    torch.testing.assert_close(fn.grad, exact[1].grad, rtol=1e-3, atol=3e-2)  # type: ignore[union-attr]


@pytest.mark.parametrize("num_tokens", [13, 48, 512])
@pytest.mark.parametrize("hidden", [1280, 2560, 4096, 7168])
def test_pre_norm_fn_in_parts(num_tokens: int, hidden: int) -> None:
    residual, fn = bf16(1, num_tokens, 4, hidden), randn(24, 4 * hidden).detach() * 1e-4
    out = ops.mhc_pre_norm_fn(residual, fn, None, EPS, n_splits=16)
    torch.testing.assert_close(out, ref.mhc_pre_norm_fn_ref(residual, fn, None, EPS), rtol=1e-3, atol=1e-3)


@every_number
def test_pre_split_mixes(tokens: tuple[int, int]) -> None:
    constants = 4, 2.0, 1e-2
    compare(
        lambda *each: ops.mhc_pre_split_mixes(*each, *constants),
        lambda *each: ref.mhc_pre_split_mixes_ref(*each, *constants),
        [randn(*tokens, 24), randn(3), randn(24)],
        # Sums over all tokens, of which some cancel: in the size of their terms
        [MIXES, {"rtol": 1e-4, "atol": 2e-3}, {"rtol": 1e-4, "atol": 2e-3}],
        MIXES,
    )


@pytest.mark.parametrize("tokens", list(itertools.product((1, 2), (1, 1024, 4096))), ids=str)
def test_sinkhorn(tokens: tuple[int, int]) -> None:
    compare(ops.sinkhorn_normalize, ref.sinkhorn_normalize_ref, [randn(*tokens, 4, 4)], [{}], {})


@every_number
@pytest.mark.parametrize("hidden", [1280, 2560, 7680])
def test_pre_apply_mix(tokens: tuple[int, int], hidden: int) -> None:
    tolerance = {"rtol": 1e-3, "atol": 1e-2}
    streams, mix = bf16(*tokens, 4, hidden), randn(*tokens, 4, 1)
    # Results are rounded to bf16, sums over channels are as large as their number
    bfloat = {"rtol": 1.6e-2, "atol": 1e-2}
    compare(ops.mhc_pre_apply_mix, ref.mhc_pre_apply_mix_ref, [streams, mix], [bfloat, tolerance], bfloat)


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("hidden", [1280, 2560, 7168])
def test_post(num_batches: int, hidden: int) -> None:
    tokens = num_batches, 4096
    inputs = [bf16(*tokens, hidden), bf16(*tokens, 4, hidden), randn(*tokens, 4, 1), randn(*tokens, 4, 4)]
    # bf16 of sums that cancel: one rounding of their terms
    bfloat = {"rtol": 1.6e-2, "atol": 1e-2}
    sums = {"rtol": 1e-3, "atol": 1e-3}
    compare(ops.mhc_post, ref.mhc_post_ref, inputs, [bfloat, bfloat, sums, sums], bfloat)


@every_number
def test_head_compute_mix(tokens: tuple[int, int]) -> None:
    sums = {"rtol": 1e-4, "atol": 1e-3}
    compare(
        lambda *each: ops.mhc_head_compute_mix(*each, 1e-2),
        lambda *each: ref.mhc_head_compute_mix_ref(*each, 1e-2),
        [randn(*tokens, 4), randn(1), randn(4)],
        [{"rtol": 1e-4, "atol": 1e-5}, sums, sums],
        {"rtol": 1e-4, "atol": 1e-5},
    )


@pytest.mark.parametrize("num_tokens", [512, 1024, 2048, 8192])
@pytest.mark.parametrize("hidden", [1280, 2560, 4096])
def test_pre_big_fuse(num_tokens: int, hidden: int) -> None:
    """To the bit what the steps give one after the other."""
    residual = bf16(1, num_tokens, 4, hidden).detach()
    fn, scale, base = randn(24, 4 * hidden).detach() * 1e-4, randn(3).detach(), randn(24).detach()
    mixes = ops.mhc_pre_norm_fn(residual, fn, None, EPS, fuse_grad_acc=False, n_splits=16)
    pre, post, comb = ops.mhc_pre_split_mixes(mixes, scale, base, 4, 1.0, EPS)
    expected = post, ops.sinkhorn_normalize(comb, 10, EPS), ops.mhc_pre_apply_mix(residual, pre)
    results = ops.mhc_pre_big_fuse(residual, fn, scale, base, EPS, EPS, EPS, 1.0, 10, n_splits=16)
    for x, y in zip(results, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("num_layers", "num_post", "hidden"),
    [
        (1, 1, 2560), (3, 2, 2560), (3, 3, 2560),
        *((10, num_post, hidden) for num_post in (9, 10) for hidden in (2560, 4096, 7168, 8192)),
    ],
)  # fmt: skip
@torch.no_grad()
def test_multilayer_recompute(num_layers: int, num_post: int, hidden: int) -> None:
    """To the bit what the layers give one after the other."""
    num_tokens = 8192
    if reason := needs_memory(num_tokens * hidden * 2 * (5 * num_layers + 9)):
        pytest.skip(reason)
    initial = bf16(num_tokens, 4, hidden)
    pre = [randn(num_tokens, 4, 1) for _ in range(num_layers)]
    outputs = [bf16(num_tokens, hidden) for _ in range(num_post)]
    post = [randn(num_tokens, 4, 1) for _ in range(num_post)]
    comb = [randn(num_tokens, 4, 4) / 2 for _ in range(num_post)]
    layer_inputs = [torch.empty_like(outputs[0]) for _ in range(num_layers)]
    residuals = [torch.empty_like(initial) for _ in range(num_post)]
    ops.mhc_multilayer_recompute(initial, pre, outputs, post, comb, layer_inputs, residuals)
    streams = initial
    for layer in range(num_layers):
        assert torch.equal(layer_inputs[layer], ops.mhc_pre_apply_mix(streams, pre[layer]))
        if layer < num_post:
            streams = ops.mhc_post(outputs[layer], streams, post[layer], comb[layer])
            assert torch.equal(residuals[layer], streams)
