"""Process-wide settings that operators read at call time: plain module state, shared by all threads.

Setting one never recompiles anything: every value reaches its kernel as an argument. No GPU is touched here.
"""

from .errors import ArgumentError, argument_error

__all__ = [
    "get_amax_clamp_for_quant",
    "get_token_alignment",
    "reset_runtime_config",
    "set_amax_clamp_for_quant",
    "set_token_alignment",
]

_DEFAULT_TOKEN_ALIGNMENT = 128

# (format, scales stored as e4m3) -> the least absolute maximum of a block, so that no scale is zero or subnormal.
# The smallest scale in e4m3 is 2^-9, and the bound the format's largest value times that.
_DEFAULT_AMAX_CLAMP = {
    ("e4m3", False): 1e-4,
    ("e4m3", True): 448 * 2.0**-9,
    ("e2m1", False): 6 * 2.0**-126,
    ("e2m1", True): 6 * 2.0**-9,
}

_amax_clamp = dict(_DEFAULT_AMAX_CLAMP)
_token_alignment = _DEFAULT_TOKEN_ALIGNMENT


def set_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool, value: float) -> None:
    """Sets the lower bound of a block's absolute maximum before its scale is formed.

    fmt: "e4m3" or "e2m1"; use_e4m3_sf: for scales stored as e4m3, or for all others. value over the format's largest
    number has to stay a positive normal fp32 number: scales rounded to powers of two are read from its exponent.
    """
    _check_fmt("config.set_amax_clamp_for_quant", fmt)
    if not value > 0:
        raise argument_error("config.set_amax_clamp_for_quant", "value", "be positive", value)
    _amax_clamp[fmt, bool(use_e4m3_sf)] = float(value)


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    """The lower bound of a block's absolute maximum for casts to fmt, "e4m3" or "e2m1"."""
    try:
        return _amax_clamp[fmt, bool(use_e4m3_sf)]
    except KeyError:
        raise _fmt_error("config.get_amax_clamp_for_quant", fmt) from None


def set_token_alignment(token_alignment: int) -> None:
    """Sets the number of rows to which each expert's segment of an expanded buffer is rounded up."""
    if token_alignment <= 0:
        raise argument_error("config.set_token_alignment", "token_alignment", "be positive", token_alignment)
    global _token_alignment
    _token_alignment = int(token_alignment)


def get_token_alignment() -> int:
    """The number of rows to which each expert's segment of an expanded buffer is rounded up."""
    return _token_alignment


def reset_runtime_config() -> None:
    """Puts every setting of this module back to its default."""
    global _token_alignment
    _token_alignment = _DEFAULT_TOKEN_ALIGNMENT
    _amax_clamp.update(_DEFAULT_AMAX_CLAMP)


def _check_fmt(function: str, fmt: str) -> None:
    if (fmt, False) not in _amax_clamp:
        raise _fmt_error(function, fmt)


def _fmt_error(function: str, fmt: str) -> ArgumentError:
    return argument_error(function, "fmt", "be 'e4m3' or 'e2m1'", repr(fmt))
