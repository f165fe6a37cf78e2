"""mhc_pre_norm_fn_partials: the product in tf32 and the squares of each part, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mhc.streams import needs_memory, place_at, randn
from tests.refusals import Refusal
from tilekernels.mhc import mhc_pre_norm_fn_partials
from tilekernels.mhc._splits import choose_num_splits, split_bounds
from tilekernels.mhc.norm_fn import round_to_tf32
from tilekernels.testing import assert_equal

NAME = "mhc.mhc_pre_norm_fn_partials"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Against the size of the terms: fp32 sums, on a tensor core without rounding but with a few bits less
TOLERANCE = 2.0**-19

# (tokens, streams, hidden, mixes, parts, offset of residual)
SHAPES = [
    (0, 4, 64, 24, 3, 0), (1, 4, 16, 24, 1, 0), (13, 4, 1280, 24, 16, 0), (5, 4, 33, 24, 2, 0), (3, 2, 24, 8, 1, 0),
    (48, 8, 130, 80, 5, 0), (7, 4, 64, 24, 2, 1), (2, 3, 5, 8, 4, 0), (9, 4, 8, 24, 7, 0), (31, 4, 74, 24, 3, 8),
]  # fmt: skip
GPU_SHAPES = [
    *SHAPES,
    *((tokens, 4, hidden, 24, 16, 0) for tokens in (13, 48, 512) for hidden in (1280, 2560, 4096, 7168)),
    *((tokens, 4, hidden, 24, parts, 0) for tokens in (257, 4096) for hidden in (1280, 7168) for parts in (1, 7)),
    (300, 8, 7168, 80, 8, 0), (1025, 2, 4096, 8, 3, 0), (700, 4, 1001, 24, 2, 3), (257, 4, 1284, 24, 4, 0),
]  # fmt: skip


def make(
    tokens: int, streams: int, hidden: int, mixes: int, parts: int, offset: int, device: str
) -> tuple[torch.Tensor, ...]:
    residual = randn(tokens, streams, hidden, device=device, dtype=torch.bfloat16, offset=offset)
    fn = randn(mixes, streams * hidden, device=device) * 1e-4
    outputs = torch.full((parts, tokens, mixes), 7.0, device=device), torch.full((parts, tokens), 7.0, device=device)
    return residual, fn, *outputs


def check(shape: tuple[int, int, int, int, int, int], device: str) -> None:
    residual, fn, out_mul, sqrsum = make(*shape, device)
    mhc_pre_norm_fn_partials(residual, fn, out_mul, sqrsum)
    cuts = bounds(shape, device)
    x, weights = residual.flatten(1).double(), round_to_tf32(fn).double()
    expected = torch.stack([x[:, first:end] @ weights[:, first:end].t() for first, end in cuts])
    squares = torch.stack([x[:, first:end].square().sum(dim=1) for first, end in cuts])
    sizes = torch.stack([x[:, first:end].abs() @ weights[:, first:end].t().abs() for first, end in cuts])
    assert ((out_mul - expected).abs() <= TOLERANCE * sizes).all()
    assert ((sqrsum - squares).abs() <= TOLERANCE * squares).all()


def bounds(shape: tuple[int, int, int, int, int, int], device: str) -> list[tuple[int, int]]:
    """Where the parts are cut; at odd addresses the kernel cuts anywhere, of which the reference knows nothing."""
    _, streams, hidden, _, parts, offset = shape
    num_channels = streams * hidden
    if offset % 8 == 0 or device == "cpu":
        return split_bounds(num_channels, parts)
    cuts = [num_channels * part // parts for part in range(parts + 1)]
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu(shape: tuple[int, int, int, int, int, int]) -> None:
    check(shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_gpu(shape: tuple[int, int, int, int, int, int]) -> None:
    check(shape, "cuda")


def test_tf32_rounds_halves_away_from_zero() -> None:
    unit = 2.0**-10
    x = torch.tensor([1 + unit / 2, 1 + unit * 1.5, -1 - unit / 2, 1 + unit * 0.499, 1 + unit, 2 - unit / 2])
    expected = torch.tensor([1 + unit, 1 + 2 * unit, -1 - unit, 1.0, 1 + unit, 2.0])
    assert_equal(round_to_tf32(x), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_fn_is_rounded_to_tf32(device: str) -> None:
    """Channel by channel: each row of fn meets a residual that is one in a single channel."""
    channels = 256
    residual = torch.eye(channels, device=device, dtype=torch.bfloat16).view(channels, 4, channels // 4)
    fn = randn(24, channels, device=device)
    fn[:, ::3] = (fn[:, ::3].view(torch.int32) & ~0x1FFF | 0x1000).view(torch.float32)  # halves
    out_mul, sqrsum = torch.zeros((1, channels, 24), device=device), torch.zeros((1, channels), device=device)
    mhc_pre_norm_fn_partials(residual, fn, out_mul, sqrsum)
    assert_equal(out_mul[0], round_to_tf32(fn).t().contiguous())
    assert_equal(sqrsum[0], torch.ones(channels, device=device))


@pytest.mark.gpu
def test_a_token_has_the_same_bits_in_any_batch() -> None:
    residual, fn, out_mul, sqrsum = make(600, 4, 1280, 24, 4, 0, "cuda")
    mhc_pre_norm_fn_partials(residual, fn, out_mul, sqrsum)
    for first, count in ((0, 1), (37, 100), (599, 1)):
        part = out_mul[:, :count].contiguous(), sqrsum[:, :count].contiguous()
        mhc_pre_norm_fn_partials(residual[first : first + count], fn, *part)
        assert_equal(part[0], out_mul[:, first : first + count].contiguous())
        assert_equal(part[1], sqrsum[:, first : first + count].contiguous())


@pytest.mark.gpu
def test_extreme_values_stay_with_their_token() -> None:
    residual, fn, out_mul, sqrsum = make(70, 4, 1280, 24, 2, 0, "cuda")
    mhc_pre_norm_fn_partials(residual, fn, out_mul, sqrsum)
    expected = out_mul.clone(), sqrsum.clone()
    residual[3, 0, 5], residual[40, 3, 1279], residual[41] = float("nan"), float("inf"), 0
    mhc_pre_norm_fn_partials(residual, fn, out_mul, sqrsum)
    assert out_mul[0, 3].isnan().all()
    assert sqrsum[0, 3].isnan()
    assert not out_mul[1, 3].isnan().any()
    assert out_mul[1, 40].isinf().all()
    assert sqrsum[1, 40].isinf()
    assert not out_mul[:, 41].any()
    assert not sqrsum[:, 41].any()
    rest = [token for token in range(70) if token not in (3, 40, 41)]
    assert_equal(out_mul[:, rest], expected[0][:, rest])
    assert_equal(sqrsum[:, rest], expected[1][:, rest])


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    tokens, hidden = 2**17 + 5, 4100
    if reason := needs_memory(tokens * 4 * hidden * 2):
        pytest.skip(reason)
    row = randn(1, 4, hidden, device="cuda", dtype=torch.bfloat16)
    residual = row.expand(tokens, -1, -1).contiguous()
    fn = randn(24, 4 * hidden, device="cuda")
    out_mul, sqrsum = torch.zeros((1, tokens, 24), device="cuda"), torch.zeros((1, tokens), device="cuda")
    mhc_pre_norm_fn_partials(residual, fn, out_mul, sqrsum)
    assert out_mul[0, 0].any()
    assert (out_mul == out_mul[:, :1]).all()
    assert (sqrsum == sqrsum[:, :1]).all()


@pytest.mark.parametrize("tokens", [0, 1, 13, 4096, 4097, 8192, 33793, 2**20])
@pytest.mark.parametrize("channels", [8, 5120, 28672, 131072])
def test_chosen_parts_fill_the_machine(tokens: int, channels: int) -> None:
    splits = choose_num_splits(tokens, channels)
    assert 1 <= splits <= 64
    cuts = split_bounds(channels, splits)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == channels
    assert all(before[1] == after[0] and after[0] < after[1] for before, after in itertools.pairwise(cuts))
    if tokens > 256 and channels == 28672:
        blocks = -(-tokens // 256) * splits
        assert blocks / (-(-blocks // 132) * 132) > 0.9


def inputs(device: str) -> dict[str, Any]:
    names = ("residual", "fn", "out_mul_splitted", "sqrsum_splitted")
    return dict(zip(names, make(6, 4, 64, 24, 2, 0, device), strict=True))


def changed(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[str], dict[str, Any]]:
    return lambda device: {**inputs(device), name: change(inputs(device)[name])}


REFUSALS = [
    Refusal("dtype", changed("residual", lambda x: x.float()), r"residual must be bfloat16, got float32"),
    Refusal("dtype of fn", changed("fn", lambda x: x.bfloat16()), r"fn must be float32, got bfloat16"),
    Refusal("rank", changed("residual", lambda x: x.flatten(1)), r"residual must have 3 dimensions, got 2.*"),
    Refusal("rows", changed("fn", lambda x: x[:23]), r"fn must have 8, 24 or 80 rows, got 23"),
    Refusal("channels", changed("fn", lambda x: x[:, :128].contiguous()), r"fn must have shape .*, got \(24, 128\)"),
    Refusal("mixes", changed("out_mul_splitted", lambda x: x[:, :, :8].contiguous()), r"\w+ must have shape .*"),
    Refusal("parts", changed("sqrsum_splitted", lambda x: x[:1]), r"sqrsum_splitted must have shape .*"),
    Refusal("strides", changed("residual", lambda x: x[:, :, ::2]), r"\w+ must have .*"),
    Refusal("list", changed("fn", lambda x: x.tolist()), r"fn must be a .*tensor, got list"),
    Refusal("None", changed("residual", lambda x: None), r"residual must be a .*tensor, got None"),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
@pytest.mark.parametrize("device", DEVICES)
def test_refused(device: str, refusal: Refusal) -> None:
    refusal.check(NAME, mhc_pre_norm_fn_partials, device)


def test_place_at_is_unaligned() -> None:
    assert place_at(torch.zeros(8, dtype=torch.bfloat16), 1).data_ptr() % 16 == 2
