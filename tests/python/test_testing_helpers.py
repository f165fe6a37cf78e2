"""The comparison, blanking and generating helpers: what they let pass and what they must catch."""

import math
import os

import pytest
import torch

from tilekernels.testing import (
    BenchCase,
    assert_equal,
    calc_diff,
    check_bias,
    clear_unused_sf,
    clear_unused_sf_col_pack,
    count_bytes,
    quant_level_rank,
)
from tilekernels.testing.bench import dtype_to_str, make_param_id
from tilekernels.testing.generator import (
    generate_e5m6_inputs,
    generate_hidden_sizes,
    generate_moe_params,
    generate_num_tokens,
    generate_rand_float,
    generate_topk_idx,
)

# ---- assert_equal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)], ids=str)
def test_equal_tensors_pass(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape).to(dtype)
    assert_equal(x, x.clone())


def test_strides_of_empty_tensors_do_not_count() -> None:
    assert_equal(torch.empty_strided((0, 3), (1, 4)), torch.empty(0, 3))


@pytest.mark.parametrize(
    ("x", "y", "text"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "dtypes differ: torch.float32 and torch.int32"),
        (torch.zeros(2, 3), torch.zeros(3, 2), r"shapes differ: \(2, 3\) and \(3, 2\)"),
        (torch.zeros(3, 2).t(), torch.zeros(2, 3), r"strides differ: \(1, 2\) and \(3, 1\) for shape \(2, 3\)"),
        (
            torch.tensor([1.0, -0.0]),
            torch.tensor([1.0, 0.0]),
            r"at \(1,\): -0\.0 \(0x80000000\) and 0\.0 \(0x00000000\)",
        ),
        (
            torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32),
            torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
            r"nan \(0x7fc00000\) and nan \(0x7fc00001\)",
        ),
        (torch.zeros(10), torch.ones(10), r"^10 of 10 elements differ \(torch\.float32, shape \(10,\)\)"),
    ],
    ids=["dtype", "shape", "stride", "sign of zero", "payload of nan", "values"],
)
def test_differences_are_found_and_shown(x: torch.Tensor, y: torch.Tensor, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        assert_equal(x, y)


def test_checks_can_be_switched_off() -> None:
    assert_equal(torch.zeros(3, 2).t(), torch.zeros(2, 3), check_stride=False)
    assert_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32), check_dtype=False)
    assert_equal(torch.zeros(2, 3), torch.zeros(6), check_shape=False, check_stride=False)


# ---- other comparisons -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "y", "expected"), [([0.0, 0.0], [0.0, 0.0], 0.0), ([1.0, 2.0], [1.0, 2.0], 0.0), ([3.0], [-3.0], 2.0)]
)
def test_calc_diff(x: list[float], y: list[float], expected: float) -> None:
    assert float(calc_diff(torch.tensor(x), torch.tensor(y))) == expected


def test_calc_diff_is_one_minus_the_normalised_product() -> None:
    x, y = torch.randn(100), torch.randn(100)
    product = 1 - 2 * (x.double() @ y.double()) / (x.double() @ x.double() + y.double() @ y.double())
    assert math.isclose(float(calc_diff(x, y)), float(product), rel_tol=1e-12)


def test_nearest_rounding_has_no_bias() -> None:
    exact = torch.randn(100_000)
    check_bias(exact.bfloat16(), exact)


def test_truncation_is_biased() -> None:
    exact = torch.rand(100_000) + 1
    with pytest.raises(AssertionError, match=r"^rounding is biased: (1\.0000|0\.99\d\d) of 100000 values went down"):
        check_bias((exact * 128).floor() / 128, exact)


def test_no_values_have_no_bias() -> None:
    check_bias(torch.empty(0), torch.empty(0))


def test_count_bytes_walks_nested_tuples() -> None:
    assert (
        count_bytes(torch.zeros(3), (torch.zeros(2, dtype=torch.int8), None), [torch.zeros(1, dtype=torch.int64)]) == 22
    )


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["e4m3", "e2m1"])
def test_ranks_order_every_code_as_its_value(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    if dtype == torch.int8:
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat((values, -values))[torch.stack((codes & 15, codes >> 4), dim=-1).flatten().int()]
    else:
        values = codes.view(dtype).float()
    ranks = quant_level_rank(codes.view(dtype))
    finite = ~values.isnan()
    values, ranks = values[finite], ranks[finite]
    ladder = values.unique()  # -0 and 0 are one step
    steps = torch.searchsorted(ladder, values + 0.0)
    assert torch.equal(ranks, (steps - steps[values == 0][0]).int())


def test_ranks_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match=r"data must be float8_e4m3fn or int8, got torch\.float32"):
        quant_level_rank(torch.zeros(1))


