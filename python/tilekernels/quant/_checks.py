"""What the signatures of the casts cannot say: rules over several arguments, each worded once.

The kernel's own check comes first on the way to a GPU. It knows everything about one tensor alone, and some of the
rules here as formulas: those are looked at again, to say them better, once it has refused a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import ArgumentError, ArgumentTypeError, argument_error, argument_type_error, check_int
from ..layout import PACKED_PER_WORD, SfLayout, ceildiv
from ._formats import E2M1, E4M3, E5M6, Format, name_of_dtype
from ._sf import SF_DTYPES

if TYPE_CHECKING:
    from ._settings import CastSettings

CAST = "quant.per_token_cast"
SF_ONLY = "quant.per_token_cast_with_sf_only"
PRECOMPUTED = "quant.per_token_cast_with_precomputed_sf"

# Only the full cast knows e5m6 and scales of whole rows.
_FORMATS = {format.name: format for format in (E4M3, E2M1)}
_CAST_FORMATS = {**_FORMATS, E5M6.name: E5M6}
_BF16, _FP32 = torch.bfloat16, torch.float32
_GROUPS = (16, 32, 64, 128)  # channels of a token that share a scale
_BLOCK_SIDES = (32, 128)  # tokens or channels of a block
_INPUT_VECTOR = 16  # channels of a quantised input that are converted with one factor


# ---- options ---------------------------------------------------------------------------------------------------------


def find_format(operator: str, fmt: str) -> Format:
    formats = _CAST_FORMATS if operator == CAST else _FORMATS
    try:
        return formats[fmt]
    except (KeyError, TypeError):
        names = ", ".join(repr(name) for name in formats)
        raise argument_error(operator, "fmt", f"be one of {names}", repr(fmt)) from None


def find_group(operator: str, format: Format, num_per_channels: int) -> int:
    """The kernel's group: num_per_channels, or 0 for whole rows, whose length is still to be compared."""
    check_int(operator, "num_per_channels", num_per_channels)
    if format is not E5M6 and num_per_channels in _GROUPS:
        return num_per_channels
    if operator != CAST:
        raise argument_error(operator, "num_per_channels", _one_of_the_groups(), num_per_channels)
    return 0


def find_block(operator: str, block_size: Any) -> tuple[int, int]:
    """(rows, columns) of the blocks of a per-block cast."""
    block_rows, block_cols = pair_of_ints(operator, "block_size", block_size)
    if block_rows not in _BLOCK_SIDES or block_cols not in _BLOCK_SIDES:
        sides = " or ".join(map(str, _BLOCK_SIDES))
        raise argument_error(operator, "block_size", f"hold {sides} each", (block_rows, block_cols))
    return block_rows, block_cols


