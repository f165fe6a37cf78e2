"""fused_weight: the exact product."""

from __future__ import annotations

import pytest
import torch

from tests.engram.gates import FULL, HIDDEN_SIZES, place_at
from tilekernels.engram import fused_weight
from tilekernels.testing import assert_equal

SHAPES = [(0, 256), (4, 0), (1, 256), (4, 7168), (3, 2560), (70, 512)]
if FULL:
    SHAPES += [(num_streams, hidden) for num_streams in (1, 4) for hidden in (512, *HIDDEN_SIZES, 8192)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("shape", dict.fromkeys(SHAPES), ids=str)
def test_product_is_exact(shape: tuple[int, int], offset: int, device: str) -> None:
    hidden, embed = (place_at((torch.randn(shape, device=device) * 1e3).bfloat16(), offset) for _ in range(2))
    exact = hidden.double() * embed.double()
    fused = fused_weight(weight_hidden=hidden, weight_embed=embed)
    assert_equal(fused, exact.float())
    assert_equal(fused.double(), exact)  # 16 bits of mantissa: nothing was rounded


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_values(device: str) -> None:
    numbers = torch.tensor([0.0, -0.0, 1e-38, 1e-40, 3e38, -3e38, float("inf")], device=device).bfloat16()
    pairs = torch.cartesian_prod(numbers.float(), numbers.float()).bfloat16()
    hidden, embed = pairs[torch.arange(256, device=device) % len(pairs)].T[:, None].contiguous()
    assert_equal(fused_weight(hidden, embed).nan_to_num(7.0), (hidden.float() * embed.float()).nan_to_num(7.0))


@pytest.mark.usefixtures("needs_extension")
def test_refused() -> None:
    good = torch.zeros((4, 256), dtype=torch.bfloat16)
    for wrong, error, text in (
        (torch.zeros((4, 256)), TypeError, "weight_embed must be bfloat16, got float32"),
        (good[:3], ValueError, ".*weight_embed.*3.*"),
        (good.repeat(1, 2)[:, ::2], ValueError, "weight_embed must have strides .*"),
        (None, TypeError, "weight_embed must be a .*tensor, got .*"),
    ):
        with pytest.raises(error, match=rf"^engram\.fused_weight: {text}"):
            fused_weight(good, wrong)
    with pytest.raises(
        ValueError, match=r"^engram\.fused_weight: weight_hidden must have a multiple of 256 .*, got 128$"
    ):
        fused_weight(good[:, :128].contiguous(), good[:, :128].contiguous())
