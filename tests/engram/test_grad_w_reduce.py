"""grad_w_reduce: against float64, and the same bytes every time."""

from __future__ import annotations

import pytest
import torch

from tests.engram.gates import FULL, HIDDEN_SIZES, place_at
from tilekernels.engram import grad_w_reduce
from tilekernels.testing import calc_diff

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The published bound. fp32 sums of 132 numbers stay under 1e-13
MAX_DIFF = 1e-12


def make_case(num_parts: int, num_streams: int, hidden: int, device: str, offset: int = 0) -> dict[str, torch.Tensor]:
    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device)

    case = {
        "grad_w_partial": numbers(num_parts, num_streams, hidden),
        "weight_hidden": numbers(num_streams, hidden).bfloat16(),
        "weight_embed": numbers(num_streams, hidden).bfloat16(),
        "grad_weight_hidden": numbers(num_streams, hidden),
        "grad_weight_embed": numbers(num_streams, hidden),
    }
    return {name: place_at(tensor, offset) for name, tensor in case.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("num_parts", [0, 1, 2, 3, 4, 31, 33, 66, 132, *((112, 113, 264) if FULL else ())])
@pytest.mark.parametrize(
    ("num_streams", "hidden"), [(1, 256), *((4, hidden) for hidden in (HIDDEN_SIZES if FULL else (2560, 7168)))]
)
def test_adds_to_both(num_streams: int, hidden: int, num_parts: int, offset: int, device: str) -> None:
    if device == "cpu" and num_parts * hidden > 256 * 132:
        pytest.skip("large ones on the GPU")
    case = make_case(num_parts, num_streams, hidden, device, offset)
    wide = {name: tensor.double() for name, tensor in case.items()}
    total = wide["grad_w_partial"].sum(0)
    assert grad_w_reduce(**case) is None
    expected_hidden = wide["grad_weight_hidden"] + total * wide["weight_embed"]
    expected_embed = wide["grad_weight_embed"] + total * wide["weight_hidden"]
    assert calc_diff(case["grad_weight_hidden"], expected_hidden) < MAX_DIFF
    assert calc_diff(case["grad_weight_embed"], expected_embed) < MAX_DIFF
    for name in ("grad_w_partial", "weight_hidden", "weight_embed"):
        assert torch.equal(case[name].double(), wide[name])


@pytest.mark.gpu
def test_same_bytes_every_time() -> None:
    case = make_case(132, 4, 7168, "cuda")
    results = []
    for _ in range(20):
        copy = {name: tensor.clone() for name, tensor in case.items()}
        grad_w_reduce(**copy)
        results.append(torch.stack([copy["grad_weight_hidden"], copy["grad_weight_embed"]]))
    assert all(torch.equal(results[0], each) for each in results)


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        ("grad_w_partial", lambda x: x.bfloat16(), TypeError, "grad_w_partial must be float32, got bfloat16"),
        (
            "grad_w_partial",
            lambda x: x[..., :128].contiguous(),
            ValueError,
            "grad_w_partial must have a multiple of 256",
        ),
        ("weight_hidden", lambda x: x.float(), TypeError, "weight_hidden must be bfloat16, got float32"),
        ("weight_embed", lambda x: x[:3], ValueError, ".*weight_embed.*3"),
        ("grad_weight_hidden", lambda x: x.bfloat16(), TypeError, "grad_weight_hidden must be float32, got bfloat16"),
        ("grad_weight_embed", lambda x: None, TypeError, "grad_weight_embed must be a tensor, got NoneType"),
        ("grad_weight_embed", lambda x: x.repeat(1, 2)[:, :256], ValueError, "grad_weight_embed must have strides"),
    ],
)
def test_refused(name: str, change: object, error: type[Exception], text: str) -> None:
    case = make_case(4, 4, 256, "cpu")
    before = case["grad_weight_hidden"].clone()
    case[name] = change(case[name])  # type: ignore[operator]
    with pytest.raises(error, match=rf"^engram\.grad_w_reduce: {text}"):
        grad_w_reduce(**case)
    if name != "grad_weight_hidden":
        assert torch.equal(case["grad_weight_hidden"], before)
