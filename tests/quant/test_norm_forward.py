"""RMSNorm forward: exact against plain torch with the kernels' order of summation, and close to float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.quant.cast_cases import assert_same_sf
from tests.quant.sizes import on_devices
from tests.refusals import Refusal
from tilekernels.layout import SfLayout, align
from tilekernels.quant import norm_forward, norm_forward_and_per_token_cast, per_token_cast
from tilekernels.quant._reference import cast_back_ref
from tilekernels.quant.norm_forward import norm_forward_and_per_token_cast_ref, norm_forward_ref
from tilekernels.testing import assert_equal, check_bias

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", CPU_AND_GPU)
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])

COLUMN = {"use_tma_aligned_col_major_sf": True}
ROW_PACKED = {"round_sf": True, "use_packed_ue8m0": True}
PACKED = {**ROW_PACKED, **COLUMN}
LAYOUTS = [
    pytest.param(flags, id=SfLayout.from_flags("", **flags).label)
    for flags in ({}, {"round_sf": True}, COLUMN, ROW_PACKED, PACKED)
]

SIZES = [(0, 64), (1, 32), (5, 128), (9, 992), (17, 1024), (6, 2080), (3, 8192)]
LARGE = [(4001, hidden) for hidden in (192, 384, 2048, 4096, 7168, 8192)]
EPS = 1e-6

# Of rstd: the sum, the division, eps and rsqrt
RSTD_TOLERANCE = 2.0**-20


def make(size: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(size, device=device).to(dtype)


def assert_same(actual: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_equal(one, other)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("with_weight", [False, True], ids=["no_weight", "weight"])
@on_devices([*SIZES, (4, 48)], LARGE)
@every_dtype
def test_norm_is_exact(
    device: str, dtype: torch.dtype, size: tuple[int, int], with_weight: bool, with_residual: bool
) -> None:
    x = make(size, dtype, device)
    weight = make(size[1:], dtype, device) if with_weight else None
    residual = make(size, dtype, device) if with_residual else None
    actual = norm_forward(x, weight, EPS, residual, 1.5, with_rstd=True)
    assert_same(actual, norm_forward_ref(x, weight, EPS, residual, 1.5, True))
    assert (actual[2] is x) != with_residual


@pytest.mark.parametrize("flags", LAYOUTS)
@on_devices(SIZES, LARGE)
@every_dtype
def test_cast_is_exact(device: str, dtype: torch.dtype, size: tuple[int, int], flags: dict[str, Any]) -> None:
    x, weight, residual = make(size, dtype, device), make(size[1:], dtype, device), make(size, dtype, device)
    options = {"residual": residual, "out_scale": 0.7, "with_out_bf16": True, "with_rstd": True, **flags}
    actual = norm_forward_and_per_token_cast(x, weight, EPS, "e4m3", 32, **options)
    expected = norm_forward_and_per_token_cast_ref(x, weight, EPS, "e4m3", 32, **options)
    assert_equal(actual[0][0], expected[0][0])
    assert_same_sf(actual[0][1], expected[0][1], SfLayout.from_flags("", **flags), size[1] // 32)
    assert_same(actual[1:], expected[1:])


@every_dtype
@every_device
def test_cast_is_the_cast_of_the_norm(device: str, dtype: torch.dtype) -> None:
    """Another way to the same bytes: the operator that only casts, after the one that does not."""
    x, weight = make((20, 1088), dtype, device), make((1088,), dtype, device)
    y, rstd, z = norm_forward(x, weight, EPS)
    (data, sf), out_bf16, no_rstd, same = norm_forward_and_per_token_cast(x, weight, EPS, "e4m3", 32)
    expected = per_token_cast(y, "e4m3", 32)
    assert_equal(data, expected[0])
    assert_equal(sf, expected[1])
    assert [rstd, no_rstd, out_bf16] == [None, None, None]
    assert [id(z), id(same)] == [id(x), id(x)]
    assert torch.all((cast_back_ref((data, sf), "fp32", (1, 32)) - y).abs() <= y.abs().amax() / 16)


@every_dtype
@every_device
def test_values_are_close_to_float64(device: str, dtype: torch.dtype) -> None:
    x, weight = make((50, 4096), dtype, device), make((4096,), dtype, device)
    y, rstd, _ = norm_forward(x, weight, EPS, out_scale=0.5, with_rstd=True)
    expected_rstd = torch.rsqrt(x.double().square().mean(dim=1) + EPS)
    assert rstd is not None
    assert torch.all((rstd - expected_rstd).abs() <= RSTD_TOLERANCE * expected_rstd)
    exact = x.double() * rstd.double()[:, None] * weight.double() * 0.5
    if dtype == torch.bfloat16:
        check_bias(y, exact)
    else:
        assert torch.all((y - exact).abs() <= 3 * 2.0**-23 * exact.abs() + 1e-37)


@every_device
def test_extreme_rows(device: str) -> None:
    x = torch.zeros((5, 256), device=device)
    x[1], x[2], x[3, 7], x[4] = 1e-20, 1e18, 3e19, 65504.0
    assert_same(norm_forward(x, None, 1e-12, with_rstd=True), norm_forward_ref(x, None, 1e-12, with_rstd=True))
    assert norm_forward(x, None, 1e-12)[0][0].eq(0).all()


# ---- batches, strides, outputs that are given ------------------------------------------------------------------------


@pytest.mark.parametrize("flags", LAYOUTS)
@pytest.mark.parametrize("kind", ["dense", "strided", "one"])
@every_device
def test_batches(device: str, kind: str, flags: dict[str, Any]) -> None:
    shape = (1 if kind == "one" else 3, 7, 160)
    x, residual = make(shape, torch.bfloat16, device), make(shape, torch.bfloat16, device)
    if kind == "strided":
        x = make((3, 9, 224), torch.bfloat16, device)[:, :7, :160]
    weight = make((160,), torch.bfloat16, device)
    options = {"residual": residual, "with_out_bf16": True, "with_rstd": True, **flags}
    (data, sf), *others = norm_forward_and_per_token_cast(x, weight, EPS, "e4m3", 32, **options)
    layout = SfLayout.from_flags("", **flags)
    columns = layout.columns(5)
    pitch = align(7, 4)
    assert sf.shape == (*shape[:2], columns)
    assert sf.stride() == ((columns * pitch, 1, pitch) if layout.col_major else (7 * columns, columns, 1))
    plain = norm_forward(x, weight, EPS, residual, with_rstd=True)
    assert_same((others[0], others[1], others[2]), plain)
    for batch in range(shape[0]):
        alone = {**options, "residual": residual[batch]}
        expected = norm_forward_and_per_token_cast(x[batch], weight, EPS, "e4m3", 32, **alone)
        assert_equal(data[batch], expected[0][0])
        assert_same_sf(sf[batch], expected[0][1], layout, 5)
        assert_same([each[batch] for each in others], expected[1:])


@pytest.mark.parametrize("first", [0, 16, 3])
@every_dtype
@every_device
def test_strided_and_given_tensors(device: str, dtype: torch.dtype, first: int) -> None:
    weight = make((320,), dtype, device)
    x, residual, out, residual_out = (make((12, 500), dtype, device)[:, first : first + 320] for _ in range(4))
    expected = norm_forward(x.contiguous(), weight, EPS, residual.contiguous())
    actual = norm_forward(x, weight, EPS, residual, out=out, residual_out=residual_out)
    assert [id(actual[0]), id(actual[2])] == [id(out), id(residual_out)]
    assert_equal(out.contiguous(), expected[0])
    assert_equal(residual_out.contiguous(), expected[2])


@pytest.mark.parametrize("packed", [False, True])
@every_device
def test_given_cast(device: str, packed: bool) -> None:
    x, weight = make((11, 256), torch.bfloat16, device), make((256,), torch.bfloat16, device)
    flags = ROW_PACKED if packed else {}
    expected = norm_forward_and_per_token_cast(x, weight, EPS, "e4m3", 32, **flags)
    data = torch.empty((11, 400), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)[:, :256]
    sf = torch.empty((11, 20), dtype=torch.int32 if packed else torch.float32, device=device)[:, : 2 if packed else 8]
    out_bf16 = torch.empty_like(x)
    actual = norm_forward_and_per_token_cast(
        x, weight, EPS, "e4m3", 32, **flags, out=(data, sf), out_bf16=out_bf16, residual_out=torch.empty_like(x)
    )
    assert [id(each) for each in (*actual[0], actual[1], actual[3])] == [id(each) for each in (data, sf, out_bf16, x)]
    assert_equal(data.contiguous(), expected[0][0])
    assert_equal(sf.contiguous(), expected[0][1])
    assert_equal(out_bf16, norm_forward(x, weight, EPS)[0])


@pytest.mark.parametrize("block_m", [8, 64, 128, 192, 256])
@pytest.mark.parametrize("num_tokens", [1, 130, 300])
@every_device
def test_mega_moe_scales(device: str, num_tokens: int, block_m: int) -> None:
    hidden = 512
    x, weight = make((num_tokens, hidden), torch.bfloat16, device), make((hidden,), torch.bfloat16, device)
    num_rows = -(-num_tokens // block_m) * align(block_m, 128) + 5
    raw = torch.full((hidden // 128, num_rows), -1, dtype=torch.int32, device=device)
    target = raw.t()[:num_tokens]
    options = {"mega_moe_sf": target, "mega_moe_block_m": block_m}
    (_, sf), *_ = norm_forward_and_per_token_cast(x, weight, EPS, "e4m3", 32, **ROW_PACKED, **options)
    expected = torch.full_like(raw, -1)
    for token in range(num_tokens):
        block, inside = divmod(token, block_m)
        place = block * align(block_m, 128) + inside // 128 * 128 + inside % 32 * 4 + inside % 128 // 32
        expected[:, place] = sf[token]
    assert_equal(raw, expected)


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    num_tokens, hidden = 2**31 // 8192 + 5, 8192
    x = torch.empty((num_tokens, hidden), dtype=torch.bfloat16, device="cuda").normal_()
    (data, sf), *_ = norm_forward_and_per_token_cast(x, None, EPS, "e4m3", 32)
    for rows in (slice(0, 50), slice(-50, None)):
        expected = norm_forward_and_per_token_cast_ref(x[rows], None, EPS, "e4m3", 32)
        assert_equal(data[rows], expected[0][0])
        assert_equal(sf[rows], expected[0][1])


# ---- refused ---------------------------------------------------------------------------------------------------------


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return lambda device: torch.zeros(shape, dtype=dtype, device=device)


def refusal(id: str, text: str, **changes: Any) -> Refusal:
    def make_kwargs(device: str) -> dict[str, Any]:
        made = {name: value(device) if callable(value) else value for name, value in changes.items()}
        x = torch.zeros((4, 128), dtype=torch.bfloat16, device=device)
        weight = torch.zeros(128, dtype=torch.bfloat16, device=device)
        return {"x": x, "weight": weight, "eps": EPS, "fmt": "e4m3", "num_per_channels": 32, **made}

    return Refusal(id, make_kwargs, text)


MEGA = {"mega_moe_sf": zeros(4, 1, dtype=torch.int32), "mega_moe_block_m": 64}
REFUSALS = [
    refusal("fmt", r"fmt must be 'e4m3', got 'e2m1'", fmt="e2m1"),
    refusal("group", r"num_per_channels must be 32, got 128", num_per_channels=128),
    refusal("no tensor", r"x must be a tensor, got int", x=lambda device: 3),
    refusal("rank", r"x must have 2 or 3 dimensions, got 1", x=zeros(128)),
    refusal("hidden", r"x must have a multiple of 32 channels, at most 8192, got 48", x=zeros(4, 48)),
    refusal("wide", r"x must have a multiple of 32 channels, at most 8192, got 8224", x=zeros(4, 8224)),
    refusal("weight", r"weight must have shape \(128,\), got \(64,\)", weight=zeros(64)),
    refusal("weight dtype", r"weight must be bfloat16, got float32", weight=zeros(128, dtype=torch.float32)),
    refusal("residual", r"residual must have shape \(4, 128\), got \(3, 128\)", residual=zeros(3, 128)),
    refusal("eps", r"eps must be a number, got str", eps="1"),
    refusal("out", r"out must be a pair \(data, sf\), got Tensor", out=zeros(4, 128)),
    refusal("col out", r"use_tma_aligned_col_major_sf must be False where out_sf is given, got True",
            out=lambda device: (None, torch.zeros(4, 4, device=device)), use_tma_aligned_col_major_sf=True),
    refusal("mega alone", r"mega_moe_block_m must be given together with mega_moe_sf, got 64", mega_moe_block_m=64),
    refusal("mega fp32", r"round_sf must be True where mega_moe_sf is given, got False", **MEGA),
    refusal("mega shape", r"mega_moe_sf must have shape \(4, 1\), got \(4, 2\)", round_sf=True, mega_moe_block_m=64,
            mega_moe_sf=zeros(4, 2, dtype=torch.int32)),
    refusal("mega rows", r"mega_moe_sf must have columns of at least 128 rows, got 4", round_sf=True,
            mega_moe_block_m=64, x=zeros(4, 256), weight=None,
            mega_moe_sf=lambda device: torch.zeros(2, 4, dtype=torch.int32, device=device).t()),
]  # fmt: skip
BUILT_REFUSALS = [
    refusal("dtype", r"x must be bfloat16 or float32, got float16", x=zeros(4, 128, dtype=torch.float16), weight=None),
]  # fmt: skip


@pytest.mark.parametrize("refused", REFUSALS, ids=lambda refused: refused.id)
@every_device
def test_invalid_calls(device: str, refused: Refusal) -> None:
    refused.check("quant.norm_forward_and_per_token_cast", norm_forward_and_per_token_cast, device)


@pytest.mark.parametrize("refused", BUILT_REFUSALS, ids=lambda refused: refused.id)
@every_device
def test_invalid_tensors(device: str, refused: Refusal, needs_extension: None) -> None:
    refused.check("quant.norm_forward_and_per_token_cast", norm_forward_and_per_token_cast, device)
