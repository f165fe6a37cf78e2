"""mhc_multilayer_recompute: the bits of mhc_pre_apply_mix_fwd and mhc_post_fwd, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.mhc.streams import Batch, misaligned
from tilekernels.mhc import mhc_multilayer_recompute, mhc_post_fwd, mhc_pre_apply_mix_fwd
from tilekernels.testing import assert_equal

NAME = "mhc.mhc_multilayer_recompute"

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make_inputs(num_tokens: int, num_layers: int, num_post: int, mult: int, hidden: int, device: str) -> dict[str, Any]:
    batch = Batch(num_tokens, mult, hidden, device)
    return {
        "initial_residual": batch.streams(),
        "pre_mix_list": [batch.mix().unsqueeze(-1) for _ in range(num_layers)],
        "layer_output_list": [batch.layer() for _ in range(num_post)],
        "post_mix_list": [batch.mix().unsqueeze(-1) for _ in range(num_post)],
        "comb_mix_list": [batch.matrix() / 2 for _ in range(num_post)],
        "layer_input_list": [batch.layer() for _ in range(num_layers)],
        "residual_list": [batch.streams() for _ in range(num_post)],
    }


def layer_by_layer(inputs: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    streams, layer_inputs, residuals = inputs["initial_residual"], [], []
    for layer, pre_mix in enumerate(inputs["pre_mix_list"]):
        layer_inputs.append(torch.empty_like(inputs["layer_input_list"][layer]))
        mhc_pre_apply_mix_fwd(streams, pre_mix.squeeze(-1), layer_inputs[-1])
        if layer < len(inputs["residual_list"]):
            output, post, comb = (inputs[f"{name}_list"][layer] for name in ("layer_output", "post_mix", "comb_mix"))
            streams = mhc_post_fwd(output, streams, post, comb)
            residuals.append(streams)
    return layer_inputs, residuals


def check(inputs: dict[str, Any]) -> None:
    layer_inputs, residuals = layer_by_layer(inputs)
    mhc_multilayer_recompute(**inputs)
    for actual, expected in zip(inputs["layer_input_list"], layer_inputs, strict=True):
        assert_equal(actual, expected)
    for actual, expected in zip(inputs["residual_list"], residuals, strict=True):
        assert_equal(actual, expected)


# (layers, layers with an output, m, hidden); a launch takes ten layers
LISTS = [
    (1, 0, 4, 64),
    (1, 1, 4, 64),
    (3, 2, 4, 2560),
    (10, 9, 4, 256),
    (10, 10, 4, 256),
    (11, 10, 4, 256),
    (11, 11, 4, 72),
    (25, 24, 4, 64),
    (3, 3, 4, 57),
    (11, 11, 2, 129),
    (4, 3, 2, 1032),
    (2, 2, 8, 1288),
    (12, 11, 8, 9),
]


@every_device
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("lists", LISTS, ids=lambda lists: "-".join(map(str, lists)))
def test_equals_the_chain_of_operators(lists: tuple[int, int, int, int], num_tokens: int, device: str) -> None:
    check(make_inputs(num_tokens, *lists, device))


@pytest.mark.gpu
@pytest.mark.parametrize("lists", [(3, 2, 4, 2560), (10, 10, 4, 7168), (10, 9, 4, 4096)], ids=str)
def test_equals_the_chain_of_operators_for_many_tokens(lists: tuple[int, int, int, int]) -> None:
    check(make_inputs(2049, *lists, "cuda"))


@every_device
def test_takes_leading_dimensions_and_flat_mixes(device: str) -> None:
    inputs = make_inputs(6, 3, 3, 4, 64, device)
    expected = layer_by_layer(inputs)
    inputs = {
        name: [each.view(2, 3, *each.shape[1:]) for each in value]
        if isinstance(value, list)
        else value.view(2, 3, 4, 64)
        for name, value in inputs.items()
    }
    inputs["pre_mix_list"] = tuple(each.squeeze(-1) for each in inputs["pre_mix_list"])
    mhc_multilayer_recompute(**inputs)
    for actual, wanted in zip(
        inputs["layer_input_list"] + inputs["residual_list"], expected[0] + expected[1], strict=True
    ):
        assert_equal(actual.view(wanted.shape), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pre_mix", "layer_output", "post_mix", "comb_mix", "layer_input", "residual"])
def test_misaligned_tensors_take_another_form(name: str) -> None:
    inputs = make_inputs(5, 12, 12, 4, 256, "cuda")
    inputs[f"{name}_list"][11] = misaligned(inputs[f"{name}_list"][11])
    check(inputs)


@pytest.mark.gpu
def test_replays_in_a_graph() -> None:
    """No table is copied to the device: the graph holds the pointers."""
    inputs = make_inputs(33, 12, 11, 4, 2560, "cuda")
    expected = layer_by_layer(inputs)
    mhc_multilayer_recompute(**inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mhc_multilayer_recompute(**inputs)
    for tensor in inputs["layer_input_list"] + inputs["residual_list"]:
        tensor.fill_(7.0)
    graph.replay()
    for actual, wanted in zip(
        inputs["layer_input_list"] + inputs["residual_list"], expected[0] + expected[1], strict=True
    ):
        assert_equal(actual, wanted)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("pre_mix_list", [], "pre_mix_list must hold at least 1 tensor, got 0"),
        ("pre_mix_list", None, "pre_mix_list must be a list of tensors, got NoneType"),
        ("layer_output_list", [], "layer_output_list must hold 2 or 3 tensors, as many as layers or one less, got 0"),
        ("residual_list", [], "residual_list must hold 3 tensors, got 0"),
        ("layer_input_list", [], "layer_input_list must hold 3 tensors, got 0"),
        ("comb_mix_list", [None] * 3, r"comb_mix_list\[0\] must be a tensor, got NoneType"),
        (
            "residual_list",
            [torch.zeros(5, 4, 64).bfloat16()] * 2 + [torch.zeros(5, 4, 65).bfloat16()],
            r"residual_list\[2\] must have shape \(5, 4, 64\), got \(5, 4, 65\)",
        ),
        ("initial_residual", torch.zeros(5, 3, 64).bfloat16(), "initial_residual must have 2, 4 or 8 .*, got 3"),
        ("initial_residual", torch.zeros(5, 4, 64), "initial_residual must be bfloat16, got float32"),
    ],
    ids=["no layer", "no list", "no output", "no residual", "no input", "None", "hidden", "3 streams", "fp32"],
)
def test_refused(name: str, value: Any, text: str) -> None:
    inputs = make_inputs(5, 3, 3, 4, 64, "cpu")
    before = [each.clone() for each in inputs["residual_list"]]
    with pytest.raises((ValueError, TypeError), match=rf"^{NAME}: {text}$"):
        mhc_multilayer_recompute(**{**inputs, name: value})
    for tensor, content in zip(inputs["residual_list"], before, strict=True):
        assert_equal(tensor, content)
