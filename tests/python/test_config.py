"""Process-wide settings: defaults, setting, refusing, resetting."""

from collections.abc import Iterator

import pytest

import tilekernels
from tilekernels import config
from tilekernels.errors import ArgumentError

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


def test_reset_restores_everything() -> None:
    config.set_token_alignment(16)
    config.set_amax_clamp_for_quant("e4m3", False, 1.0)
    config.reset_runtime_config()
    assert config.get_token_alignment() == 128
    assert config.get_amax_clamp_for_quant("e4m3", False) == 1e-4