def pair_of_ints(operator: str, argument: str, value: Any) -> tuple[int, int]:
    """The two sides of a block."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise argument_type_error(operator, argument, "be a pair (rows, columns)", repr(value))
    first, second = value
    if isinstance(first, bool) or isinstance(second, bool) or not (isinstance(first, int) and isinstance(second, int)):
        raise argument_type_error(operator, argument, "hold two ints", repr(value))
    return first, second


def check_e5m6(operator: str, layout: SfLayout, stochastic: bool) -> None:
    """What the other formats allow and this one does not."""
    if layout.e4m3:
        raise refused_flag(operator, "use_e4m3_sf", "for fmt 'e5m6'")
    if stochastic:
        raise refused_flag(operator, "stochastic_cast", "for fmt 'e5m6'")


def refused_flag(operator: str, flag: str, reason: str) -> ArgumentError:
    return argument_error(operator, flag, f"be False {reason}", True)


def _one_of_the_groups() -> str:
    return f"be one of {', '.join(map(str, _GROUPS))}"


# ---- inputs ----------------------------------------------------------------------------------------------------------


def sizes_of(x: torch.Tensor, settings: CastSettings) -> tuple[int, int]:
    """(tokens, channels) of an unquantised input that goes with the settings."""
    try:
        (num_tokens, hidden), dtype = x.shape, x.dtype
    except (AttributeError, TypeError, ValueError):
        shape_of(settings.operator, "x", x)
        raise
    if dtype is not _BF16 and dtype is not _FP32:
        raise _wrong_dtype(settings.operator, "x", "be bfloat16 or float32", x)
    if settings.group == 0 and (settings.num_per_channels != hidden or hidden == 0):
        requirement = f"{_one_of_the_groups()} or the number of channels {hidden}"
        if settings.fmt == E5M6.name:
            requirement = f"equal the number of channels {hidden} for fmt 'e5m6'"
        raise argument_error(settings.operator, "num_per_channels", requirement, settings.num_per_channels)
    if hidden % settings.multiple:
        check_hidden(settings.operator, hidden, settings.multiple)
    return num_tokens, hidden


def multiple_of_channels(format: Format) -> int:
    """What the channels of a row come in: eight values of e5m6 fill twelve bytes."""
    return 8 if format is E5M6 else 64


def check_hidden(operator: str, hidden: int, multiple: int) -> None:
    if hidden % multiple:
        raise argument_error(operator, "x", f"have a multiple of {multiple} channels", hidden)


def sizes_of_pair(
    x: tuple[Any, ...], x_block_size: Any, settings: CastSettings
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(data, sf, tokens, channels) of a quantised input whose scales fit x_block_size."""
    operator = settings.operator
    if settings.fmt == E5M6.name:
        raise argument_error(operator, "x", "be a bfloat16 or float32 tensor for fmt 'e5m6'", "a pair (data, sf)")
    if len(x) != 2:
        raise argument_error(operator, "x", "be a tensor or a pair (data, sf)", f"a tuple of {len(x)}")
    data, x_sf = x
    num_tokens, width = shape_of(operator, "x", data)
    if data.dtype is not torch.float8_e4m3fn and data.dtype is not torch.int8:
        raise _wrong_dtype(operator, "x", "hold data of float8_e4m3fn or int8", data)
    hidden = 2 * width if data.dtype is torch.int8 else width
    if settings.group == 0:
        raise argument_error(operator, "num_per_channels", _one_of_the_groups(), settings.num_per_channels)
    check_hidden(operator, hidden, settings.multiple)
    block_rows, block_cols = _check_x_block_size(operator, x_block_size, hidden)
    _check_x_sf(operator, x_sf, num_tokens, hidden, block_rows, block_cols)
    return data, x_sf, num_tokens, hidden


