"""SwiGLU of generation 1: rows that name their token, slot and expert; scales of 128 channels or of whole rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilekernels import v1
from tilekernels.testing import assert_equal

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])

NUM_TOKENS, NUM_TOPK, NUM_EXPERTS = 60, 4, 5


def make_routing(device: str, alignment: int = 16) -> dict[str, torch.Tensor]:
    """The mapping of random choices, some of which go nowhere."""
    chosen = torch.rand((NUM_TOKENS, 2 * NUM_EXPERTS), device=device).topk(NUM_TOPK, dim=1).indices
    topk_idx = torch.where(chosen < NUM_EXPERTS, chosen, -1)
    names = ("pos_to_expert", "pos_to_token", "pos_to_token_topk", "token_topk_to_pos")
    mapping = v1.moe.get_fused_mapping(topk_idx, NUM_EXPERTS, 0, alignment)
    return dict(zip(names, mapping, strict=False))


def equal_where(valid: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert_equal(actual.float()[valid], expected.float()[valid])


@pytest.mark.parametrize("clamp_value", [None, 0.5])
@pytest.mark.parametrize("with_expert", [False, True], ids=["all_rows", "rows_of_experts"])
@pytest.mark.parametrize("with_weights", [False, True], ids=["no_weights", "weights"])
@pytest.mark.parametrize(
    ("group", "flags"), [(128, {}), (128, {"use_tma_aligned_col_major_sf": True}), (0, {}), (0, {"round_sf": True})]
)
@every_device
def test_forward(
    device: str, group: int, flags: dict[str, bool], with_weights: bool, with_expert: bool, clamp_value: float | None
) -> None:
    routing, hidden = make_routing(device), 1280
    num_rows = routing["pos_to_expert"].numel()
    x = torch.randn((num_rows, 2 * hidden), device=device).bfloat16()
    weights = {"pos_to_token_topk": routing["pos_to_token_topk"], "topk_weights": torch.rand((60, 4), device=device)}
    options: dict[str, Any] = {"swiglu_clamp_value": clamp_value, **(weights if with_weights else {})}
    valid = routing["pos_to_expert"] >= 0 if with_expert else torch.ones(num_rows, dtype=torch.bool, device=device)
    count = None if clamp_value is None else torch.ones(3, dtype=torch.int64, device=device)
    expert = routing["pos_to_expert"] if with_expert else None
    data, sf = v1.quant.swiglu_forward_and_per_token_cast(
        x, "e4m3", group or hidden, **options, pos_to_expert=expert, clamped_count=count, **flags
    )
    expected = v1.torch.swiglu_forward(x, **options)
    expected_data, expected_sf = v1.torch.cast(expected, "e4m3", (1, group or hidden), **flags)
    equal_where(valid, data, expected_data)
    equal_where(valid, sf, expected_sf)
    if count is not None and clamp_value is not None:
        gate, up = x[valid].float().chunk(2, dim=1)
        limits = (gate > clamp_value, up > clamp_value, up < -clamp_value)
        assert count.tolist() == [1 + int(each.sum()) for each in limits]


@every_device
def test_lower_bound_of_maxima(device: str) -> None:
    x = torch.zeros((3, 256), device=device, dtype=torch.bfloat16)
    _, sf = v1.quant.swiglu_forward_and_per_token_cast(x, "e4m3", 128, sf_clamp_min=448.0)
    assert torch.all(sf == 1)


@pytest.mark.parametrize("clamp_value", [None, 0.5])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("round_sf", [False, True])
@every_device
def test_backward(device: str, round_sf: bool, group: int, clamp_value: float | None) -> None:
    routing, hidden = make_routing(device, group), 512
    num_rows = routing["pos_to_expert"].numel()
    x = v1.torch.cast(torch.randn((num_rows, 2 * hidden), device=device), "e4m3", (1, group))
    grad = torch.randn((num_rows, hidden), device=device).bfloat16()
    weight = torch.rand((NUM_TOKENS, NUM_TOPK), device=device)
    places = (routing["pos_to_token_topk"], routing["token_topk_to_pos"])
    out, (data, sf), x_grad, weight_grad = v1.quant.swiglu_backward_and_per_token_cast(
        x, grad, weight, *places, group, round_sf, clamp_value
    )
    expected = v1.torch.swiglu_backward(x, grad, weight, *places, group, clamp_value)
    assert_equal(out, expected[0].bfloat16())
    assert_equal(x_grad, expected[1].bfloat16())
    expected_data, expected_sf = v1.torch.cast(expected[1], "e4m3", (1, group), round_sf=round_sf)
    assert_equal(data, expected_data)
    assert_equal(sf, expected_sf)
    assert torch.all(weight_grad[places[1] < 0] == 0)
    torch.testing.assert_close(weight_grad, expected[2], rtol=1e-4, atol=1e-4)


@every_device
def test_no_rows(device: str) -> None:
    x = torch.zeros((0, 256), device=device).to(torch.float8_e4m3fn), torch.zeros((0, 2), device=device)
    none = torch.zeros(0, dtype=torch.int32, device=device)
    places = torch.full((3, 2), -1, dtype=torch.int32, device=device)
    grad = torch.zeros((0, 128), device=device, dtype=torch.bfloat16)
    out, _, _, weight_grad = v1.quant.swiglu_backward_and_per_token_cast(
        x, grad, torch.ones((3, 2), device=device), none, places, 128
    )
    assert out.shape == (0, 128)
    assert_equal(weight_grad, torch.zeros((3, 2), device=device))


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("num_per_channels must be 128 or the 256 channels, got 0", {"num_per_channels": 0}),
        (
            "use_tma_aligned_col_major_sf must be False for one scale a row, got True",
            {"num_per_channels": 256, "use_tma_aligned_col_major_sf": True},
        ),
        (
            "pos_to_token_topk must be given together with topk_weights, got pos_to_token_topk alone",
            {"pos_to_token_topk": torch.zeros(2, dtype=torch.int32)},
        ),
        (
            r"clamped_count must have shape \(3,\), got \(4,\)",
            {"swiglu_clamp_value": 1.0, "clamped_count": torch.zeros(4, dtype=torch.int64)},
        ),
        ("swiglu_clamp_value must be at least 0, got -1.0", {"swiglu_clamp_value": -1.0}),
    ],
)
def test_refused(text: str, changes: dict[str, Any]) -> None:
    arguments = {"x": torch.zeros((2, 512), dtype=torch.bfloat16), "fmt": "e4m3", "num_per_channels": 128, **changes}
    with pytest.raises(AssertionError, match=rf"^quant\.swiglu_forward_and_per_token_cast: {text}"):
        v1.quant.swiglu_forward_and_per_token_cast(**arguments)


@every_device
def test_other_forms(device: str) -> None:
    x = torch.randn((40, 128), device=device)
    pair = v1.quant.per_token_cast_to_e5m6(x, 128)
    assert_equal(v1.quant.cast_back_e5m6(pair, "fp32", (1, 128)), v1.torch.cast_back_from_e5m6(pair, "fp32", (1, 128)))
    positions = torch.arange(16, device=device, dtype=torch.int32) * 2
    actual = v1.quant.per_channel_cast_fused(x, "e4m3", 128, True, pos_to_token=positions)
    expected = v1.torch.per_channel_cast_fused(x, 128, None, True, positions)
    assert_equal(actual[0], expected[0])
    assert_equal(actual[1], expected[1])
