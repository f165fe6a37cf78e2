"""Generation 1's settings of expert parallelism, for what follows a mapping to experts: the defaults, and with
TK_FULL_TEST=1 all of them. A small one runs on the CPU too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tilekernels import v1
from tilekernels.testing import assert_equal
from tilekernels.testing.generator import generate_hidden_sizes, generate_moe_params, generate_topk_idx

Params = dict[str, int]

SMALL = {"num_send_tokens": 30, "num_topk": 2, "num_experts": 3, "num_ep_ranks": 2}
MOST_ROWS = 4096
CLAMPS = (None, 10.0, 0.5)
ROUNDED = {"use_tma_aligned_col_major_sf": False, "round_sf": True, "use_packed_ue8m0": False}
PACKED = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}

SETTINGS = list(generate_moe_params())

every_setting = pytest.mark.parametrize(
    ("device", "params"),
    [
        pytest.param("cpu", SMALL, id="cpu"),
        *(
            pytest.param("cuda", params, id="-".join(f"{value}" for value in params.values()), marks=pytest.mark.gpu)
            for params in SETTINGS
        ),
    ],
)


def make_mapping(params: Params, alignment: int, device: str) -> tuple[torch.Tensor, ...]:
    """(pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos) and random weights of the choices."""
    topk_idx = generate_topk_idx(params, device)
    mapping = v1.moe.get_fused_mapping(topk_idx, params["num_experts"], 0, alignment)
    return (*mapping[:4], torch.rand(topk_idx.shape, device=device))


def size_of(params: Params, multiple: int) -> int:
    """One of the published sizes, another one for the next setting: all of them with all would take an hour."""
    sizes = generate_hidden_sizes(multiple)
    return 512 if params is SMALL else sizes[SETTINGS.index(params) % len(sizes)]


def same_rows(valid: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> None:
    if actual.dtype is torch.float8_e4m3fn:
        actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
    assert_equal(actual[valid], expected[valid])


@every_setting
def test_swiglu_forward(device: str, params: Params) -> None:
    expert, _, place, _, weights = make_mapping(params, 16, device)
    settings = ((128, ROUNDED), (128, PACKED), (0, ROUNDED))
    hidden = size_of(params, 256) // 2
    x = torch.randn((place.numel(), 2 * hidden), device=device).bfloat16()
    for clamp in CLAMPS:
        for with_weights in (False, True):
            options: dict[str, Any] = {"swiglu_clamp_value": clamp}
            if with_weights:
                options |= {"pos_to_token_topk": place, "topk_weights": weights}
            values = v1.torch.swiglu_forward(x, **options)
            for (group, flags), with_expert in itertools.product(settings, (False, True)):
                valid = expert >= 0 if with_expert else torch.ones_like(expert, dtype=torch.bool)
                is_counted = clamp is not None and group != 0
                count = torch.zeros(3, dtype=torch.int64, device=device) if is_counted else None
                more = {"pos_to_expert": expert if with_expert else None, "clamped_count": count}
                data, sf = v1.quant.swiglu_forward_and_per_token_cast(
                    x, "e4m3", group or hidden, **options, **more, **flags
                )
                expected, expected_sf = v1.torch.cast(values, "e4m3", (1, group or hidden), **flags)
                same_rows(valid, data, expected)
                same_rows(valid, sf, expected_sf)
                if count is not None and clamp is not None:
                    gate, up = x[valid].chunk(2, dim=1)
                    assert count.tolist() == [int(each.sum()) for each in (gate > clamp, up > clamp, up < -clamp)]


def parts_of(num_rows: int) -> Iterator[slice]:
    """Rows that the references take at once: what they compute in fp32 of all rows is too much for several workers."""
    for start in range(0, max(num_rows, 1), MOST_ROWS):
        yield slice(start, min(start + MOST_ROWS, num_rows))


@pytest.mark.parametrize("group", [32, 128])
@every_setting
def test_swiglu_backward(device: str, params: Params, group: int) -> None:
    _, _, place, position, weights = make_mapping(params, group, device)
    num_rows, hidden = place.numel(), size_of(params, 256)
    drawn = [
        v1.torch.cast(torch.randn((part.stop - part.start, 2 * hidden), device=device), "e4m3", (1, group))
        for part in parts_of(num_rows)
    ]
    data = torch.cat([data.view(torch.uint8) for data, _ in drawn]).view(torch.float8_e4m3fn)
    x = data, torch.cat([sf for _, sf in drawn])
    grad = torch.randn((num_rows, hidden), device=device).bfloat16()
    for clamp in CLAMPS:
        results = [
            v1.quant.swiglu_backward_and_per_token_cast(
                x, grad, weights, place, position, group, round_sf, swiglu_clamp_value=clamp
            )
            for round_sf in (False, True)
        ]
        weight_grad = torch.zeros_like(weights)
        for part in parts_of(num_rows):
            inside = (position >= part.start) & (position < part.stop)
            places = place[part], torch.where(inside, position - part.start, -1)
            pair = x[0][part], x[1][part]
            expected = v1.torch.swiglu_backward(pair, grad[part], weights, *places, group, clamp)
            weight_grad += expected[2]
            for (out, (data, sf), x_grad, _), round_sf in zip(results, (False, True), strict=True):
                assert_equal(out[part], expected[0].bfloat16())
                assert_equal(x_grad[part], expected[1].bfloat16())
                expected_data, expected_sf = v1.torch.cast(expected[1], "e4m3", (1, group), round_sf=round_sf)
                assert_equal(data[part], expected_data)
                assert_equal(sf[part], expected_sf)
        for *_, actual in results:
            torch.testing.assert_close(actual, weight_grad, rtol=1e-4, atol=1e-4)


@every_setting
def test_channel_cast_of_expanded_rows(device: str, params: Params) -> None:
    _, token, _, _, weights = make_mapping(params, 128, device)
    hidden = size_of(params, 128)
    plain = torch.randn((weights.shape[0], hidden), device=device)
    for kind in ("bf16", "pair"):
        x: Any = v1.torch.cast(plain, "e4m3", (1, 128)) if kind == "pair" else plain.bfloat16()
        group = 128 if kind == "pair" else None
        for round_sf in (False, True):
            actual = v1.quant.per_channel_cast_fused(x, "e4m3", 128, round_sf, group, token)
            expected = v1.torch.per_channel_cast_fused(x, 128, group, round_sf, token)
            assert_equal(actual[0], expected[0])
            assert_equal(actual[1], expected[1])
