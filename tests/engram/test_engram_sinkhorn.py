"""The Sinkhorn optimiser's operators: momentum exact, norms against float64, and what they do together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.engram.gates import FULL, place_at
from tilekernels.engram import (
    engram_sinkhorn_finalize,
    engram_sinkhorn_momentum_update,
    engram_sinkhorn_step,
    engram_sinkhorn_step_reduce,
)
from tilekernels.engram.engram_sinkhorn import engram_sinkhorn_momentum_update_ref
from tilekernels.testing import assert_equal, calc_diff

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# fp32 sums of squares of a few thousand numbers, by calc_diff
MAX_DIFF = 1e-12
EPS = 1e-8

SIZES = [(1, 256), (7, 256), (65, 512), (9, 768), (33, 1024), (5, 1280), (3, 4096)]
LARGE = [
    *((r, c) for r in (396, 397, 8001, 100_003) for c in (256, 512, 768, 1024, 2048)),
    *((r, c) for r in (397, 8001) for c in (1280, 1792, 2304, 3840, 4096, 4352)),
]
if FULL:
    LARGE += [(r, c) for r in (0, 1, 512, 4001, 131_072) for c in (*range(256, 4608, 256), 7168)]
each_size = pytest.mark.parametrize(
    ("device", "size"),
    [("cpu", size) for size in SIZES] + [pytest.param("cuda", size, marks=pytest.mark.gpu) for size in SIZES + LARGE],
    ids=str,
)
each_offset = pytest.mark.parametrize("offset", [0, 1])


# ---- momentum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize(("kind", "momentum"), list(itertools.product(DTYPES, DTYPES)))
@each_offset
@pytest.mark.parametrize("shape", [(1, 256), (3, 7, 512), (2**16,), (0, 256)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_momentum(device: str, shape: tuple[int, ...], offset: int, kind: str, momentum: str, nesterov: bool) -> None:
    grad = place_at(torch.randn(shape, device=device).to(DTYPES[kind]), offset)
    buffer = place_at((torch.randn(shape, device=device) * 3).to(DTYPES[momentum]), offset)
    before, expected_buffer = buffer.clone(), buffer.clone()
    expected = engram_sinkhorn_momentum_update_ref(grad, expected_buffer, 0.95, nesterov)
    result = engram_sinkhorn_momentum_update(grad, buffer, 0.95, nesterov)
    assert_equal(result, expected)
    assert_equal(buffer, expected_buffer)
    moment = before.double() * 0.95 + 0.05 * grad.double()
    exact = grad.double() * 0.05 + 0.95 * moment if nesterov else moment
    assert calc_diff(result, exact) < 1e-13


def test_momentum_takes_a_gradient_of_another_shape() -> None:
    grad, buffer = torch.randn(2, 256), torch.randn(512)
    assert engram_sinkhorn_momentum_update(grad, buffer, 0.9).shape == (512,)


# ---- rows and columns ------------------------------------------------------------------------------------------------


def make_matrix(size: tuple[int, int], device: str, offset: int) -> dict[str, Any]:
    num_rows, num_cols = size
    return {
        "matrix": place_at(torch.randn(size, device=device), offset),
        "row_scale": place_at(torch.rand(num_rows, device=device) + 0.5, offset),
        "col_scale": place_at(torch.rand(num_cols, device=device) + 0.5, offset),
        "eps": EPS,
    }


def scaled_in_float64(call: dict[str, Any]) -> torch.Tensor:
    return call["row_scale"].double()[:, None] * call["matrix"].double() * call["col_scale"].double()


@each_offset
@each_size
def test_step(device: str, size: tuple[int, int], offset: int) -> None:
    call = make_matrix(size, device, offset)
    x = scaled_in_float64(call)
    matrix, row_scale = call["matrix"].clone(), call["row_scale"].double()
    row_norm, partial = engram_sinkhorn_step(**call)
    norm = x.square().sum(1).sqrt()
    assert calc_diff(row_norm, norm) < MAX_DIFF
    assert calc_diff(call["row_scale"], row_scale / (norm + EPS)) < MAX_DIFF
    assert calc_diff(partial.sum(0), (x / (norm + EPS)[:, None]).square().sum(0)) < MAX_DIFF
    assert_equal(call["matrix"], matrix)
    reduced = torch.empty(size[1], device=device)
    assert engram_sinkhorn_step_reduce(partial, reduced) is None
    assert calc_diff(reduced, partial.double().sum(0)) < MAX_DIFF


@each_offset
@each_size
def test_finalize(device: str, size: tuple[int, int], offset: int) -> None:
    call = make_matrix(size, device, offset)
    x = scaled_in_float64(call)
    expected = x * (0.2 / (x.square().sum(1, keepdim=True).sqrt() + EPS))
    result = engram_sinkhorn_finalize(**call, alpha=0.2)
    assert calc_diff(result, expected) < MAX_DIFF
    out = torch.empty_like(result)
    assert engram_sinkhorn_finalize(**call, alpha=0.2, out=out) is out
    assert_equal(out, result)
    assert engram_sinkhorn_finalize(**call, alpha=0.2, out=call["matrix"]) is call["matrix"]
    assert_equal(call["matrix"], result)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_workers", [0, 1, 31, 33, 396, 1000])
@each_offset
def test_reduce(offset: int, num_workers: int, device: str) -> None:
    partial = place_at(torch.rand((num_workers, 512), device=device), offset)
    reduced = place_at(torch.full((512,), 7.0, device=device), offset)
    engram_sinkhorn_step_reduce(partial, reduced)
    assert calc_diff(reduced, partial.double().sum(0)) < MAX_DIFF


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_and_rows_of_zeros(device: str) -> None:
    call = make_matrix((0, 512), device, 0)
    row_norm, partial = engram_sinkhorn_step(**call)
    assert row_norm.shape == (0,)
    assert not partial.any()
    assert engram_sinkhorn_finalize(**call, alpha=1.0).shape == (0, 512)
    call = {**make_matrix((3, 512), device, 0), "matrix": torch.zeros((3, 512), device=device)}
    row_scale = call["row_scale"].double()
    row_norm, partial = engram_sinkhorn_step(**call)
    assert not row_norm.any()
    assert not partial.any()
    torch.testing.assert_close(call["row_scale"].double(), row_scale / EPS, rtol=1e-6, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_alternating_steps_even_out_rows_and_columns(device: str) -> None:
    """After some rounds the rows have norm one, and the columns one norm."""
    num_rows, num_cols = 600, 256
    call = make_matrix((num_rows, num_cols), device, 0)
    call["matrix"] *= torch.rand((num_rows, 1), device=device) * 10 + 0.1
    col_sumsq = torch.empty(num_cols, device=device)
    for _ in range(5):
        _, partial = engram_sinkhorn_step(**call)
        engram_sinkhorn_step_reduce(partial, col_sumsq)
        call["col_scale"] *= (num_rows / num_cols) ** 0.5 / col_sumsq.sqrt()
    result = engram_sinkhorn_finalize(**call, alpha=1.0)
    torch.testing.assert_close(result.norm(dim=1), torch.ones_like(result[:, 0]))
    torch.testing.assert_close(
        result.norm(dim=0), torch.full_like(result[0], (num_rows / num_cols) ** 0.5), rtol=1e-3, atol=0
    )


@pytest.mark.gpu
def test_same_bytes_every_time_and_other_limits_of_sms() -> None:
    import tilekernels

    call = make_matrix((10_007, 512), "cuda", 0)
    scale = call["row_scale"]
    expected = engram_sinkhorn_step(**{**call, "row_scale": scale.clone()})
    for _ in range(10):
        for found, wanted in zip(engram_sinkhorn_step(**{**call, "row_scale": scale.clone()}), expected, strict=True):
            assert_equal(found, wanted)
    try:
        tilekernels.set_num_sms(5)
        row_norm, partial = engram_sinkhorn_step(**{**call, "row_scale": scale.clone()})
    finally:
        tilekernels.config.reset_runtime_config()
    assert partial.shape == (15, 512)
    assert_equal(row_norm, expected[0])
    assert calc_diff(partial.sum(0), expected[1].sum(0)) < MAX_DIFF


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    num_rows = 2**23 + 3
    call = make_matrix((num_rows, 256), "cuda", 0)
    rows = [0, 1, 2**22, num_rows - 2, num_rows - 1]
    few = {name: call[name][rows].clone() for name in ("matrix", "row_scale")}
    few |= {"col_scale": call["col_scale"], "eps": EPS}
    assert_equal(engram_sinkhorn_finalize(**call, alpha=1.0)[rows], engram_sinkhorn_finalize(**few, alpha=1.0))
    row_norm, _ = engram_sinkhorn_step(**call)
    assert_equal(row_norm[rows], engram_sinkhorn_step(**few)[0])
    assert_equal(call["row_scale"][rows], few["row_scale"])


# ---- invalid calls ---------------------------------------------------------------------------------------------------

GOOD = torch.zeros(256)


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(
    ("grad", "buffer", "error", "text"),
    [
        (GOOD[:255], GOOD, ValueError, "grad must have a multiple of 256 elements, got 255"),
        (GOOD.half(), GOOD, TypeError, "grad must be .*, got float16"),
        (GOOD.repeat(2), GOOD, ValueError, ".*momentum_buffer.*"),
        (GOOD, GOOD.repeat(2)[::2], ValueError, "momentum_buffer must be dense, .*"),
        (GOOD, None, TypeError, "momentum_buffer must be a tensor, got NoneType"),
    ],
)
def test_momentum_refused(grad: Any, buffer: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=rf"^engram\.engram_sinkhorn_momentum_update: {text}$"):
        engram_sinkhorn_momentum_update(grad, buffer, 0.9)


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"matrix": torch.zeros(4, 128)}, ValueError, "matrix must have a multiple of 256 columns, got 128"),
        ({"matrix": torch.zeros(4, 256).bfloat16()}, TypeError, "matrix must be float32, got bfloat16"),
        ({"matrix": torch.zeros(4, 512)[:, :256]}, ValueError, "matrix must have strides .*"),
        ({"row_scale": torch.zeros(5)}, ValueError, ".*row_scale.*5.*"),
        ({"row_scale": None}, TypeError, "row_scale must be a .*tensor, got .*"),
        ({"col_scale": torch.zeros(5)}, ValueError, ".*col_scale.*5.*"),
    ],
)
@pytest.mark.parametrize("name", ["step", "finalize"])
def test_rows_refused(name: str, change: dict[str, Any], error: type[Exception], text: str) -> None:
    call = {**make_matrix((4, 256), "cpu", 0), **change}
    operator: Any = engram_sinkhorn_step if name == "step" else engram_sinkhorn_finalize
    with pytest.raises(error, match=rf"^engram\.engram_sinkhorn_{name}: {text}$"):
        operator(**call, **({} if name == "step" else {"alpha": 1.0}))


@pytest.mark.usefixtures("needs_extension")
def test_reduce_refused() -> None:
    good = torch.zeros(4, 256)
    for partial, target, error, text in (
        (good, torch.zeros(255), ValueError, ".*col_sumsq.*255.*"),
        (good, None, TypeError, "col_sumsq must be a tensor, got NoneType"),
        (
            good[:, :128].contiguous(),
            good[0],
            ValueError,
            "col_sumsq_partial must have a multiple of 256 columns, got 128",
        ),
        (good.double(), good[0], TypeError, "col_sumsq_partial must be float32, got float64"),
    ):
        with pytest.raises(error, match=rf"^engram\.engram_sinkhorn_step_reduce: {text}$"):
            engram_sinkhorn_step_reduce(partial, target)
