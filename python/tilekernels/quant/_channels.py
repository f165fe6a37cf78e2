"""What the signatures of the per-channel casts cannot say: rules over several arguments, each worded once."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._outputs import size_of
from ..errors import argument_error, argument_type_error, check_int
from ..layout import PACKED_PER_WORD, ceildiv
from ._checks import check_hidden, shape_of
from ._formats import name_of_dtype
from ._sf import SF_DTYPES
from ._swiglu import check_limit

CAST = "quant.per_channel_cast"
FUSED = "quant.per_channel_cast_fused"
TRANSPOSE = "quant.per_channel_cast_and_transpose"
SWIGLU = "quant.swiglu_forward_and_per_channel_cast_and_transpose"

# Data of x's own size, as the extension is asked for it
SAME_DATA = (torch.float8_e4m3fn, 0, size_of(0, 0), size_of(0, 1))

TILE = 128  # what the tokens of a transposing cast come in
_BLOCKS = (32, 128)  # tokens that share a scale, and channels of a quantised input that do
_MULTIPLE = 64  # what the channels of a row come in


def asked_sf(argument: int = 0, width: int = 1, block: int = 1) -> dict[int, Any]:
    """Scales as the extension is asked for them, for each num_per_tokens.

    argument: the kernel's, whose first size are the rows of the result. width: columns of x for one of the result.
    block: scales in a word of the output.
    """
    dtype = torch.float32 if block == 1 else torch.int32
    return {size: (dtype, 0, size_of(argument, 0, 1, size * block), size_of(0, 1, 1, width)) for size in _BLOCKS}


def check_options(operator: str, fmt: str, num_per_tokens: int, round_sf: bool) -> None:
    if fmt != "e4m3":
        raise argument_error(operator, "fmt", "be 'e4m3'", repr(fmt))
    _check_block(operator, "num_per_tokens", num_per_tokens)
    check_bool(operator, "round_sf", round_sf)


def check_bool(operator: str, argument: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise argument_type_error(operator, argument, "be a bool", type(value).__name__)


def check_packed(operator: str, use_packed_ue8m0: bool, round_sf: bool) -> None:
    check_bool(operator, "use_packed_ue8m0", use_packed_ue8m0)
    if use_packed_ue8m0 and not round_sf:
        raise argument_error(operator, "use_packed_ue8m0", "come with round_sf=True", "round_sf=False")


def input_of(operator: str, x: Any, num_per_channels: int | None) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(data, sf or None, channels that share a scale of the input)."""
    if not isinstance(x, tuple):
        sizes_of(operator, x, (torch.bfloat16, torch.float32))
        if num_per_channels is not None:
            requirement = "be None unless x is a pair (data, sf)"
            raise argument_error(operator, "num_per_channels", requirement, num_per_channels)
        return x, None, TILE
    if len(x) != 2:
        raise argument_error(operator, "x", "be a tensor or a pair (data, sf)", f"a tuple of {len(x)}")
    data, x_sf = x
    num_tokens, hidden = sizes_of(operator, data, (torch.float8_e4m3fn,), "hold data of")
    if num_per_channels is None:
        raise argument_error(operator, "num_per_channels", "be 32 or 128 where x is a pair (data, sf)", None)
    _check_block(operator, "num_per_channels", num_per_channels)
    _check_x_sf(operator, x_sf, num_tokens, hidden, num_per_channels)
    return data, x_sf, num_per_channels


def sizes_of(
    operator: str, x: Any, dtypes: tuple[torch.dtype, ...], verb: str = "be", multiple: int = _MULTIPLE
) -> tuple[int, int]:
    """(tokens, channels) of a matrix of one of the dtypes."""
    num_tokens, hidden = shape_of(operator, "x", x)
    if x.dtype not in dtypes:
        requirement = f"{verb} {' or '.join(name_of_dtype(dtype) for dtype in dtypes)}"
        raise argument_error(operator, "x", requirement, name_of_dtype(x.dtype))
    check_hidden(operator, hidden, multiple)
    return num_tokens, hidden


def check_tokens(operator: str, num_tokens: int) -> None:
    """What a transposing cast needs: its rows of the result are written in pieces of a tile."""
    if num_tokens % TILE:
        raise argument_error(operator, "x", f"have a multiple of {TILE} tokens", num_tokens)


def clamp_of(operator: str, swiglu_clamp_value: float | None) -> float:
    """The kernel's bound: infinity where there is none."""
    check_limit(operator, "swiglu_clamp_value", swiglu_clamp_value, None, 0)
    return math.inf if swiglu_clamp_value is None else float(swiglu_clamp_value)


def _check_block(operator: str, argument: str, value: int) -> None:
    check_int(operator, argument, value)
    if value not in _BLOCKS:
        raise argument_error(operator, argument, "be 32 or 128", value)


def _check_x_sf(operator: str, x_sf: Any, num_tokens: int, hidden: int, num_per_channels: int) -> None:
    shape = shape_of(operator, "x_sf", x_sf)
    if x_sf.dtype not in SF_DTYPES.values():
        raise argument_error(operator, "x_sf", f"be {' or '.join(SF_DTYPES)}", name_of_dtype(x_sf.dtype))
    num_columns = ceildiv(hidden, num_per_channels)
    if x_sf.dtype is torch.int32:
        num_columns = ceildiv(num_columns, PACKED_PER_WORD)
    if shape != (num_tokens, num_columns):
        requirement = f"have shape {(num_tokens, num_columns)} for groups of {num_per_channels} channels"
        raise argument_error(operator, "x_sf", requirement, shape)
