"""expand_to_mhc_fwd and expand_to_mhc_bwd: copies and sums, exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.mhc.inputs import needs_memory, randn
from tests.refusals import Refusal
from tilekernels.mhc import expand_to_mhc_bwd, expand_to_mhc_fwd
from tilekernels.mhc.expand import expand_to_mhc_bwd_ref
from tilekernels.testing import assert_equal

OPERATORS: dict[str, Callable[..., None]] = {
    "mhc.expand_to_mhc_fwd": expand_to_mhc_fwd,
    "mhc.expand_to_mhc_bwd": expand_to_mhc_bwd,
}

# (tokens, streams, hidden, offset): ragged, empty, at odd addresses, more streams than are loaded at once
SHAPES = [
    (0, 4, 64, 0), (1, 1, 1, 0), (3, 2, 7, 0), (5, 4, 0, 0), (5, 0, 24, 0), (2, 4, 1280, 1), (17, 4, 2056, 0),
    (70, 8, 2560, 0), (9, 5, 1001, 3), (33, 13, 128, 0), (4, 4, 16384, 0), (1, 3, 8, 8),
]  # fmt: skip
GPU_SHAPES = [
    *SHAPES,
    *(
        (tokens, streams, hidden, 0)
        for tokens in (1024, 4096)
        for streams in (2, 4, 8)
        for hidden in (1280, 2560, 7168)
    ),
    (8193, 4, 7168, 0),
]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check_forward(tokens: int, streams: int, hidden: int, offset: int, device: str) -> None:
    x = torch.randint(-(2**15), 2**15, (tokens, hidden), dtype=torch.int16, device=device).view(torch.bfloat16)
    o = randn(tokens, streams, hidden, device=device, dtype=torch.bfloat16, offset=offset)
    expand_to_mhc_fwd(x, o)
    assert_equal(o.view(torch.int16), x.view(torch.int16).unsqueeze(1).repeat(1, streams, 1))


def check_backward(tokens: int, streams: int, hidden: int, offset: int, device: str) -> None:
    # Numbers of many magnitudes: the order of the sums shows
    scale = torch.exp2(torch.randint(-12, 12, (tokens, streams, hidden), device=device).float())
    grad = randn(tokens, streams, hidden, device=device) * scale
    o_grad = randn(tokens, streams, hidden, device=device, dtype=torch.bfloat16, offset=offset).copy_(grad)
    x_grad = randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    expand_to_mhc_bwd(o_grad, x_grad)
    total = torch.zeros((tokens, hidden), device=device)
    for stream in o_grad.float().unbind(1):
        total = total + stream
    assert_equal(x_grad, total.bfloat16())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("check", [check_forward, check_backward], ids=["forward", "backward"])
def test_cpu(check: Callable[..., None], shape: tuple[int, int, int, int]) -> None:
    check(*shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
@pytest.mark.parametrize("check", [check_forward, check_backward], ids=["forward", "backward"])
def test_gpu(check: Callable[..., None], shape: tuple[int, int, int, int]) -> None:
    check(*shape, "cuda")


@pytest.mark.parametrize("device", DEVICES)
def test_backward_is_the_gradient_of_forward(device: str) -> None:
    x = randn(6, 40, device=device, dtype=torch.float64).requires_grad_()
    o_grad = randn(6, 4, 40, device=device, dtype=torch.bfloat16)
    x.unsqueeze(1).expand(6, 4, 40).backward(o_grad.double())
    x_grad = torch.zeros((6, 40), dtype=torch.bfloat16, device=device)
    expand_to_mhc_bwd(o_grad, x_grad)
    assert x.grad is not None
    torch.testing.assert_close(x_grad.double(), x.grad, rtol=2**-8, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_extreme_values(device: str) -> None:
    inf, nan, big, tiny = float("inf"), float("nan"), 3.3e38, 2.0**-133
    columns = [[inf, inf], [inf, -inf], [nan, 1], [big, big], [big, -big], [tiny, tiny], [-0.0, -0.0], [tiny, -tiny]]
    o_grad = torch.tensor(columns, dtype=torch.bfloat16, device=device).t().reshape(1, 2, 8).contiguous()
    x_grad = torch.zeros((1, 8), dtype=torch.bfloat16, device=device)
    expected = torch.zeros_like(x_grad)
    expand_to_mhc_bwd_ref(o_grad, expected)
    expand_to_mhc_bwd(o_grad, x_grad)
    torch.testing.assert_close(x_grad, expected, rtol=0, atol=0, equal_nan=True)
    assert x_grad.isinf().tolist() == [[True, False, False, True, False, False, False, False]]
    assert x_grad[0, 5].item() == 2 * tiny


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    tokens, streams, hidden = 2**20 + 3, 2, 1280
    if reason := needs_memory(3 * tokens * streams * hidden * 2):
        pytest.skip(reason)
    x = torch.randint(-100, 100, (tokens, hidden), dtype=torch.int16, device="cuda").to(torch.bfloat16)
    o = torch.zeros((tokens, streams, hidden), dtype=torch.bfloat16, device="cuda")
    expand_to_mhc_fwd(x, o)
    for stream in range(streams):
        assert torch.equal(o[:, stream], x)
    x_grad = torch.zeros_like(x)
    expand_to_mhc_bwd(o, x_grad)
    assert torch.equal(x_grad, x * streams)


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def refusals() -> Iterator[tuple[str, Refusal]]:
    names = {"mhc.expand_to_mhc_fwd": ("x", "o"), "mhc.expand_to_mhc_bwd": ("x_grad", "o_grad")}
    for name, (rows, streams) in names.items():

        def make(device: str, rows: str = rows, streams: str = streams, **changes: Any) -> dict[str, Any]:
            tensors = {
                rows: torch.zeros((4, 16), dtype=torch.bfloat16, device=device),
                streams: torch.zeros((4, 2, 16), dtype=torch.bfloat16, device=device),
            }
            return {each: changes.get(each, lambda x: x)(tensor) for each, tensor in tensors.items()}

        for tensor in (rows, streams):
            changes = {
                "dtype": (lambda x: x.float(), rf"{tensor} must be bfloat16, got float32"),
                "rank": (lambda x: x[0], rf"{tensor} must have \d dimensions, got .*"),
                "strides": (
                    lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
                    rf"{tensor} must have strides .*",
                ),
                "list": (lambda x: x.tolist(), rf"{tensor} must be a .*tensor, got list"),
            }
            for label, (change, text) in changes.items():

                def changed(
                    device: str, make: Any = make, tensor: str = tensor, change: Any = change
                ) -> dict[str, Any]:
                    return make(device, **{tensor: change})

                yield name, Refusal(f"{tensor}-{label}", changed, text)

        def other_tokens(device: str, make: Any = make, rows: str = rows) -> dict[str, Any]:
            return make(device, **{rows: lambda x: x[:3]})

        def other_hidden(device: str, make: Any = make, rows: str = rows) -> dict[str, Any]:
            return make(device, **{rows: lambda x: x[:, :8].contiguous()})

        yield name, Refusal("other tokens", other_tokens, r"\w+ must have shape .*, got .*")
        yield name, Refusal("other hidden", other_hidden, r"\w+ must have shape .*, got .*")


REFUSALS = [pytest.param(*each, id=f"{each[0][-3:]}-{each[1].id}") for each in refusals()]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(("name", "refusal"), REFUSALS)
@pytest.mark.parametrize("device", DEVICES)
def test_refused(device: str, name: str, refusal: Refusal) -> None:
    refusal.check(name, OPERATORS[name], device)
