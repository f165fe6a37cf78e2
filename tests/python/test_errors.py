"""The error classes and their one wording."""

import pytest

import tilekernels
from tilekernels import errors


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("ArgumentError", ValueError),
        ("ArgumentTypeError", TypeError),
        ("NotBuiltError", RuntimeError),
        ("DeviceError", RuntimeError),
    ],
)
def test_errors_are_also_the_builtin_kind(name: str, base: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, base)
    assert getattr(tilekernels, name) is error


def test_argument_error_names_call_argument_requirement_and_actual() -> None:
    error = errors.argument_error("moe.topk_gate", "num_topk", "be at most 64", 65)
    assert isinstance(error, errors.ArgumentError)
    assert str(error) == "moe.topk_gate: num_topk must be at most 64, got 65"


def test_argument_type_error_names_call_argument_requirement_and_actual() -> None:
    error = errors.argument_type_error("moe.topk_gate", "scores", "be float32", "bfloat16")
    assert isinstance(error, errors.ArgumentTypeError)
    assert str(error) == "moe.topk_gate: scores must be float32, got bfloat16"
