"""Generation 1's engram: the main package's operators with keys and values apart."""

from __future__ import annotations

import pytest
import torch

from tests.engram.gates import Gate
from tilekernels import engram
from tilekernels.testing import assert_equal, calc_diff
from tilekernels.v1 import engram as v1
from tilekernels.v1.modeling.engram import EngramGateFn, engram_gate
from tilekernels.v1.torch.engram import engram_gate_ref, engram_hash_ref, make_offsets

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_hash(device: str) -> None:
    sizes = torch.randint(100_000, 1_000_000, (2, 2, 8), dtype=torch.int32, device=device)
    ids = torch.randint(100_000, (77, 3), dtype=torch.int32, device=device)
    multipliers = torch.randint(100_000, (2, 3), device=device)
    call = ids, multipliers, sizes, make_offsets(sizes)
    assert_equal(v1.engram_hash(*call), engram_hash_ref(*call))


@pytest.mark.parametrize("device", DEVICES)
def test_gate(device: str) -> None:
    call = Gate(9, 512, layout="pair").make(device)
    x, (k, v), weight = call["hidden_states"], call["kv"], call["weight_fused"]
    expected = engram.engram_gate_fwd(x, (k, v), weight, 1e-20, 1e-6)
    found = v1.engram_gate_fwd(x, k, v, weight, 1e-20, 1e-6)
    for each, wanted in zip(found, expected, strict=True):
        assert each is not None
        assert wanted is not None
        assert_equal(each, wanted)
    grad_out = torch.randn_like(x)
    grads = v1.engram_gate_bwd(grad_out, x, k, v, weight, *found[1:], 1e-6)
    grad_x, pair, grad_w = engram.engram_gate_bwd(grad_out, x, (k, v), weight, *expected[1:], 1e-6)
    for each, wanted in zip(grads, (grad_x, *pair, grad_w), strict=True):
        assert_equal(each, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_the_reference(device: str) -> None:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16().requires_grad_()

    inputs = [numbers(2, 5, 4, 512), numbers(2, 5, 4, 512), numbers(2, 5, 512), numbers(4, 512), numbers(4, 512)]
    grad_out = torch.randn_like(inputs[0])
    output = engram_gate(*inputs, 1e-6, 1e-10)
    grads = torch.autograd.grad(output, inputs, grad_out)
    wide = [each.detach().double().requires_grad_() for each in inputs]
    exact = engram_gate_ref(*wide, 1e-6, 1e-10)
    assert isinstance(exact, torch.Tensor)
    for found, wanted in zip(grads, torch.autograd.grad(exact, wide, grad_out.double()), strict=True):
        assert found.shape == wanted.shape
        assert calc_diff(found, wanted) < 3e-6
    assert_equal(EngramGateFn.apply(*inputs, 1e-6, 1e-10), output)
    reference = engram_gate_ref(*inputs, 1e-6, 1e-10, save_for_backward=True)
    assert len(reference) == 5
    assert calc_diff(output, reference[0]) < 1e-8


@pytest.mark.usefixtures("needs_extension")
def test_refusals_are_assertion_errors() -> None:
    call = Gate(3, 512, layout="pair").make("cpu")
    x, (k, _), weight = call["hidden_states"], call["kv"], call["weight_fused"]
    with pytest.raises(AssertionError, match=r"^engram\.engram_gate_fwd: v must have 2 dimensions"):
        v1.engram_gate_fwd(x, k, k, weight, 1e-20, 1e-6)
    ids, multipliers = torch.zeros((3, 3), dtype=torch.int32), torch.ones((1, 3), dtype=torch.int64)
    sizes = torch.ones((2, 2, 8), dtype=torch.int32)
    with pytest.raises(AssertionError, match=r"^engram\.engram_hash: "):
        v1.engram_hash(ids, multipliers, sizes, make_offsets(sizes))
