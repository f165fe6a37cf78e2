"""What makes a function one of generation 1: assertion errors, and the forms that differ from the main package's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tilekernels
from tilekernels import ArgumentError, ArgumentTypeError, v1
from tilekernels.testing import assert_equal
from tilekernels.v1.testing import generator
from tilekernels.v1.testing.bench import make_param_key, print_average_perf, suppress_stdout_stderr

every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def test_argument_error_is_an_assertion_error_too(needs_extension: None) -> None:
    with pytest.raises(ArgumentError, match=r"^moe\.topk_gate: num_topk must be at most") as caught:
        v1.moe.topk_gate(torch.zeros(4, 8), 9)
    assert isinstance(caught.value, AssertionError)
    with pytest.raises(AssertionError, match=r"^moe\.topk_gate: scores must be float32, got bfloat16"):
        v1.moe.topk_gate(torch.zeros(4, 8, dtype=torch.bfloat16), 2)


def test_argument_type_error_is_an_assertion_error_too() -> None:
    with pytest.raises(ArgumentTypeError, match=r"^moe\.topk_gate: num_topk must be an int, got str") as caught:
        v1.moe.topk_gate(torch.zeros(4, 8), "2")
    assert isinstance(caught.value, AssertionError)


def test_main_package_raises_no_assertion_error(needs_extension: None) -> None:
    with pytest.raises(ArgumentError) as caught:
        tilekernels.moe.topk_gate(torch.zeros(4, 8), 9)
    assert not isinstance(caught.value, AssertionError)


def test_families_load_when_they_are_touched() -> None:
    code = (
        "import sys, tilekernels.v1 as tile_kernels\n"
        "before = 'torch' in sys.modules\ntile_kernels.quant.per_token_cast\n"
        "print(before, 'torch' in sys.modules, 'tilekernels.v1.moe' in sys.modules)"
    )
    folder = str(Path(tilekernels.__file__).parents[1])
    result = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": folder}, capture_output=True, text=True)
    assert result.stdout.split() == ["False", "True", "False"], result.stderr


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_form_compiles_whole() -> None:
    scores = torch.randn(5, 8)
    compiled = torch.compile(v1.moe.topk_gate, backend="eager", fullgraph=True)
    assert_equal(compiled(scores, 2), v1.moe.topk_gate(scores, 2))


@every_device
def test_normalize_weight_sums_from_left_to_right(device: str) -> None:
    weights = torch.rand(1000, 8, device=device)
    denominator = torch.full((1000,), 1e-20, device=device)
    for slot in range(8):
        denominator = denominator + weights[:, slot]
    result = v1.moe.normalize_weight(weights)
    assert_equal(result[0], denominator)
    assert_equal(result[1], weights / denominator[:, None])
    assert_equal(v1.torch.normalize_weight(weights)[0], denominator)


def test_grouped_topk_reference_has_its_own_argument_name() -> None:
    scores = torch.randn(20, 4, 8)
    expected = v1.moe.topk_sum_and_topk_group_idx(scores, num_topk_sum=2, num_topk_groups=3)
    actual = v1.torch.topk_sum_and_topk_group_idx(scores, num_group_sum_topk=2, num_topk_groups=3)
    assert_equal(actual, expected)


@every_device
def test_per_token_casts_agree(device: str) -> None:
    x = torch.randn(9, 192, device=device)
    data, sf = v1.quant.per_token_cast(x, "e4m3", 128, None, False, True, False)
    expected = v1.torch.cast(x, "e4m3", (1, 128), round_sf=True)
    assert_equal(data, expected[0])
    assert_equal(sf, expected[1])
    assert_equal(v1.quant.per_token_cast_with_sf_only(x, "e4m3", 128, None, False, True), sf)
    assert_equal(v1.quant.per_token_cast_with_precomputed_sf(x, "e4m3", 128, sf, None, False, True), data)
    e5m6 = v1.quant.per_token_cast_to_e5m6(x, 192)
    assert_equal(e5m6[0], v1.quant.per_token_cast(x, fmt="e5m6", num_per_channels=192)[0])
    assert_equal(e5m6[0], v1.torch.cast_to_e5m6(x, 192)[0])


def test_casts_without_pairs_refuse_blocks() -> None:
    x, sf = torch.zeros(2, 64), torch.ones(2, 1)
    with pytest.raises(AssertionError, match=r"^quant\.per_token_cast_with_sf_only: x_block_size must be None, got"):
        v1.quant.per_token_cast_with_sf_only(x, "e4m3", 64, (32, 32))
    with pytest.raises(AssertionError, match=r"^quant\.per_token_cast_with_precomputed_sf: x_block_size must be None"):
        v1.quant.per_token_cast_with_precomputed_sf(x, "e4m3", 64, sf, (32, 32))


def test_names_that_are_functions_and_modules() -> None:
    """A package's attribute is the function, and the module of that name can be imported from."""
    from tilekernels.v1.torch.expand_to_fused import expand_to_fused

    assert v1.torch.expand_to_fused is expand_to_fused
    assert v1.torch.cast.__name__ == "cast_ref"


def test_param_key_is_short() -> None:
    params = {"num_tokens": 8, "num_experts": 256, "use_packed_ue8m0": True, "clamp": None, "dtype": torch.bfloat16}
    assert make_param_key(params).split() == ["num_tokens=8", "experts=256", "ue8m0=True", "dtype=bf16"]


def test_average_is_geometric(capsys: pytest.CaptureFixture[str]) -> None:
    print_average_perf([1.0, 4.0], [100.0, 400.0], [0.5, 2.0])
    assert capsys.readouterr().out == "average: 2.00 us, 200.0 GB/s, 1.000 x\n"


def test_output_is_suppressed(capfd: pytest.CaptureFixture[str]) -> None:
    with suppress_stdout_stderr():
        print("hidden")
        os.write(1, b"hidden too")
    print("shown")
    assert capfd.readouterr().out == "shown\n"


@pytest.mark.gpu
def test_sms_of_the_gpu() -> None:
    assert generator.generate_num_sms()[-1] == v1.get_device_num_sms() == v1.config.get_device_num_sms()
    assert v1.config.get_max_smem_per_sm() > 0
    with pytest.raises(AssertionError, match="num_sms"):
        v1.set_num_sms(v1.get_device_num_sms() + 1)
