"""Comparisons: exact to the byte and the stride, relative in float64, and by the balance of rounding errors."""

from typing import Any

import torch

__all__ = ["assert_equal", "calc_diff", "check_bias", "count_bytes", "quant_level_rank"]

# In units of 1 / sqrt(number of values). One standard deviation of the share of fair roundings that go down is at most
# half a unit, so a fair rounding practically never fails.
_BIAS_BOUND = 10.0

_MAX_SHOWN = 5


def assert_equal(
    x: torch.Tensor, y: torch.Tensor, check_dtype: bool = True, check_shape: bool = True, check_stride: bool = True
) -> None:
    """Raises AssertionError unless x and y agree in dtype, shape, strides (where they hold anything) and every byte.

    Bytes, not values: the sign of zero and the payload of NaN count.
    """
    if check_dtype and x.dtype != y.dtype:
        raise AssertionError(f"dtypes differ: {x.dtype} and {y.dtype}")
    if check_shape and x.shape != y.shape:
        raise AssertionError(f"shapes differ: {tuple(x.shape)} and {tuple(y.shape)}")
    if check_stride and x.numel() and x.stride() != y.stride():
        raise AssertionError(f"strides differ: {x.stride()} and {y.stride()} for shape {tuple(x.shape)}")
    x_bytes, y_bytes = _as_bytes(x), _as_bytes(y)
    if x_bytes.shape != y_bytes.shape:
        raise AssertionError(f"sizes differ: {x_bytes.numel()} and {y_bytes.numel()} bytes")
    if not torch.equal(x_bytes, y_bytes):
        raise AssertionError(_describe_difference(x, y, x_bytes, y_bytes))


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Squared distance over the sum of squares, in float64: 0 for equal tensors, also where both are all zero."""
    x, y = x.double(), y.double()
    scale = (x * x + y * y).sum()
    return (x - y).square().sum() / scale if scale > 0 else torch.zeros_like(scale)


def check_bias(x: torch.Tensor, ref_x: torch.Tensor) -> None:
    """Raises AssertionError if rounding ref_x to x went down much more, or less, often than half the time.

    Values that did not change count half. The bound is 10 / sqrt(number of values).
    """
    if x.numel() == 0:
        return
    x, ref_x = x.double(), ref_x.double()
    share = float(((x < ref_x).sum() + (x == ref_x).sum() / 2) / x.numel())
    bound = _BIAS_BOUND / x.numel() ** 0.5
    if not abs(share - 0.5) < bound:
        raise AssertionError(
            f"rounding is biased: {share:.4f} of {x.numel()} values went down, allowed is 0.5 +- {bound:.4f}"
        )


def count_bytes(*tensors: Any) -> int:
    """Bytes of all elements of tensors, nested tuples and lists of them; None counts nothing."""
    total = 0
    for item in tensors:
        if isinstance(item, tuple | list):
            total += count_bytes(*item)
        elif item is not None:
            total += item.numel() * item.element_size()
    return total


def quant_level_rank(data: torch.Tensor) -> torch.Tensor:
    """The place of each stored value on its format's ladder: neighbouring values differ by one, both zeros are 0.

    data: float8_e4m3fn (..., H), or int8 holding two e2m1 codes a byte (..., H / 2). Returns int32 (..., H).
    """
    raw = data.contiguous().view(torch.uint8)
    if data.dtype == torch.int8:
        codes, sign = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2), 8
    elif data.dtype == torch.float8_e4m3fn:
        codes, sign = raw, 128
    else:
        raise ValueError(f"testing.quant_level_rank: data must be float8_e4m3fn or int8, got {data.dtype}")
    magnitude = (codes & (sign - 1)).int()
    return torch.where(codes >= sign, -magnitude, magnitude)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    # Not reshape: a single element may keep a stride that forbids the view
    dense = x.detach().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _describe_difference(x: torch.Tensor, y: torch.Tensor, x_bytes: torch.Tensor, y_bytes: torch.Tensor) -> str:
    itemsize = x.element_size()
    wrong = (x_bytes != y_bytes.to(x_bytes.device)).reshape(-1, itemsize).any(dim=-1).nonzero().reshape(-1)
    lines = [f"{len(wrong)} of {x.numel()} elements differ ({x.dtype}, shape {tuple(x.shape)}):"]
    for flat in wrong[:_MAX_SHOWN].tolist():
        where = tuple(int(at) for at in torch.unravel_index(torch.tensor(flat), x.shape))
        lines.append(f"  at {where}: {_show_element(x, flat)} and {_show_element(y, flat)}")
    if len(wrong) > _MAX_SHOWN:
        lines.append("  ...")
    return "\n".join(lines)


def _show_element(x: torch.Tensor, flat: int) -> str:
    element = x.detach().contiguous().reshape(-1)[flat : flat + 1].cpu()
    raw = bytes(reversed(element.view(torch.uint8).tolist())).hex()
    value = element.float() if element.is_floating_point() else element
    return f"{value.item()} (0x{raw})"
