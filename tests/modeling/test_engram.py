"""modeling.engram: gradients against autograd in float64, gradients kept in main_grad, and a module that learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engram.gates import gate_in_float64
from tilekernels.modeling.engram import EngramGate, EngramGateFn, engram_gate
from tilekernels.testing import assert_equal, calc_diff

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CLAMP, EPS = 1e-6, 1e-10
# Rounding to bf16, by calc_diff; the weights' gradients lose their fp32 to the parameters' dtype
ROUNDING = 3e-6


def make_inputs(shape: tuple[int, ...], hidden: int, device: str, is_masked: bool) -> dict[str, Any]:
    def numbers(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device).bfloat16().requires_grad_()

    mask = torch.rand(shape, device=device) < 0.5 if is_masked else None
    return {
        "hidden_states": numbers(*shape, 4, hidden),
        "kv": numbers(*shape, 5 * hidden),
        "weight_hidden": numbers(4, hidden),
        "weight_embed": numbers(4, hidden),
        "clamp_value": CLAMP,
        "eps": EPS,
        "image_token_mask": mask,
    }


def gate_and_gradients_in_float64(inputs: dict[str, Any], grad_out: torch.Tensor) -> list[torch.Tensor]:
    """The output, then the gradients of hidden_states, kv and both weights."""
    names = ("hidden_states", "kv", "weight_hidden", "weight_embed")
    wide = [inputs[name].detach().double().requires_grad_() for name in names]
    rows = wide[0].view(-1, *wide[0].shape[-2:])
    kv = wide[1].view(rows.shape[0], 5, rows.shape[2])
    output = gate_in_float64(rows, kv[:, :4], kv[:, 4], wide[2] * wide[3], EPS, CLAMP)[0]
    if inputs["image_token_mask"] is not None:
        output = torch.where(inputs["image_token_mask"].view(-1, 1, 1), rows, output)
    output = output.view(wide[0].shape)
    return [output, *torch.autograd.grad(output, wide, grad_out.double())]


@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("shape", [(6,), (2, 3), (2, 1, 5), (0,)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gradients(device: str, shape: tuple[int, ...], is_masked: bool) -> None:
    inputs = make_inputs(shape, 512, device, is_masked)
    grad_out = torch.randn_like(inputs["hidden_states"])
    output = engram_gate(*inputs.values())
    assert (output.shape, output.dtype) == (inputs["hidden_states"].shape, torch.bfloat16)
    output.backward(grad_out)
    expected = gate_and_gradients_in_float64(inputs, grad_out)
    names = ("hidden_states", "kv", "weight_hidden", "weight_embed")
    for found, wanted in zip((output, *(inputs[name].grad for name in names)), expected, strict=True):
        assert found.shape == wanted.shape
        assert calc_diff(found, wanted) < ROUNDING


@pytest.mark.parametrize("device", DEVICES)
def test_main_grad_takes_the_gradient(device: str) -> None:
    inputs = make_inputs((4,), 512, device, is_masked=False)
    weight = inputs["weight_hidden"]
    weight.main_grad = torch.ones((4, 512), device=device)
    grad_out = torch.randn_like(inputs["hidden_states"])
    for _ in range(2):
        engram_gate(*inputs.values()).backward(grad_out)
    _, _, _, exact, exact_embed = gate_and_gradients_in_float64(inputs, grad_out)
    assert weight.grad is None
    assert calc_diff(weight.main_grad, 1 + 2 * exact) < 1e-11
    assert calc_diff(inputs["weight_embed"].grad, 2 * exact_embed) < ROUNDING


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_wider_tensors_and_expanded_gradients(device: str) -> None:
    inputs = make_inputs((3, 2), 512, device, is_masked=False)
    plain = engram_gate(*inputs.values())
    plain.sum().backward()
    wide = {**inputs, "hidden_states": torch.cat([inputs["hidden_states"].detach()] * 2, dim=-1).requires_grad_()}
    wide["kv"] = torch.cat([torch.zeros_like(inputs["kv"]), inputs["kv"]], dim=-1).detach().requires_grad_()
    views = {**wide, "hidden_states": wide["hidden_states"][..., :512], "kv": wide["kv"][..., 5 * 512 :]}
    output = engram_gate(*views.values())
    output.sum().backward()
    assert_equal(output, plain)
    assert_equal(wide["hidden_states"].grad[..., :512], inputs["hidden_states"].grad, check_stride=False)
    assert_equal(wide["kv"].grad[..., 5 * 512 :], inputs["kv"].grad, check_stride=False)


def test_nothing_is_saved_without_gradients() -> None:
    inputs = make_inputs((3,), 512, "cpu", is_masked=False)
    expected = engram_gate(*inputs.values())
    assert expected.grad_fn is not None
    with torch.no_grad():
        output = EngramGateFn.apply(*inputs.values())
    assert output.grad_fn is None
    assert_equal(output, expected.detach())


def test_wrong_kv_is_named() -> None:
    inputs = make_inputs((3,), 512, "cpu", is_masked=False)
    inputs["kv"] = inputs["kv"][:, :2048]
    text = r"^modeling\.engram_gate: kv must have shape \(3, 2560\), got \(3, 2048\)$"
    with pytest.raises(ValueError, match=text):
        engram_gate(*inputs.values())


@pytest.mark.parametrize("device", DEVICES)
def test_module_learns_what_follows_an_ngram(device: str) -> None:
    """One of eight vectors for each bigram, the same for all streams: only the tables can tell."""
    torch.manual_seed(0)
    module = EngramGate(512, [[211, 223]], table_dim=16, device=device)
    assert {name for name, _ in module.named_parameters()} == {"table", "projection", "weight_hidden", "weight_embed"}
    ids = torch.randint(30, (64, 2), dtype=torch.int32, device=device)
    targets = torch.randn((8, 1, 512), device=device)[ids.sum(1) % 8]
    states = torch.randn((64, 4, 512), device=device).bfloat16()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (module(states, ids).float() - states.float() - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_module_passes_image_tokens_on(device: str) -> None:
    module = EngramGate(512, [[50, 51], [52, 53]], table_dim=8, device=device)
    ids = torch.randint(1000, (2, 7, 3), dtype=torch.int32, device=device)
    states = torch.randn((2, 7, 4, 512), device=device).bfloat16()
    mask = torch.rand((2, 7), device=device) < 0.5
    output = module(states, ids, mask)
    assert_equal(output[mask], states[mask])
    assert not torch.equal(output[~mask], states[~mask])
    assert_equal(output[~mask], module(states, ids)[~mask])
    assert "table_rows=206" in repr(module)
