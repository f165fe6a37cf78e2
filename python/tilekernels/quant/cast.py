"""Conversion of a tensor from one dtype to another, to nearest or with stochastic rounding."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error, argument_type_error
from ..testing.cases import BenchCase
from ._formats import encode_e4m3, name_of_dtype
from ._stochastic import round_to_bf16_stochastic, round_to_e4m3_stochastic

CAST = "quant.cast"

_DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn)
_STOCHASTIC = {torch.float32: (torch.bfloat16, torch.float8_e4m3fn), torch.bfloat16: (torch.float8_e4m3fn,)}
_GROUP = 4  # elements that share random bits


def cast(x: torch.Tensor, dtype: torch.dtype, stochastic_rounding: bool = False) -> torch.Tensor:
    """A copy of x in another dtype.

    x: dense, any shape; x and dtype: bf16, fp32, fp16 or e4m3. To nearest even, what is too large for e4m3 becomes its
    largest number, what is too large for fp16 infinity.
    stochastic_rounding: up with the probability of the part that is cut off, by 16 bits that are hashed from the bits
    of four neighbours and their place, so that equal tensors give equal results; fp32 to bf16 or e4m3 and bf16 to e4m3,
    a multiple of four elements. What is too large becomes the largest number.
    """
    if not isinstance(x, torch.Tensor):
        raise argument_type_error(CAST, "x", "be a tensor", "None" if x is None else type(x).__name__)
    _check_dtypes(x, dtype, stochastic_rounding)
    if not x.is_contiguous():
        raise argument_error(CAST, "x", "be dense", f"strides {x.stride()} for shape {tuple(x.shape)}")
    if x.dtype is dtype:
        return x.clone()
    out: torch.Tensor = _kernel(x.view(-1), (dtype, 0, x.numel()), stochastic_rounding)
    return out.view(x.shape)


def cast_ref(x: torch.Tensor, dtype: torch.dtype, stochastic_rounding: bool = False) -> torch.Tensor:
    """`cast` in plain torch."""
    if stochastic_rounding:
        rounded = round_to_bf16_stochastic if dtype is torch.bfloat16 else round_to_e4m3_stochastic
        return rounded(x.float().flatten()).view(x.shape)
    if x.dtype is dtype:
        return x.clone()
    return encode_e4m3(x) if dtype is torch.float8_e4m3fn else x.to(dtype)


def _check_dtypes(x: torch.Tensor, dtype: torch.dtype, stochastic_rounding: bool) -> None:
    names = ", ".join(map(name_of_dtype, _DTYPES))
    if not isinstance(dtype, torch.dtype):
        raise argument_type_error(CAST, "dtype", "be a torch.dtype", repr(dtype))
    for argument, value in (("x", x.dtype), ("dtype", dtype)):
        if value not in _DTYPES:
            raise argument_error(CAST, argument, f"be one of {names}", name_of_dtype(value))
    if not isinstance(stochastic_rounding, bool):
        raise argument_type_error(CAST, "stochastic_rounding", "be a bool", type(stochastic_rounding).__name__)
    if not stochastic_rounding:
        return
    targets = _STOCHASTIC.get(x.dtype, ())
    if dtype not in targets:
        allowed = " or ".join(map(name_of_dtype, targets)) or "absent"
        requirement = f"be {allowed} for stochastic rounding of {name_of_dtype(x.dtype)}"
        raise argument_error(CAST, "dtype", requirement, name_of_dtype(dtype))
    if x.numel() % _GROUP:
        raise argument_error(CAST, "x", "have a multiple of 4 elements for stochastic rounding", x.numel())


def _cast_cpu(x: torch.Tensor, out: torch.Tensor, stochastic: bool) -> None:
    out.copy_(cast_ref(x, out.dtype, stochastic))


_kernel = kernel(CAST, cpu=_cast_cpu)


def bench_cases() -> list[BenchCase]:
    """Every pair at one large size, the common ones also small."""
    cases = []
    for source in _DTYPES:
        cases += [_case((8192, 7168), source, target, False) for target in _DTYPES if target is not source]
    for source, targets in _STOCHASTIC.items():
        cases += [_case((8192, 7168), source, target, True) for target in targets]
        cases += [_case((64, 4096), source, target, True) for target in targets]
    cases.append(_case((4096, 4096), torch.bfloat16, torch.float8_e4m3fn, False))
    cases.append(_case((8, 4096), torch.bfloat16, torch.float8_e4m3fn, False))
    cases.append(_case((33, 7), torch.float32, torch.bfloat16, False))
    return cases


def _case(shape: tuple[int, int], source: torch.dtype, target: torch.dtype, stochastic: bool) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x = torch.randn(shape, device=device).to(source)
        return {"x": x, "dtype": target, "stochastic_rounding": stochastic}

    params = {"shape": shape, "in": name_of_dtype(source), "dtype": name_of_dtype(target)}
    num_bytes = shape[0] * shape[1] * (source.itemsize + target.itemsize)
    return BenchCase(CAST, {**params, "stochastic": stochastic}, make, num_bytes)
