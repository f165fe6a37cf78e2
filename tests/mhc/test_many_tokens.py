"""2^20 tokens and one more: the first and the last have the bits that they have alone."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

from tests.mhc.inputs import needs_memory
from tilekernels import mhc

pytestmark = pytest.mark.gpu

NUM_TOKENS, MULT, HIDDEN = 2**20 + 1, 4, 136
ENDS = 37

Tensors = dict[str, torch.Tensor]


def fp32(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


@functools.cache
def constants() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale and base of the mixes, and the matrix of pre-norm."""
    return fp32(3), fp32(24), fp32(24, MULT * HIDDEN)


def sizes(num_tokens: int) -> dict[str, tuple[int, ...]]:
    return {"pre": (num_tokens, MULT), "post": (num_tokens, MULT), "comb": (num_tokens, MULT * MULT)}


def split(x: Tensors) -> Tensors:
    scale, base, _ = constants()
    out = {name: torch.empty(size, device="cuda") for name, size in sizes(len(x["mixes"])).items()}
    mhc.mhc_pre_split_mixes_fwd(x["mixes"], scale, base, out["pre"], out["post"], out["comb"], 2.0, 1e-2)
    return out


def split_bwd(x: Tensors) -> Tensors:
    scale, base, _ = constants()
    grads = torch.empty_like(x["mixes"]), torch.empty_like(scale), torch.empty_like(base)
    mhc.mhc_pre_split_mixes_bwd(x["pre"], x["post"], x["comb"], x["mixes"], x["saved"], scale, base, *grads, 2.0)
    return {"mixes_grad": grads[0]}


def sinkhorn(x: Tensors) -> Tensors:
    matrix, out = x["comb"].view(-1, MULT, MULT), torch.empty((len(x["comb"]), MULT, MULT), device="cuda")
    mhc.mhc_sinkhorn_fwd(matrix, out, 10, 1e-6)
    return {"out": out}


def sinkhorn_bwd(x: Tensors) -> Tensors:
    grad, matrix = (x[name].view(-1, MULT, MULT) for name in ("comb_grad", "comb"))
    out = torch.empty_like(matrix)
    mhc.mhc_sinkhorn_bwd(grad, matrix, out, 10, 1e-6)
    return {"out": out}


def head(x: Tensors) -> Tensors:
    scale, base, _ = constants()
    out = torch.empty_like(x["pre"])
    mhc.mhc_head_compute_mix_fwd(x["pre"], scale[:1], base[:MULT], out, 1e-2)
    return {"out": out}


def head_bwd(x: Tensors) -> Tensors:
    scale, base, _ = constants()
    out, partial = torch.empty_like(x["pre"]), (fp32(132, 1), fp32(132, MULT))
    mhc.mhc_head_compute_mix_bwd(x["post"], x["pre"], scale[:1], base[:MULT], out, *partial, 132)
    return {"out": out}


def apply(x: Tensors) -> Tensors:
    out = torch.empty_like(x["layer"])
    mhc.mhc_pre_apply_mix_fwd(x["streams"], x["pre"], out)
    return {"out": out}


def apply_bwd(x: Tensors) -> Tensors:
    grad = x["streams_grad"].clone()
    return {"mix_grad": mhc.mhc_pre_apply_mix_bwd(x["layer"], x["streams"], x["pre"], grad), "grad": grad}


def mixes_of_post(x: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return x["post"].unsqueeze(-1), x["comb"].view(-1, MULT, MULT)


def post(x: Tensors) -> Tensors:
    return {"out": mhc.mhc_post_fwd(x["layer"], x["streams"], *mixes_of_post(x))}


def post_bwd(x: Tensors) -> Tensors:
    grads = mhc.mhc_post_bwd(x["layer"], x["streams"], *mixes_of_post(x), x["streams_grad"])
    return dict(zip(("layer", "streams", "post", "comb"), grads, strict=True))


def product(x: Tensors) -> Tensors:
    fn = constants()[2]
    num_tokens = len(x["streams"])
    out = {
        "mul": torch.empty((2, num_tokens, 24), device="cuda"),
        "squares": torch.empty((2, num_tokens), device="cuda"),
    }
    mhc.mhc_pre_norm_fn_partials(x["streams"], fn, out["mul"], out["squares"])
    return {name: each.transpose(0, 1) for name, each in out.items()}


def fuse(x: Tensors) -> Tensors:
    scale, base, _ = constants()
    num_tokens = len(x["streams"])
    out = {name: torch.empty(size, device="cuda") for name, size in sizes(num_tokens).items()}
    layer = torch.empty_like(x["layer"])
    # One part: the mixes as they are
    parts = x["mixes"].unsqueeze(0), x["pre"][:, 0].square().unsqueeze(0)
    mhc.mhc_pre_big_fuse_fwd(
        *parts, scale, base, x["streams"], out["post"], out["comb"], layer, 1e-6, 1e-6, 1e-6, 1.0, 10, 1
    )
    return {"post": out["post"], "comb": out["comb"], "layer": layer}


@pytest.fixture(scope="module")
def inputs() -> Tensors:
    torch.manual_seed(20)
    if reason := needs_memory(6 * NUM_TOKENS * MULT * HIDDEN * 2):
        pytest.skip(reason)
    return {
        **{name: fp32(*size) for name, size in sizes(NUM_TOKENS).items()},
        "mixes": fp32(NUM_TOKENS, 24),
        "saved": 2 * torch.rand((NUM_TOKENS, MULT), device="cuda"),
        "comb_grad": fp32(NUM_TOKENS, MULT * MULT),
        "streams": bf16(NUM_TOKENS, MULT, HIDDEN),
        "streams_grad": bf16(NUM_TOKENS, MULT, HIDDEN),
        "layer": bf16(NUM_TOKENS, HIDDEN),
    }


@pytest.mark.parametrize(
    "function",
    [split, split_bwd, sinkhorn, sinkhorn_bwd, head, head_bwd, apply, apply_bwd, post, post_bwd, product, fuse],
    ids=lambda function: function.__name__,
)
def test_first_and_last_tokens_have_their_own_bits(function: Callable[[Tensors], Tensors], inputs: Tensors) -> None:
    results = function(inputs)
    for part in (slice(0, ENDS), slice(NUM_TOKENS - ENDS, NUM_TOKENS)):
        alone = function({name: x[part].clone() for name, x in inputs.items()})
        for name, expected in alone.items():
            assert torch.equal(results[name][part], expected), name
