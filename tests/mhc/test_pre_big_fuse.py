"""mhc_pre_big_fuse_fwd: the bits of the chain of operators that it replaces, and values against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.mhc.inputs import needs_memory, randn
from tests.refusals import Refusal
from tilekernels import mhc
from tilekernels.mhc import mhc_pre_big_fuse_fwd, mhc_pre_norm_fn_partials
from tilekernels.testing import assert_equal

NAME = "mhc.mhc_pre_big_fuse_fwd"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# fp32 all along; ten steps of Sinkhorn do not make errors larger. layer_input is rounded to bf16 once.
RTOL, ATOL, BF16_RTOL = 2e-5, 1e-6, 2.0**-8

# (tokens, streams, hidden, parts, offset of residual, repeat)
SHAPES = [
    (0, 4, 64, 3, 0, 10), (1, 4, 8, 1, 0, 1), (13, 4, 1280, 16, 0, 10), (5, 4, 33, 2, 0, 2), (3, 2, 24, 1, 0, 20),
    (21, 8, 136, 5, 0, 10), (7, 4, 64, 2, 1, 10), (6, 2, 7, 3, 0, 3),
]  # fmt: skip
GPU_SHAPES = [
    *SHAPES,
    *((tokens, 4, hidden, 16, 0, 10) for tokens in (512, 1024, 2048, 8192) for hidden in (1280, 2560, 4096)),
    (4096, 4, 7168, 8, 0, 10), (257, 4, 16384, 3, 0, 10), (300, 8, 7168, 4, 0, 10), (1000, 2, 5120, 2, 0, 10),
    (100, 4, 1001, 4, 5, 10), (64, 8, 16384, 1, 0, 20),
    # blocks of several tokens, the last of which is not full
    (1057, 8, 136, 3, 0, 10), (4231, 8, 64, 2, 0, 3), (1591, 4, 33, 4, 0, 10), (2117, 2, 1032, 9, 0, 2),
    (527, 4, 264, 2, 0, 10),
]  # fmt: skip


def make(tokens: int, streams: int, hidden: int, parts: int, offset: int, repeat: int, device: str) -> dict[str, Any]:
    mixes = streams * (streams + 2)
    residual = randn(tokens, streams, hidden, device=device, dtype=torch.bfloat16, offset=offset)
    out_mul = torch.zeros((parts, tokens, mixes), device=device)
    sqrsum = torch.zeros((parts, tokens), device=device)
    fn = randn(mixes, streams * hidden, device=device) / (streams * hidden) ** 0.5
    mhc_pre_norm_fn_partials(residual, fn, out_mul, sqrsum)
    return {
        "gemm_out_mul": out_mul,
        "gemm_out_sqrsum": sqrsum,
        "mhc_scale": randn(3, device=device),
        "mhc_base": randn(mixes, device=device),
        "residual": residual,
        "post_mix": randn(tokens, streams, device=device),
        "comb_mix": randn(tokens, streams * streams, device=device),
        "layer_input": randn(tokens, hidden, device=device, dtype=torch.bfloat16, offset=offset),
        "rms_eps": 1e-6,
        "mhc_pre_eps": 1e-3,
        "mhc_sinkhorn_eps": 1e-6,
        "mhc_post_mult_value": 2.0,
        "sinkhorn_repeat": repeat,
        "n_splits": parts,
    }


OUTPUTS = ("post_mix", "comb_mix", "layer_input")


def run_chain(kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The four operators, one after the other."""
    mul, squares, residual = kwargs["gemm_out_mul"], kwargs["gemm_out_sqrsum"], kwargs["residual"]
    tokens, streams, hidden = residual.shape
    out_mul, sqrsum, mixes = torch.empty_like(mul[:1]), torch.empty_like(squares[:1]), torch.empty_like(mul[0])
    mhc.mhc_reduce_partials_and_rmsnorm_fwd(
        mul.unsqueeze(2), squares.unsqueeze(2), out_mul.view(tokens, 1, mul.shape[2]), sqrsum.view(tokens, 1), mixes,
        streams * hidden, kwargs["rms_eps"], mul.shape[0],
    )  # fmt: skip
    pre, post, comb = (mixes.new_empty((tokens, size)) for size in (streams, streams, streams * streams))
    scale, base = kwargs["mhc_scale"], kwargs["mhc_base"]
    mhc.mhc_pre_split_mixes_fwd(
        mixes, scale, base, pre, post, comb, kwargs["mhc_post_mult_value"], kwargs["mhc_pre_eps"]
    )
    normal = torch.empty_like(comb)
    square = (tokens, streams, streams)
    mhc.mhc_sinkhorn_fwd(comb.view(square), normal.view(square), kwargs["sinkhorn_repeat"], kwargs["mhc_sinkhorn_eps"])
    layer_input = residual.new_empty((tokens, hidden))
    mhc.mhc_pre_apply_mix_fwd(residual, pre, layer_input)
    return dict(zip(OUTPUTS, (post, normal, layer_input), strict=True))


