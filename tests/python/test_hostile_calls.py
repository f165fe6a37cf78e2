"""Calls that a check once let through: a meta tensor among others, outputs that overlap themselves, odd numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilekernels
from tilekernels import ArgumentError, ArgumentTypeError, config, moe, quant

pytestmark = pytest.mark.usefixtures("needs_extension")


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "meta bias beside CPU logits": (
        lambda: moe.moe_topk_gate(torch.randn(4, 16), 2, False, 0, 1.0, 0, bias=meta(16)),
        ArgumentError, "moe.moe_topk_gate_forward: bias must be on cpu like logits, got meta"),
    "meta scales beside CPU data": (
        lambda: quant.per_token_cast_with_precomputed_sf(torch.randn(4, 128), "e4m3", 128, meta(4, 1)),
        ArgumentError, "quant.per_token_cast_with_precomputed_sf: sf must be on cpu like x, got meta"),
    "rank of a meta tensor": (
        lambda: moe.topk_gate(meta(4), 2), ArgumentError, "moe.topk_gate: scores must have 2 dimensions, got 1"),
    "scales that overlap": (
        lambda: quant.per_token_cast_with_sf_only(
            torch.randn(4, 128), "e4m3", 32, out_sf=torch.zeros(1, 4).expand(4, 4)),
        ArgumentError,
        r"quant.per_token_cast_with_sf_only: out_sf must not overlap itself, .* got strides \(0, 1\)"),
    "bool as a count": (
        lambda: moe.topk_gate(torch.randn(4, 16), True),
        ArgumentTypeError, "moe.topk_gate: num_topk must be an int, got bool"),
    "bool as a number of SMs": (
        lambda: config.set_num_sms(True),
        ArgumentTypeError, "config.set_num_sms: num_sms must be an int, got bool"),
    "float as a count": (
        lambda: quant.per_token_cast(torch.randn(4, 128), "e4m3", 128.0),  # type: ignore[arg-type]
        ArgumentTypeError, "quant.per_token_cast: num_per_channels must be an int, got float"),
    "string as a flag": (
        lambda: quant.per_token_cast(torch.randn(4, 128), "e4m3", 128, round_sf="False"),  # type: ignore[arg-type]
        ArgumentTypeError, "quant.per_token_cast: round_sf must be a bool, got str"),
    "list as a flag": (
        lambda: quant.per_token_cast(torch.randn(4, 128), "e4m3", 128, round_sf=[]),  # type: ignore[arg-type]
        ArgumentTypeError, "quant.per_token_cast: round_sf must be a bool, got list"),
    "mapping of a meta tensor whose length depends on values": (
        lambda: moe.get_fused_mapping(meta(4, 2, dtype=torch.int64), 8, 0, 4),
        ArgumentError, "moe.get_fused_mapping: num_expanded_tokens must be given, or force_no_sync set"),
    "clamp of a subnormal scale": (
        lambda: config.set_amax_clamp_for_quant("e4m3", False, 1e-50),
        ArgumentError, "config.set_amax_clamp_for_quant: value must be from"),
    "infinite clamp": (
        lambda: config.set_amax_clamp_for_quant("e4m3", False, float("inf")),
        ArgumentError, "config.set_amax_clamp_for_quant: value must be from"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_is_refused_in_words(case: str) -> None:
    call, error, text = CALLS[case]
    with pytest.raises(error, match=text):
        call()


def test_a_count_is_not_taken_for_an_equal_float_that_came_before() -> None:
    quant.per_token_cast(torch.randn(4, 128), "e4m3", 128)
    with pytest.raises(ArgumentTypeError):
        quant.per_token_cast(torch.randn(4, 128), "e4m3", 128.0)  # type: ignore[arg-type]


def test_refused_scales_leave_the_data_as_it_was() -> None:
    data = torch.full((4, 128), 7.0).to(torch.float8_e4m3fn)
    before = data.clone()
    with pytest.raises(ArgumentError, match="must not overlap itself"):
        quant.per_token_cast(torch.randn(4, 128), "e4m3", 32, out=(data, torch.zeros(1, 4).expand(4, 4)))
    assert torch.equal(data.view(torch.uint8), before.view(torch.uint8))


def test_mapping_compiles_where_its_length_is_given() -> None:
    topk_idx = torch.randint(0, 8, (4, 3))
    compiled = torch.compile(lambda idx: moe.get_fused_mapping(idx, 8, 64, 4), fullgraph=True, backend="aot_eager")
    for ours, eager in zip(compiled(topk_idx)[:7], moe.get_fused_mapping(topk_idx, 8, 64, 4)[:7], strict=True):
        assert torch.equal(ours, eager)


def test_load_pack_refuses_in_the_words_of_the_library(tmp_path: Path) -> None:
    with pytest.raises(tilekernels.ArgumentError, match=rf"^pack {tmp_path}/none\.so: .*No such file"):
        tilekernels.load_pack(tmp_path / "none.so")