# ---- packed scales ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column_major", [False, True])
def test_unused_bytes_of_a_row_are_cleared(column_major: bool) -> None:
    raw = torch.arange(1, 25, dtype=torch.uint8).reshape(3, 8)
    sf = raw.view(torch.int32)
    if column_major:
        sf = torch.empty_strided((3, 2), (1, 4), dtype=torch.int32).copy_(sf)
    expected = raw.clone()
    expected[:, 6:] = 0  # 6 blocks of 32 in 180 channels
    assert torch.equal(clear_unused_sf(sf, 180, 32), expected)
    assert raw[0, 7] == 8  # the input is left alone


def test_unused_bytes_of_packed_rows_are_cleared() -> None:
    blocks = torch.arange(1, 25, dtype=torch.uint8).reshape(8, 3)  # block of rows x channel
    words = blocks.reshape(2, 4, 3).transpose(1, 2).contiguous().view(torch.int32).reshape(2, 3)
    expected = blocks.clone()
    expected[6:] = 0  # 6 blocks of 32 in 180 rows
    assert torch.equal(clear_unused_sf_col_pack(words, 180, 32), expected)


# ---- generators ------------------------------------------------------------------------------------------------------


def test_token_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TK_FULL_TEST", raising=False)
    assert generate_num_tokens(64) == [4032, 8064]
    monkeypatch.setenv("TK_FULL_TEST", "1")
    assert generate_num_tokens() == [0, 4001, 8001]
    assert generate_num_tokens(is_benchmark=True) == [4001, 8001]


def test_hidden_sizes_are_filtered_by_alignment() -> None:
    assert generate_hidden_sizes() == [576, 2048, 2560, 3072, 4096, 6144, 7168]
    assert generate_hidden_sizes(128) == [2048, 2560, 3072, 4096, 6144, 7168]


@pytest.mark.parametrize(("full", "number"), [("0", 12), ("1", 79)])
def test_moe_settings(full: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TK_FULL_TEST", full)
    settings = list(generate_moe_params())
    assert len(settings) == number
    assert {"num_send_tokens": 4001, "num_topk": 8, "num_experts": 4, "num_ep_ranks": 64} in settings


def test_expert_choices_are_local_and_distinct() -> None:
    params = {"num_send_tokens": 50, "num_topk": 4, "num_experts": 6, "num_ep_ranks": 3}
    chosen = generate_topk_idx(params, device="cpu")
    assert chosen.dtype == torch.int64
    assert chosen.shape[1] == 4
    assert bool((chosen >= 0).any(dim=-1).all())
    assert int(chosen.min()) == -1
    assert int(chosen.max()) == 5
    assert all(len(set(row)) == len(row) for row in ([e for e in row if e >= 0] for row in chosen.tolist()))


def test_no_tokens_choose_nothing() -> None:
    params = {"num_send_tokens": 0, "num_topk": 1, "num_experts": 1, "num_ep_ranks": 1}
    assert generate_topk_idx(params, device="cpu").shape == (0, 1)


def test_random_floats_are_finite_and_wide() -> None:
    x = generate_rand_float((200, 100), device="cpu")
    assert bool(x.isfinite().all())
    assert float(x.abs().max()) > 2.0**100
    assert float(x.abs().min()) < 2.0**-100


def test_e5m6_inputs_end_in_the_largest_number() -> None:
    inputs = list(generate_e5m6_inputs(3, 16, torch.float32))
    assert [special for _, special in inputs] == [False, True, True, True]
    assert all(bool((x[:, -1] == 65024).all()) for x, special in inputs if special)


# ---- names -----------------------------------------------------------------------------------------------------------


def test_ids_are_readable() -> None:
    assert make_param_id({"num_tokens": 8, "dtype": torch.bfloat16}) == "num_tokens=8-dtype=bf16"
    case = BenchCase("moe.topk_gate", {"num_tokens": 8, "num_experts": 64}, lambda device: {}, 1)
    assert case.id == "moe.topk_gate[num_tokens=8-num_experts=64]"


def test_dtype_names() -> None:
    assert [dtype_to_str(dtype) for dtype in (torch.float32, torch.float8_e4m3fn, torch.int8)] == [
        "fp32",
        "e4m3",
        "e2m1",
    ]
    with pytest.raises(ValueError, match=r"dtype must be one of float32, bfloat16, .*, got int64"):
        dtype_to_str(torch.int64)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times mean nothing while other workers use the GPU")
def test_timer_sums_what_a_call_launches() -> None:
    from tilekernels.testing.bench import copy_time_us, kernel_time_us

    x = torch.empty(64 * 1024 * 1024, dtype=torch.uint8, device="cuda")
    y = torch.empty_like(x)
    once = kernel_time_us(lambda: y.copy_(x))
    twice = kernel_time_us(lambda: (y.copy_(x), x.copy_(y)))
    # The second copy finds part of its input in L2, so it may take somewhat less than the first.
    assert 1.2 * once < twice < 2.2 * once
    assert math.isclose(copy_time_us(2 * x.numel()), once, rel_tol=0.2)


@pytest.mark.gpu
def test_timer_refuses_a_call_that_launches_nothing() -> None:
    from tilekernels.testing.bench import kernel_time_us

    with pytest.raises(RuntimeError, match="the function must launch something"):
        kernel_time_us(lambda: None)