def sizes_of_quantised(
    operator: str, x: Any, x_block_size: Any, x_special_fmt: str | None
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(data, sf, tokens, channels) of what is to be cast back, with blocks of any size."""
    if x_special_fmt is not None and x_special_fmt != E5M6.name:
        raise argument_error(operator, "x_special_fmt", "be None or 'e5m6'", repr(x_special_fmt))
    data, x_sf = pair_of_tensors(operator, x)
    num_tokens, width = shape_of(operator, "x", data)
    hidden = _check_data(operator, data, width, x_special_fmt)
    block_rows, block_cols = pair_of_ints(operator, "x_block_size", x_block_size)
    if block_rows < 1 or block_cols < 1:
        raise argument_error(operator, "x_block_size", "be positive", x_block_size)
    _check_x_sf(operator, x_sf, num_tokens, hidden, block_rows, block_cols)
    return data, x_sf, num_tokens, hidden


def sizes_of_lossless(
    operator: str, x: Any, x_block_size: Any, out_block_size: Any, layout: SfLayout
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """(data, sf, tokens, channels) of packed e2m1 whose blocks make up those of the output."""
    data, x_sf = pair_of_tensors(operator, x)
    num_tokens, width = shape_of(operator, "x", data)
    if data.dtype is not torch.int8:
        raise _wrong_dtype(operator, "x", "hold data of int8", data)
    check_hidden(operator, 2 * width, 32)
    x_block = pair_of_ints(operator, "x_block_size", x_block_size)
    out_block = pair_of_ints(operator, "out_block_size", out_block_size)
    for argument, block in (("x_block_size", x_block), ("out_block_size", out_block)):
        if block[0] < 1 or block[1] < 1:
            raise argument_error(operator, argument, "be positive", block)
        if block[1] & (block[1] - 1):
            raise argument_error(operator, argument, "have a power of two as columns", block)
    if out_block[0] % x_block[0] or out_block[1] % x_block[1]:
        raise argument_error(operator, "out_block_size", f"hold multiples of x_block_size {x_block}", out_block)
    _check_x_sf(operator, x_sf, num_tokens, 2 * width, *x_block)
    if x_sf.dtype is torch.float8_e4m3fn:
        raise _wrong_dtype(operator, "x_sf", "be float32 or int32", x_sf)
    for argument, block, packed in (
        ("x_block_size", x_block, x_sf.dtype is torch.int32),
        ("out_block_size", out_block, layout.packed),
    ):
        if packed and block[1] == 1:
            raise argument_error(operator, argument, "have at least 2 columns where scales are packed", block)
    return data, x_sf, num_tokens, 2 * width


def pair_of_tensors(operator: str, x: Any) -> tuple[Any, Any]:
    """(data, sf) of a quantised input."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        actual = f"{type(x).__name__} of {len(x)}" if isinstance(x, (tuple, list)) else type(x).__name__
        raise argument_type_error(operator, "x", "be a pair (data, sf)", actual)
    data, x_sf = x
    return data, x_sf


def _check_data(operator: str, data: Any, width: int, x_special_fmt: str | None) -> int:
    """The channels of stored data that goes with x_special_fmt."""
    dtype = data.dtype
    if x_special_fmt is not None:
        if dtype is not torch.uint8:
            raise _wrong_dtype(operator, "x", "hold data of uint8 with x_special_fmt='e5m6'", data)
        if width % 12:
            raise argument_error(operator, "x", "have a multiple of 12 bytes in a row of e5m6", width)
        return width * 2 // 3
    if dtype is not torch.float8_e4m3fn and dtype is not torch.int8:
        raise _wrong_dtype(operator, "x", "hold data of float8_e4m3fn or int8", data)
    hidden = 2 * width if dtype is torch.int8 else width
    check_hidden(operator, hidden, 64)
    return hidden


def refused_block_size(operator: str, x_block_size: object) -> ArgumentError:
    return argument_error(operator, "x_block_size", "be None unless x is a pair (data, sf)", x_block_size)


def _check_x_block_size(operator: str, x_block_size: Any, hidden: int) -> tuple[int, int]:
    if not isinstance(x_block_size, (tuple, list)) or len(x_block_size) != 2:
        requirement = "be a pair (rows, columns) where x is a pair (data, sf)"
        raise argument_type_error(operator, "x_block_size", requirement, repr(x_block_size))
    block_rows, block_cols = x_block_size
    if not isinstance(block_rows, int) or not isinstance(block_cols, int):
        raise argument_type_error(operator, "x_block_size", "hold two ints", repr(x_block_size))
    if block_rows < 1 or block_cols < 1:
        raise argument_error(operator, "x_block_size", "be positive", x_block_size)
    if block_cols % _INPUT_VECTOR and block_cols < hidden:
        requirement = f"have a multiple of {_INPUT_VECTOR} columns, or at least the {hidden} of x"
        raise argument_error(operator, "x_block_size", requirement, x_block_size)
    return block_rows, block_cols


def _check_x_sf(
    operator: str, x_sf: torch.Tensor, num_tokens: int, hidden: int, block_rows: int, block_cols: int
) -> None:
    shape = shape_of(operator, "x_sf", x_sf)
    if x_sf.dtype not in SF_DTYPES.values():
        raise _wrong_dtype(operator, "x_sf", f"be {' or '.join(SF_DTYPES)}", x_sf)
    num_rows, num_columns = ceildiv(num_tokens, block_rows), ceildiv(hidden, block_cols)
    if x_sf.dtype is torch.int32:
        if block_cols == 1:
            num_rows = ceildiv(num_rows, PACKED_PER_WORD)
        else:
            num_columns = ceildiv(num_columns, PACKED_PER_WORD)
    expected = (num_rows, num_columns)
    if shape != expected:
        requirement = f"have shape {expected} for blocks of {block_rows} x {block_cols}"
        raise argument_error(operator, "x_sf", requirement, shape)
    if x_sf.stride(0) != 1 and x_sf.stride(1) != 1 and shape[0] > 1 and shape[1] > 1:
        raise argument_error(operator, "x_sf", "have a stride of 1 in one dimension", x_sf.stride())


# ---- tensors that are given ------------------------------------------------------------------------------------------


def check_out(out: Any, settings: CastSettings) -> None:
    """Data to write into; its shape and strides are the kernel's matter, its dtype tells the kernel the format."""
    if getattr(out, "dtype", None) is not settings.out_dtype:
        requirement = f"be {name_of_dtype(settings.out_dtype)} for this fmt"
        raise _wrong_dtype(settings.operator, "out", requirement, out)


def check_out_sf(out_sf: Any, settings: CastSettings) -> None:
    """Scales to write into; their dtype tells the kernel how to store them."""
    operator, dtype = settings.operator, settings.sf_dtype
    if settings.sf_alignment:
        raise argument_error(operator, "use_tma_aligned_col_major_sf", "be False where out_sf is given", True)
    if getattr(out_sf, "dtype", None) is not dtype:
        reasons = {torch.int32: "with use_packed_ue8m0=True", torch.float8_e4m3fn: "with use_e4m3_sf=True"}
        requirement = f"be {name_of_dtype(dtype)} {reasons.get(dtype, 'without packed or e4m3 scales')}"
        raise _wrong_dtype(operator, "out_sf", requirement, out_sf)


def check_given_sf(sf: Any, settings: CastSettings) -> None:
    """Scales that are an input."""
    if getattr(sf, "dtype", None) is not settings.sf_dtype:
        use_e4m3_sf = settings.sf_dtype is torch.float8_e4m3fn
        requirement = f"be {name_of_dtype(settings.sf_dtype)} with use_e4m3_sf={use_e4m3_sf}"
        raise _wrong_dtype(settings.operator, "sf", requirement, sf)


def given_outputs(out: Any, settings: CastSettings) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Data and scales that a caller gave, of the right dtypes; either may be None."""
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise _refused_out(settings.operator, out)
    data, sf = out
    if data is not None and getattr(data, "dtype", None) is not settings.out_dtype:
        check_out(data, settings)
    if sf is not None and (settings.sf_alignment or getattr(sf, "dtype", None) is not settings.sf_dtype):
        check_out_sf(sf, settings)
    return data, sf


def with_made(data: torch.Tensor | None, sf: torch.Tensor | None, made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The data and scales of a call: those that were given, and what the launch made of the others."""
    if data is None and sf is None:
        pair: tuple[torch.Tensor, torch.Tensor] = made
        return pair
    return (made if data is None else data), (made if sf is None else sf)


def _refused_out(operator: str, out: Any) -> ArgumentTypeError:
    actual = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
    return argument_type_error(operator, "out", "be a pair (data, sf)", actual)


def check_sf_shape(operator: str, argument: str, sf: Any, num_rows: int, num_columns: int) -> None:
    if isinstance(sf, torch.Tensor) and sf.shape != (num_rows, num_columns):
        raise argument_error(operator, argument, f"have shape {(num_rows, num_columns)}", tuple(sf.shape))


def shape_of(operator: str, argument: str, tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and stored columns of a matrix."""
    try:
        num_rows, width = tensor.shape
    except (AttributeError, TypeError, ValueError):
        if not isinstance(tensor, torch.Tensor):
            raise _not_a_tensor(operator, argument, tensor) from None
        raise argument_error(operator, argument, "have 2 dimensions", tensor.dim()) from None
    return num_rows, width


def _wrong_dtype(operator: str, argument: str, requirement: str, value: Any) -> ArgumentError | ArgumentTypeError:
    if not isinstance(value, torch.Tensor):
        return _not_a_tensor(operator, argument, value)
    return argument_error(operator, argument, requirement, name_of_dtype(value.dtype))


def _not_a_tensor(operator: str, argument: str, value: object) -> ArgumentTypeError:
    return argument_type_error(operator, argument, "be a tensor", "None" if value is None else type(value).__name__)
