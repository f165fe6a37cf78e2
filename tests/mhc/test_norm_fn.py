"""mhc_pre_norm_fn_partials and _bwd: products in tf32 and squares, against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mhc.inputs import needs_memory, place_at, randn
from tests.refusals import Refusal
from tilekernels.mhc import (
    mhc_pre_norm_fn_partials,
    mhc_pre_norm_fn_partials_bwd,
    mhc_reduce_partials_and_rmsnorm_bwd,
    mhc_reduce_partials_and_rmsnorm_fwd,
)
from tilekernels.mhc._splits import choose_num_parts, choose_num_splits, split_bounds
from tilekernels.mhc.norm_fn import round_to_tf32
from tilekernels.testing import assert_equal

NAME = "mhc.mhc_pre_norm_fn_partials"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Against the size of the terms: fp32 sums over up to 28,672 channels, which a tensor core cuts off instead of rounding
TOLERANCE = 2.0**-17

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
    _, streams, hidden, mixes, parts, offset = shape
    num_channels = streams * hidden
    if offset % 8 == 0 or device == "cpu":
        return split_bounds(num_channels, parts, mixes)
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
    cuts = split_bounds(channels, splits, 24)
    assert cuts[0][0] == 0
    assert cuts[-1][1] == channels
    assert all(before[1] == after[0] and after[0] < after[1] for before, after in itertools.pairwise(cuts))
    if tokens > 256 and channels == 28672:
        blocks = -(-tokens // 128) * splits
        assert blocks / (-(-blocks // 264) * 264) > 0.9


# ---- backward --------------------------------------------------------------------------------------------------------

# (tokens, streams, hidden, mixes, offset)
BACKWARD_SHAPES = [
    (0, 4, 64, 24, 0), (1, 4, 16, 24, 0), (13, 4, 320, 24, 0), (5, 4, 33, 24, 0), (70, 2, 24, 8, 0),
    (67, 8, 130, 80, 0), (41, 4, 64, 24, 1), (33, 3, 5, 8, 0), (64, 4, 80, 24, 8),
]  # fmt: skip
GPU_BACKWARD_SHAPES = [
    *BACKWARD_SHAPES,
    *((tokens, 4, hidden, 24, 0) for tokens in (48, 4096, 8192) for hidden in (1280, 2560, 7168)),
    (1027, 8, 1280, 80, 0), (1000, 2, 4096, 8, 0), (300, 4, 1001, 24, 3), (511, 4, 1284, 24, 0),
]  # fmt: skip


def make_backward(
    tokens: int, streams: int, hidden: int, mixes: int, offset: int, device: str
) -> dict[str, torch.Tensor]:
    return {
        "out_mul_grad": randn(tokens, mixes, device=device),
        "sqrsum_grad": randn(tokens, device=device),
        "residual": randn(tokens, streams, hidden, device=device, dtype=torch.bfloat16, offset=offset),
        "fn": randn(mixes, streams * hidden, device=device),
        "residual_grad": randn(tokens, streams, hidden, device=device, dtype=torch.bfloat16, offset=offset),
        "fn_grad": torch.full((mixes, streams * hidden), 7.0, device=device),
    }


def check_backward(shape: tuple[int, int, int, int, int], device: str) -> None:
    kwargs = make_backward(*shape, device)
    before = kwargs["residual_grad"].double().flatten(1)
    mhc_pre_norm_fn_partials_bwd(**kwargs)
    x, grad = kwargs["residual"].double().flatten(1), round_to_tf32(kwargs["out_mul_grad"]).double()
    weights, squares = round_to_tf32(kwargs["fn"]).double(), 2 * kwargs["sqrsum_grad"].double().unsqueeze(1)
    expected = before + grad @ weights + x * squares
    size = before.abs() + grad.abs() @ weights.abs() + (x * squares).abs()
    error = (kwargs["residual_grad"].double().flatten(1) - expected).abs()
    assert (error <= 2.0**-8 * expected.abs() + TOLERANCE * size).all()
    error = (kwargs["fn_grad"] - grad.t() @ x).abs()
    assert (error <= TOLERANCE * (grad.abs().t() @ x.abs())).all()


@pytest.mark.parametrize("shape", BACKWARD_SHAPES, ids=str)
def test_backward_cpu(shape: tuple[int, int, int, int, int]) -> None:
    check_backward(shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_BACKWARD_SHAPES, ids=str)
def test_backward_gpu(shape: tuple[int, int, int, int, int]) -> None:
    check_backward(shape, "cuda")


@pytest.mark.parametrize(
    ("tokens", "hidden"),
    [(40, 64), *(pytest.param(*size, marks=pytest.mark.gpu) for size in ((4096, 1280), (8192, 2560)))],
)
@pytest.mark.parametrize("device", DEVICES)
def test_all_of_pre_norm_has_the_gradient_of_the_formula(device: str, tokens: int, hidden: int) -> None:
    """Both operators of pre-norm and their gradients against autograd in float64, in the published tolerances."""
    if device == "cpu" and tokens > 100:
        pytest.skip("takes long on a CPU")
    channels, eps = 4 * hidden, 1e-6
    residual = randn(tokens, 4, hidden, device=device, dtype=torch.bfloat16)
    # A quarter: in float64 nothing is rounded to tf32, which costs each gradient up to 2^-12 of it
    fn, out_grad = randn(24, channels, device=device) * 1e-4, randn(tokens, 24, device=device) / 4
    wide_residual, wide_fn = residual.double().requires_grad_(), fn.double().requires_grad_()
    flat = wide_residual.flatten(1)
    expected = (flat @ wide_fn.t()) * (flat.square().mean(dim=1, keepdim=True) + eps).rsqrt()
    expected.backward(out_grad.double())

    parts = choose_num_splits(tokens, channels)
    mul, squares = torch.empty((parts, tokens, 24), device=device), torch.empty((parts, tokens), device=device)
    mhc_pre_norm_fn_partials(residual, fn, mul, squares)
    out_mul, sqrsum = torch.empty((tokens, 1, 24), device=device), torch.empty((tokens, 1), device=device)
    out = torch.empty((tokens, 24), device=device)
    mhc_reduce_partials_and_rmsnorm_fwd(
        mul.unsqueeze(2), squares.unsqueeze(2), out_mul, sqrsum, out, channels, eps, parts
    )
    torch.testing.assert_close(out.double(), expected.detach(), rtol=1e-3, atol=1e-3)

    out_mul_grad, sqrsum_grad = torch.empty_like(out_mul), torch.empty_like(sqrsum)
    mhc_reduce_partials_and_rmsnorm_bwd(out_grad, out_mul, sqrsum, out_mul_grad, sqrsum_grad, channels, eps)
    residual_grad, fn_grad = torch.zeros_like(residual), torch.empty_like(fn)
    mhc_pre_norm_fn_partials_bwd(
        out_mul_grad.view(tokens, 24), sqrsum_grad.view(tokens), residual, fn, residual_grad, fn_grad
    )
    assert wide_residual.grad is not None
    assert wide_fn.grad is not None
    torch.testing.assert_close(residual_grad, wide_residual.grad.bfloat16())
    torch.testing.assert_close(fn_grad.double(), wide_fn.grad, rtol=1e-3, atol=3e-2)


@pytest.mark.gpu
def test_backward_of_more_than_two_to_the_31_elements() -> None:
    tokens, hidden = 2**17 + 5, 4100
    if reason := needs_memory(2 * tokens * 4 * hidden * 2):
        pytest.skip(reason)
    row = make_backward(1, 4, hidden, 24, 0, "cuda")
    many = {}
    for name, each in row.items():
        many[name] = each if name.startswith("fn") else each.expand(tokens, *each.shape[1:]).contiguous()
    mhc_pre_norm_fn_partials_bwd(**many)
    assert (many["residual_grad"] == many["residual_grad"][:1]).all()
    row["fn_grad"] = torch.empty_like(row["fn_grad"])
    mhc_pre_norm_fn_partials_bwd(**row)
    assert_equal(many["residual_grad"][-1], row["residual_grad"][0])
    # A tensor core cuts sums off, and these only grow
    torch.testing.assert_close(many["fn_grad"] / tokens, row["fn_grad"], rtol=1e-3, atol=1e-5)


def test_chosen_parts_of_tokens() -> None:
    assert choose_num_parts(0, 28672) == 1
    assert choose_num_parts(31, 28672) == 1
    for tokens, channels, parts in [(4096, 28672, 3), (4096, 10240, 9), (8192, 10240, 9)]:
        assert choose_num_parts(tokens, channels) == parts  # the fastest of those measured


# ---- invalid calls ---------------------------------------------------------------------------------------------------


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
    Refusal("None", changed("residual", lambda x: None), r"residual must be a .*tensor, got None(Type)?"),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
@pytest.mark.parametrize("device", DEVICES)
def test_refused(device: str, refusal: Refusal) -> None:
    refusal.check(NAME, mhc_pre_norm_fn_partials, device)


def changed_backward(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[str], dict[str, Any]]:
    def build(device: str) -> dict[str, Any]:
        kwargs = make_backward(6, 4, 64, 24, 0, device)
        return {**kwargs, name: change(kwargs[name])}

    return build


BACKWARD_REFUSALS = [
    Refusal(
        "dtype", changed_backward("residual_grad", lambda x: x.float()), r"residual_grad must be bfloat16, got float32"
    ),
    Refusal("rank", changed_backward("out_mul_grad", lambda x: x[None]), r"\w+ must have 2 dimensions, got 3.*"),
    Refusal("tokens", changed_backward("sqrsum_grad", lambda x: x[:5]), r"sqrsum_grad must have shape .*, got \(5,\)"),
    Refusal("rows", changed_backward("fn", lambda x: x[:7]), r"fn must have 8, 24 or 80 rows, got 7"),
    Refusal("channels", changed_backward("fn_grad", lambda x: x[:, :128].contiguous()), r"fn_grad must have shape .*"),
    Refusal("strides", changed_backward("residual", lambda x: x[:, :, ::2]), r"\w+ must have .*"),
    Refusal("None", changed_backward("fn", lambda x: None), r"fn must be a .*tensor, got None(Type)?"),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", BACKWARD_REFUSALS, ids=lambda refusal: refusal.id)
@pytest.mark.parametrize("device", DEVICES)
def test_backward_refused(device: str, refusal: Refusal) -> None:
    refusal.check("mhc.mhc_pre_norm_fn_partials_bwd", mhc_pre_norm_fn_partials_bwd, device)


def test_place_at_is_unaligned() -> None:
    assert place_at(torch.zeros(8, dtype=torch.bfloat16), 1).data_ptr() % 16 == 2
