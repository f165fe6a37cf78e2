"""Process-wide settings that operators read at call time: plain module state, shared by all threads.

Setting one never compiles a kernel: every value reaches its kernel as an argument. Only the functions on SMs touch a
GPU, and only when they are called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._native import load_native
from .errors import ArgumentError, DeviceError, NotBuiltError, argument_error, argument_type_error, check_int

if TYPE_CHECKING:
    import torch

__all__ = [
    "get_amax_clamp_for_quant",
    "get_device_num_sms",
    "get_num_sms",
    "get_pdl",
    "get_token_alignment",
    "reset_runtime_config",
    "set_amax_clamp_for_quant",
    "set_num_sms",
    "set_pdl",
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

_MAX_VALUE = {"e4m3": 448.0, "e2m1": 6.0}
_SMALLEST_NORMAL, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of fp32

_amax_clamp = dict(_DEFAULT_AMAX_CLAMP)
_token_alignment = _DEFAULT_TOKEN_ALIGNMENT
_num_sms: int | None = None  # None: all of the device
_num_sms_by_device: dict[int, int] = {}  # what the driver said


def set_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool, value: float) -> None:
    """Sets the lower bound of a block's absolute maximum before its scale is formed.

    fmt: "e4m3" or "e2m1"; use_e4m3_sf: for scales stored as e4m3, or for all others. value over the format's largest
    number has to stay a positive normal fp32 number: scales rounded to powers of two are read from its exponent.
    """
    _check_fmt("config.set_amax_clamp_for_quant", fmt)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise argument_type_error("config.set_amax_clamp_for_quant", "value", "be a number", type(value).__name__)
    if not value > 0:
        raise argument_error("config.set_amax_clamp_for_quant", "value", "be positive", value)
    lowest = _SMALLEST_NORMAL * _MAX_VALUE[fmt]
    if not lowest <= value <= _LARGEST:
        raise argument_error("config.set_amax_clamp_for_quant", "value", f"be from {lowest} to {_LARGEST}", value)
    _amax_clamp[fmt, bool(use_e4m3_sf)] = float(value)


def get_amax_clamp_for_quant(fmt: str, use_e4m3_sf: bool) -> float:
    """The lower bound of a block's absolute maximum for casts to fmt, "e4m3" or "e2m1"."""
    try:
        return _amax_clamp[fmt, bool(use_e4m3_sf)]
    except KeyError:
        raise _fmt_error("config.get_amax_clamp_for_quant", fmt) from None


def set_token_alignment(token_alignment: int) -> None:
    """Sets the number of rows to which each expert's segment of an expanded buffer is rounded up."""
    check_int("config.set_token_alignment", "token_alignment", token_alignment)
    if token_alignment <= 0:
        raise argument_error("config.set_token_alignment", "token_alignment", "be positive", token_alignment)
    global _token_alignment
    _token_alignment = int(token_alignment)


def get_token_alignment() -> int:
    """The number of rows to which each expert's segment of an expanded buffer is rounded up."""
    return _token_alignment


def set_num_sms(num_sms: int) -> None:
    """Limits the SMs that operators take whose blocks wait for each other, from 1 to those of the current GPU.

    Read by `moe.get_fused_mapping`, `moe.group_count` and `moe.aux_fi`; their results do not depend on it. Other
    operators leave it to the GPU how many SMs they get.
    """
    check_int("config.set_num_sms", "num_sms", num_sms)
    if num_sms < 1:
        raise argument_error("config.set_num_sms", "num_sms", "be positive", num_sms)
    if _has_gpu() and num_sms > get_device_num_sms():
        requirement = f"be at most the GPU's number of SMs {get_device_num_sms()}"
        raise argument_error("config.set_num_sms", "num_sms", requirement, num_sms)
    global _num_sms
    _num_sms = num_sms


def get_num_sms() -> int:
    """The limit that `set_num_sms` set, otherwise the number of SMs of the current GPU."""
    return get_device_num_sms() if _num_sms is None else _num_sms


def get_device_num_sms() -> int:
    """The number of SMs of the current GPU; raises DeviceError where there is none."""
    if not _has_gpu():
        raise DeviceError("config.get_device_num_sms: torch finds no CUDA GPU; `tilekernels doctor` says why")
    import torch

    return _query_num_sms(torch.cuda.current_device())


def num_sms_for(device: torch.device) -> int:
    """For operators: how many SMs a call on `device` may take; 1 where no GPU is."""
    if device.type != "cuda":
        return 1
    index = device.index
    num_sms = _num_sms_by_device.get(index) or (_query_num_sms(index) if _has_gpu() else 1)
    return num_sms if _num_sms is None else min(_num_sms, num_sms)


def set_pdl(flag: bool) -> None:
    """Turns programmatic dependent launch on or off for all calls of the process; off at first.

    Kernels of this package are then set up while the kernel before them in the stream still runs, and wait for its end
    before they touch memory: results are the same. Without effect on GPUs below 9.0 and on cooperative kernels. The
    setting is the library's own, `tk_set_pdl` in C, where `tk_set_thread_pdl` decides for single calls.
    """
    if not isinstance(flag, bool):
        raise argument_type_error("config.set_pdl", "flag", "be a bool", type(flag).__name__)
    extension = load_native()
    if extension is None:
        raise NotBuiltError("config.set_pdl: this tree has no compiled kernels; install a wheel")
    extension.set_pdl(flag)


def get_pdl() -> bool:
    """Whether kernels are launched dependently on the one before, as `set_pdl` set it."""
    extension = load_native()
    return extension is not None and bool(extension.get_pdl())


def reset_runtime_config() -> None:
    """Puts every setting of this module back to its default."""
    global _num_sms, _token_alignment
    if get_pdl():
        set_pdl(False)
    _num_sms = None
    _token_alignment = _DEFAULT_TOKEN_ALIGNMENT
    _amax_clamp.update(_DEFAULT_AMAX_CLAMP)


def _check_fmt(function: str, fmt: str) -> None:
    if (fmt, False) not in _amax_clamp:
        raise _fmt_error(function, fmt)


def _fmt_error(function: str, fmt: str) -> ArgumentError:
    return argument_error(function, "fmt", "be 'e4m3' or 'e2m1'", repr(fmt))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _query_num_sms(index: int) -> int:
    import torch

    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    _num_sms_by_device[index] = num_sms
    return num_sms
