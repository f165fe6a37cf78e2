"""Every kind of error that tilekernels raises, and the one place where argument errors are worded.

Raised by Python and, through `_C.set_errors`, by the C++ checks, so both sides speak alike:
`moe.topk_gate: scores must be float32, got bfloat16`.
"""

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "DeviceError",
    "NotBuiltError",
    "argument_error",
    "argument_type_error",
    "check_int",
    "shape_of",
]

from typing import Any


class ArgumentError(ValueError):
    """An argument has a value, shape, stride or device that the operator does not take, or is missing."""


class ArgumentTypeError(TypeError):
    """An argument is not the kind of object that the operator takes, or a tensor of a dtype that it does not take."""


class NotBuiltError(RuntimeError):
    """The call is valid, but this build holds no compiled kernel for it."""


class DeviceError(RuntimeError):
    """The driver or the GPU at hand cannot run what was asked."""


def argument_error(operator: str, argument: str, requirement: str, actual: object) -> ArgumentError:
    """Words a refused value. `requirement` completes the sentence after "must": "be float32", "have 2 dimensions"."""
    return ArgumentError(f"{operator}: {argument} must {requirement}, got {actual}")


def argument_type_error(operator: str, argument: str, requirement: str, actual: object) -> ArgumentTypeError:
    """Words a refused type or dtype. `requirement` completes the sentence after "must": "be a tensor"."""
    return ArgumentTypeError(f"{operator}: {argument} must {requirement}, got {actual}")


def check_int(
    operator: str, argument: str, value: object, lowest: int | None = None, highest: int | None = None
) -> None:
    """Raises unless `value` is an int, no bool, and within the limits that are given; `highest` needs `lowest`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise argument_type_error(operator, argument, "be an int", type(value).__name__)
    if lowest is None:
        return
    if highest is None and value < lowest:
        raise argument_error(operator, argument, f"be at least {lowest}", value)
    if highest is not None and not lowest <= value <= highest:
        raise argument_error(operator, argument, f"be between {lowest} and {highest}", value)


def shape_of(operator: str, argument: str, tensor: Any, rank: int) -> tuple[int, ...]:
    """The sizes of a tensor of `rank` dimensions, before the extension has looked at it."""
    try:
        if tensor.dim() == rank:
            shape: tuple[int, ...] = tensor.shape
            return shape
    except (AttributeError, TypeError):
        raise argument_type_error(
            operator, argument, "be a tensor", "None" if tensor is None else type(tensor).__name__
        ) from None
    raise argument_error(operator, argument, f"have {rank} dimensions", tensor.dim())