def compute_in_float64(kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Its own formulation, without any rounding in between."""
    residual = kwargs["residual"].double()
    tokens, streams, hidden = residual.shape
    mean_square = kwargs["gemm_out_sqrsum"].double().sum(dim=0) / (streams * hidden)
    mixes = kwargs["gemm_out_mul"].double().sum(dim=0) / (mean_square + kwargs["rms_eps"]).sqrt().unsqueeze(1)
    sizes = [streams, streams, streams * streams]
    repeats = torch.tensor(sizes, device=residual.device)
    logits = mixes * kwargs["mhc_scale"].double().repeat_interleave(repeats) + kwargs["mhc_base"].double()
    pre, post, comb = logits.split(sizes, dim=1)
    eps = kwargs["mhc_sinkhorn_eps"]
    matrix = comb.view(tokens, streams, streams).exp()
    matrix = matrix / matrix.sum(dim=2, keepdim=True) + eps
    matrix = matrix / (matrix.sum(dim=1, keepdim=True) + eps)
    for _ in range(kwargs["sinkhorn_repeat"] - 1):
        matrix = matrix / (matrix.sum(dim=2, keepdim=True) + eps)
        matrix = matrix / (matrix.sum(dim=1, keepdim=True) + eps)
    return {
        "post_mix": post.sigmoid() * kwargs["mhc_post_mult_value"],
        "comb_mix": matrix.flatten(1),
        "layer_input": torch.einsum("ti,tih->th", pre.sigmoid() + kwargs["mhc_pre_eps"], residual),
    }


def check_values(shape: tuple[int, ...], device: str) -> None:
    kwargs = make(*shape, device)
    mhc_pre_big_fuse_fwd(**kwargs)
    expected = compute_in_float64(kwargs)
    for name in OUTPUTS[:2]:
        torch.testing.assert_close(kwargs[name].double(), expected[name], rtol=RTOL, atol=ATOL)
    size = kwargs["residual"].double().abs().sum(dim=1)
    error = (kwargs["layer_input"].double() - expected["layer_input"]).abs()
    assert (error <= BF16_RTOL * expected["layer_input"].abs() + RTOL * size).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu(shape: tuple[int, ...]) -> None:
    check_values(shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_gpu(shape: tuple[int, ...]) -> None:
    check_values(shape, "cuda")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_has_the_bits_of_the_chain_on_cpu(shape: tuple[int, ...]) -> None:
    check_bits(shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_has_the_bits_of_the_chain(shape: tuple[int, ...]) -> None:
    check_bits(shape, "cuda")


def check_bits(shape: tuple[int, ...], device: str) -> None:
    kwargs = make(*shape, device)
    expected = run_chain(kwargs)
    mhc_pre_big_fuse_fwd(**kwargs)
    for name in OUTPUTS:
        assert_equal(kwargs[name], expected[name])


@pytest.mark.gpu
def test_extreme_values_stay_with_their_token() -> None:
    kwargs = make(70, 4, 1280, 2, 0, 10, "cuda")
    mhc_pre_big_fuse_fwd(**kwargs)
    before = {name: kwargs[name].clone() for name in OUTPUTS}
    kwargs["gemm_out_mul"][0, 3, 9] = float("nan")
    kwargs["gemm_out_mul"][1, 5] = 1e30
    kwargs["gemm_out_sqrsum"][:, 6] = 0
    kwargs["residual"][7, 2, 100] = float("inf")
    mhc_pre_big_fuse_fwd(**kwargs)
    rest = [token for token in range(70) if token not in (3, 5, 6, 7)]
    for name in OUTPUTS:
        assert_equal(kwargs[name][rest], before[name][rest])
    assert kwargs["comb_mix"][3].isnan().any()
    assert kwargs["layer_input"][7].isinf().sum() == 1


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    tokens, hidden = 2**17 + 5, 4104
    if reason := needs_memory(tokens * 5 * hidden * 2 * 2):
        pytest.skip(reason)
    kwargs = make(1, 4, hidden, 2, 0, 10, "cuda")
    mhc_pre_big_fuse_fwd(**kwargs)
    many = {**kwargs, "n_splits": 2}
    for name in ("residual", *OUTPUTS):
        many[name] = kwargs[name].expand(tokens, *kwargs[name].shape[1:]).contiguous()
    for name in ("gemm_out_mul", "gemm_out_sqrsum"):
        many[name] = kwargs[name].expand(-1, tokens, *kwargs[name].shape[2:]).contiguous()
    for name in OUTPUTS:
        many[name].zero_()
    mhc_pre_big_fuse_fwd(**many)
    for name in OUTPUTS:
        assert (many[name] == kwargs[name]).all()


# ---- invalid calls ---------------------------------------------------------------------------------------------------


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[str], dict[str, Any]]:
    def build(device: str) -> dict[str, Any]:
        kwargs = make(6, 4, 64, 2, 0, 10, device)
        return {**kwargs, name: change(kwargs[name])}

    return build


REFUSALS = [
    Refusal("dtype", changed("residual", lambda x: x.float()), r"residual must be bfloat16, got float32"),
    Refusal(
        "streams",
        changed("residual", lambda x: x[:, :3].contiguous()),
        r"residual must have 2, 4 or 8 residual streams, got 3",
    ),
    Refusal("other streams", changed("residual", lambda x: x[:, :2].contiguous()), r"\w+ must have shape .*"),
    Refusal("rank", changed("comb_mix", lambda x: x.view(6, 4, 4)), r"comb_mix must have 2 dimensions, got 3.*"),
    Refusal("scale", changed("mhc_scale", lambda x: x[:1]), r"mhc_scale must have shape \(3,\), got \(1,\)"),
    Refusal("tokens", changed("layer_input", lambda x: x[:5]), r"layer_input must have shape .*, got \(5, 64\)"),
    Refusal("parts", changed("n_splits", lambda x: 16), r"n_splits must be 2, the first size of .*, got 16"),
    Refusal(
        "strides", changed("gemm_out_mul", lambda x: x.transpose(0, 1).contiguous().transpose(0, 1)), r"\w+ must .*"
    ),
    Refusal("repeat", changed("sinkhorn_repeat", lambda x: 1.5), r"sinkhorn_repeat must be an int, got float"),
    Refusal("no repeat", changed("sinkhorn_repeat", lambda x: 0), r"sinkhorn_repeat must be at least 1, got 0"),
    Refusal("None", changed("residual", lambda x: None), r"residual must be a .*tensor, got None(Type)?"),
]


@pytest.mark.usefixtures("needs_extension")
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.id)
@pytest.mark.parametrize("device", DEVICES)
def test_refused(device: str, refusal: Refusal) -> None:
    refusal.check(NAME, mhc_pre_big_fuse_fwd, device)
