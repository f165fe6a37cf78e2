"""Process-wide settings: defaults, setting, refusing, resetting."""

from collections.abc import Callable, Iterator

import pytest
import torch

import tilekernels
from tilekernels import config
from tilekernels.errors import ArgumentError, ArgumentTypeError, DeviceError

DEFAULT_CLAMPS = [
    ("e4m3", False, 1e-4),
    ("e4m3", True, 0.875),
    ("e2m1", False, 6 * 2.0**-126),
    ("e2m1", True, 0.01171875),
]


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    config.reset_runtime_config()


@pytest.mark.parametrize(("fmt", "use_e4m3_sf", "value"), DEFAULT_CLAMPS)
def test_default_clamps(fmt: str, use_e4m3_sf: bool, value: float) -> None:
    assert config.get_amax_clamp_for_quant(fmt, use_e4m3_sf) == value


def test_setting_one_clamp_leaves_the_others() -> None:
    config.set_amax_clamp_for_quant("e2m1", True, 0.5)
    assert tilekernels.get_amax_clamp_for_quant("e2m1", True) == 0.5
    assert [config.get_amax_clamp_for_quant(fmt, flag) for fmt, flag, _ in DEFAULT_CLAMPS[:3]] == [
        value for _, _, value in DEFAULT_CLAMPS[:3]
    ]


@pytest.mark.parametrize("function", ["get_amax_clamp_for_quant", "set_amax_clamp_for_quant"])
def test_unknown_format_is_refused(function: str) -> None:
    arguments = ("e5m2", False) if function.startswith("get") else ("e5m2", False, 1.0)
    with pytest.raises(ArgumentError, match=rf"^config\.{function}: fmt must be 'e4m3' or 'e2m1', got 'e5m2'$"):
        getattr(config, function)(*arguments)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan")])
def test_clamp_that_is_not_positive_is_refused(value: float) -> None:
    with pytest.raises(ArgumentError, match=r"^config\.set_amax_clamp_for_quant: value must be positive, got"):
        config.set_amax_clamp_for_quant("e4m3", False, value)
    assert config.get_amax_clamp_for_quant("e4m3", False) == 1e-4


def test_token_alignment() -> None:
    assert tilekernels.get_token_alignment() == 128
    tilekernels.set_token_alignment(32)
    assert config.get_token_alignment() == 32
    with pytest.raises(ArgumentError, match=r"^config\.set_token_alignment: token_alignment must be positive, got 0$"):
        config.set_token_alignment(0)
    assert config.get_token_alignment() == 32


def test_sm_limit() -> None:
    tilekernels.set_num_sms(1)
    assert tilekernels.get_num_sms() == config.get_num_sms() == 1
    for wrong in (0, -1):
        with pytest.raises(ArgumentError, match=rf"^config\.set_num_sms: num_sms must be positive, got {wrong}$"):
            config.set_num_sms(wrong)
    with pytest.raises(ArgumentTypeError, match=r"^config\.set_num_sms: num_sms must be an int, got float$"):
        config.set_num_sms(1.0)  # type: ignore[arg-type]
    assert config.get_num_sms() == 1


def test_operators_on_a_cpu_take_one_block() -> None:
    assert config.num_sms_for(torch.device("cpu")) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("function", [config.get_num_sms, config.get_device_num_sms])
def test_without_a_gpu_the_number_of_sms_is_unknown(function: Callable[[], int]) -> None:
    with pytest.raises(DeviceError, match=r"^config\.get_device_num_sms: torch finds no CUDA GPU"):
        function()


@pytest.mark.gpu
def test_sm_limit_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    all_sms = torch.cuda.get_device_properties(device).multi_processor_count
    assert config.get_num_sms() == config.get_device_num_sms() == config.num_sms_for(device) == all_sms
    config.set_num_sms(2)
    assert config.num_sms_for(device) == 2
    assert config.get_device_num_sms() == all_sms
    requirement = rf"be at most the GPU's number of SMs {all_sms}, got {all_sms + 1}"
    with pytest.raises(ArgumentError, match=rf"^config\.set_num_sms: num_sms must {requirement}$"):
        config.set_num_sms(all_sms + 1)
    config.set_num_sms(all_sms)
    assert config.num_sms_for(device) == all_sms


def test_dependent_launches_are_off_until_asked_for() -> None:
    assert config.get_pdl() is False
    tilekernels.set_pdl(True)
    assert tilekernels.get_pdl() is True
    with pytest.raises(ArgumentTypeError, match=r"^config\.set_pdl: flag must be a bool, got int$"):
        config.set_pdl(1)
    assert tilekernels.get_pdl() is True


def test_reset_restores_everything() -> None:
    config.set_pdl(True)
    config.set_token_alignment(16)
    config.set_num_sms(1)
    config.set_amax_clamp_for_quant("e4m3", False, 1.0)
    config.reset_runtime_config()
    assert config._num_sms is None
    assert config.get_pdl() is False
    assert config.get_token_alignment() == 128
    assert config.get_amax_clamp_for_quant("e4m3", False) == 1e-4
