"""per_token_cast and its two relatives: bit-exact against the references, on every kind of input and layout."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.quant.cast_cases import (
    COL_PACKED,
    COL_ROUNDED,
    E4M3_SF,
    PACKED,
    ROUNDED,
    ROW,
    Case,
    Input,
    assert_same_sf,
    random_casts,
    random_plain,
)
from tilekernels import config
from tilekernels.quant import per_token_cast, per_token_cast_with_precomputed_sf, per_token_cast_with_sf_only
from tilekernels.quant._formats import FORMATS, storage_width
from tilekernels.quant._reference import cast_back_ref
from tilekernels.quant._sf import SF_DTYPES, load_sf
from tilekernels.quant.per_token_cast import (
    per_token_cast_ref,
    per_token_cast_with_precomputed_sf_ref,
    per_token_cast_with_sf_only_ref,
)
from tilekernels.testing import assert_equal, check_bias, quant_level_rank
from tilekernels.testing.generator import generate_e5m6_inputs

FULL = os.environ.get("TK_FULL_TEST", "0").lower() in ("1", "true")


def given_data(case: Case, device: str) -> torch.Tensor:
    format = FORMATS[case.fmt]
    shape = (case.input.num_tokens, storage_width(case.input.hidden, format))
    return torch.full(shape, 0x55, dtype=torch.uint8, device=device).view(format.dtype)


def given_sf(case: Case, device: str, gap: int = 0) -> torch.Tensor:
    """Row-major scales to write into, with `gap` unused elements after each row."""
    columns = case.layout.columns(case.num_groups)
    dtype = SF_DTYPES[case.layout.dtype]
    raw = torch.full((case.input.num_tokens, (columns + gap) * dtype.itemsize), 0x55, dtype=torch.uint8, device=device)
    return raw.view(dtype)[:, :columns]


def check_cast(case: Case, device: str) -> None:
    kwargs = {**case.input.make_with_block(device), **case.options()}
    data = given_data(case, device) if case.out in ("data", "both") else None
    sf = given_sf(case, device) if case.out in ("sf", "both") else None
    actual = per_token_cast(**kwargs, **({"out": (data, sf)} if case.out else {}))
    expected = per_token_cast_ref(**kwargs)
    assert_equal(actual[0], expected[0])
    assert_same_sf(actual[1], expected[1], case.layout, case.num_groups)
    assert data is None or actual[0] is data
    assert sf is None or actual[1] is sf


def check_sf_only(case: Case, device: str) -> None:
    x, options = case.input.make(device), case.options()
    sf = given_sf(case, device) if case.out else None
    actual = per_token_cast_with_sf_only(x, **options, out_sf=sf)
    assert_same_sf(actual, per_token_cast_with_sf_only_ref(x, **options), case.layout, case.num_groups)
    assert sf is None or actual is sf


def check_precomputed(case: Case, device: str) -> None:
    x = case.input.make(device)
    sf = per_token_cast_with_sf_only_ref(x, case.fmt, case.group, False, False, False, case.layout.e4m3)
    strided = given_sf(case, device, gap=3 if case.out else 0).copy_(sf)
    data = given_data(case, device) if case.input.offset else None
    options = {"round_sf": case.layout.rounded, "use_e4m3_sf": case.layout.e4m3, "out": data}
    actual = per_token_cast_with_precomputed_sf(x, case.fmt, case.group, strided, **options)
    assert_equal(actual, per_token_cast_with_precomputed_sf_ref(x, case.fmt, case.group, sf))
    assert data is None or actual is data


def random_parameters(cases: Any) -> list[Any]:
    return [pytest.param(case, id=f"{at:03}-{case.id}") for at, case in enumerate(cases)]


CASTS = random_parameters(random_casts(320, seed=1))
SF_ONLY = random_parameters(random_plain(200, seed=2))
PRECOMPUTED = random_parameters(random_plain(200, seed=3, layouts=(ROW, ROUNDED, E4M3_SF)))


# ---- random calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASTS[::5])
def test_cast_on_cpu(case: Case) -> None:
    check_cast(case, "cpu")


@pytest.mark.parametrize("case", SF_ONLY[::10])
def test_sf_only_on_cpu(case: Case) -> None:
    check_sf_only(case, "cpu")


@pytest.mark.parametrize("case", PRECOMPUTED[::10])
def test_precomputed_sf_on_cpu(case: Case) -> None:
    check_precomputed(case, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASTS)
def test_cast_on_gpu(case: Case) -> None:
    check_cast(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", SF_ONLY)
def test_sf_only_on_gpu(case: Case) -> None:
    check_sf_only(case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", PRECOMPUTED)
def test_precomputed_sf_on_gpu(case: Case) -> None:
    check_precomputed(case, "cuda")


# ---- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", [ROW, COL_ROUNDED, COL_PACKED, E4M3_SF], ids=lambda layout: layout.label)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_cast_and_back_is_unbiased(fmt: str, layout: Any, device: str) -> None:
    case = Case(Input("fp32", 500, 576), fmt, 128, layout)
    x = case.input.make(device) * 10
    check_bias(cast_back_ref(per_token_cast(x, **case.options()), "fp32", (1, 128)), x)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
def test_stochastic_cast_keeps_scales_takes_neighbours_and_is_unbiased(fmt: str, device: str) -> None:
    x = torch.randn((2000, 512), device=device)
    nearest, sf = per_token_cast(x, fmt, 64)
    data, stochastic_sf = per_token_cast(x, fmt, 64, stochastic_cast=True)
    assert_equal(stochastic_sf, sf)
    assert (quant_level_rank(data) - quant_level_rank(nearest)).abs().max() <= 1
    assert (quant_level_rank(data) != quant_level_rank(nearest)).float().mean() > 0.1
    error = cast_back_ref((data, sf), "fp32", (1, 64)).double() - x
    # Six standard errors. One step of e4m3 is at most 1/8 of a value, of e2m1 at most a third of the block's maximum.
    step = 0.125 if fmt == "e4m3" else 1.0
    assert abs(error.mean().item()) < 6 * step / error.numel() ** 0.5
    assert_equal(per_token_cast(x[:1].expand(3, -1), fmt, 64, stochastic_cast=True)[0][2], data[0])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_whole_row_of_a_group_size_is_that_group(device: str) -> None:
    x = torch.randn((7, 64), device=device)
    for actual, expected in zip(per_token_cast(x, "e4m3", 64), per_token_cast_ref(x, "e4m3", 64), strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", [ROUNDED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_e5m6_special_values(dtype: torch.dtype, layout: Any, device: str) -> None:
    for x, _ in generate_e5m6_inputs(33, 576, dtype):
        case = Case(Input("fp32", 33, 576), "e5m6", 576, layout)
        actual, expected = (each(x.to(device), **case.options()) for each in (per_token_cast, per_token_cast_ref))
        assert_equal(actual[0], expected[0])
        assert_same_sf(actual[1], expected[1], layout, 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("fmt", "use_e4m3_sf"), [("e4m3", False), ("e4m3", True), ("e2m1", False), ("e2m1", True)])
def test_amax_clamp_is_read_at_call_time(fmt: str, use_e4m3_sf: bool, device: str) -> None:
    x = torch.full((3, 64), 0.25, device=device)
    before = per_token_cast(x, fmt, 64, use_e4m3_sf=use_e4m3_sf)[1].float().max().item()
    try:
        config.set_amax_clamp_for_quant(fmt, use_e4m3_sf, 2 * FORMATS[fmt].max_value)
        data, sf = per_token_cast(x, fmt, 64, use_e4m3_sf=use_e4m3_sf)
        only = per_token_cast_with_sf_only(x, fmt, 64, use_e4m3_sf=use_e4m3_sf)
    finally:
        config.reset_runtime_config()
    assert before < 1
    assert sf.float().unique().tolist() == only.float().unique().tolist() == [2.0]
    assert cast_back_ref((data, sf), "fp32", (1, 64)).unique().tolist() == [0.25 if fmt == "e4m3" else 0.0]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_given_outputs_beside_other_memory(device: str) -> None:
    """Nothing is written outside the given views."""
    x = torch.randn((5, 192), device=device)
    memory = torch.full((5, 8), 0x55, dtype=torch.int32, device=device)
    data = torch.full((7, 192), 0x55, dtype=torch.uint8, device=device)
    out = (data[1:6].view(torch.float8_e4m3fn), memory[:, 2:4])
    per_token_cast(x, "e4m3", 32, round_sf=True, use_packed_ue8m0=True, out=out)
    expected = per_token_cast_ref(x, "e4m3", 32, None, False, True, True)
    assert_equal(out[0], expected[0])
    assert_equal(load_sf(out[1], 5, 6).contiguous(), load_sf(expected[1], 5, 6).contiguous())
    assert (memory[:, :2] == 0x55).all()
    assert (memory[:, 4:] == 0x55).all()
    assert (data[0] == 0x55).all()
    assert (data[6] == 0x55).all()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_given_scales_may_have_any_strides(device: str) -> None:
    x = torch.randn((5, 192), device=device)
    expected = per_token_cast_with_sf_only_ref(x, "e4m3", 32)
    sf = torch.zeros((13, 10), device=device).t()[::2, ::2]
    assert_equal(per_token_cast_with_sf_only(x, "e4m3", 32, out_sf=sf[:, :6]).contiguous(), expected)


@pytest.mark.gpu
def test_cpu_and_gpu_agree() -> None:
    for case in (parameter.values[0] for parameter in CASTS[::20]):
        kwargs = case.input.make_with_block("cpu")
        on_gpu = {name: move(value) for name, value in kwargs.items()}
        expected, actual = per_token_cast(**kwargs, **case.options()), per_token_cast(**on_gpu, **case.options())
        assert_equal(actual[0].cpu(), expected[0])
        assert_equal(
            load_sf(actual[1], case.input.num_tokens, case.num_groups).cpu().contiguous(),
            load_sf(expected[1], case.input.num_tokens, case.num_groups).contiguous(),
            check_stride=False,
        )


def move(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cuda()
    return tuple(move(each) for each in value) if isinstance(value, tuple) else value


# ---- published sizes -------------------------------------------------------------------------------------------------

HIDDEN_1, HIDDEN_2 = (576, 2048, 2560, 3072, 4096, 6144, 7168), (128, 192, 384, 768)
TOKENS = [*([0, 1] if FULL else []), 4001, 8001]
PUBLISHED_INPUTS = [
    *((kind, None, group) for kind in ("bf16", "fp32") for group in (16, 32, 64, 128, 0)),
    *((kind, block, group) for kind in ("e4m3", "e2m1") for block in ((128, 128), (32, 32)) for group in (32, 128)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [ROUNDED, ROW, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("fmt", ["e4m3", "e2m1"])
@pytest.mark.parametrize(("kind", "x_block", "group"), PUBLISHED_INPUTS, ids=lambda value: str(value).replace(" ", ""))
@pytest.mark.parametrize("hidden", [*HIDDEN_1, *HIDDEN_2])
def test_published_sizes(hidden: int, kind: str, x_block: Any, group: int, fmt: str, layout: Any) -> None:
    for num_tokens in TOKENS if hidden in HIDDEN_1 else [512]:
        source = Input(kind, num_tokens, hidden, x_block=x_block, sf_layout=layout)
        check_cast(Case(source, fmt, group or hidden, layout), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [COL_ROUNDED, COL_PACKED], ids=lambda layout: layout.label)
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
@pytest.mark.parametrize("hidden", HIDDEN_1)
def test_published_e5m6_sizes(hidden: int, kind: str, layout: Any) -> None:
    for num_tokens in TOKENS:
        check_cast(Case(Input(kind, num_tokens, hidden), "e5m6", hidden, layout), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("hidden", HIDDEN_1)
def test_rows_of_a_wider_matrix_give_the_same(hidden: int, group: int) -> None:
    wide = torch.randn((4001, 2 * hidden), device="cuda", dtype=torch.bfloat16)
    strided, dense = wide[:, :hidden], wide[:, :hidden].contiguous()
    for actual, expected in zip(
        per_token_cast(strided, "e4m3", group), per_token_cast(dense, "e4m3", group), strict=True
    ):
        assert_equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fmt", "group", "layout"),
    [("e4m3", 128, COL_PACKED), ("e2m1", 16, PACKED), ("e4m3", 7168, ROW), ("e5m6", 7168, COL_ROUNDED)],
    ids=["e4m3-npc128", "e2m1-npc16", "whole row", "e5m6"],
)
def test_more_than_two_to_the_31_elements(fmt: str, group: int, layout: Any) -> None:
    hidden = 7168
    num_tokens = 2**31 // hidden + 1001
    if 8 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = torch.randn((num_tokens, hidden), device="cuda", dtype=torch.bfloat16)
    options = Case(Input("bf16", num_tokens, hidden), fmt, group, layout).options()
    data, sf = per_token_cast(x, **options)
    num_groups = -(-hidden // group)
    loaded = load_sf(sf, num_tokens, num_groups)
    for start in (0, num_tokens // 2, num_tokens - 4000):  # beginning, middle and beyond the boundary
        rows = slice(start, start + 4000)
        expected = per_token_cast_ref(x[rows], **options)
        assert_equal(data[rows], expected[0])
        assert torch.equal(loaded[rows], load_sf(expected[1], 4000, num_groups))


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_in_the_other_modes() -> None:
    hidden, group = 4096, 64
    num_tokens = 2**31 // hidden + 1001
    if 8 * num_tokens * hidden > torch.cuda.mem_get_info()[0]:
        pytest.skip("not enough free GPU memory")
    x = torch.randn((num_tokens, hidden), device="cuda", dtype=torch.bfloat16)
    sf = per_token_cast_with_sf_only(x, "e4m3", group)
    data = per_token_cast_with_precomputed_sf(x, "e4m3", group, sf)
    for start in (0, num_tokens // 2, num_tokens - 4000):
        rows = slice(start, start + 4000)
        assert_equal(sf[rows], per_token_cast_with_sf_only_ref(x[rows], "e4m3", group))
        assert_equal(data[rows], per_token_cast_with_precomputed_sf_ref(x[rows], "e4m3", group, sf[rows]))
