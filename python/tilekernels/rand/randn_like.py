"""Normal random numbers, counter based."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_type_error
from ..moe._random import philox
from ..testing.cases import BenchCase

_NAME = "rand.randn_like"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Logarithms, sines and cosines of two libraries differ in the last bit, and now and then a bf16 number in its rounding
_MAX_DIFF = 1e-8


def randn_like(input: torch.Tensor) -> torch.Tensor:
    """A dense tensor of normal random numbers of mean 0 and variance 1, with the shape, dtype and device of input.

    input: float32, bfloat16 or float16. Each call draws 126 bits from torch's generator of that device, on the device,
    so that `torch.manual_seed` decides them, and a replayed CUDA graph finds fresh ones; numbers 4 * i ... 4 * i + 3 in
    the tensor's order then depend on them and on i alone: Philox4x32-10, then the method of Box and Muller in fp32,
    then rounding. They are not those of `torch.randn` with the same seed, and end at 6.8 standard deviations.
    """
    if not isinstance(input, torch.Tensor):
        raise argument_type_error(_NAME, "input", "be a tensor", type(input).__name__)
    check_dtype(_NAME, "input", input.dtype)
    out = _randn(_draw_state(input.device), (input.dtype, 0, input.numel()))
    return out.view(input.shape)


def randn_like_ref(input: torch.Tensor) -> torch.Tensor:
    """`randn_like` in plain torch."""
    return normal_numbers(_draw_state(input.device), input.numel()).to(input.dtype).view(input.shape)


def fill_normal(out: torch.Tensor) -> torch.Tensor:
    """Fills a dense tensor."""
    _randn(_draw_state(out.device), out.view(-1))
    return out


def normal_numbers(state: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` numbers of a state, in fp32."""
    words = torch.stack(philox_words(state, -(-count // 4)), dim=1).view(-1, 2)
    first = words[:, 0].float() * 2.0**-32 + 2.0**-33
    # As a signed number: half turns in [-1, 1)
    second = torch.where(words[:, 1] >= 2**31, words[:, 1] - 2**32, words[:, 1]).float() * 2.0**-31
    radius = (-2 * first.log()).sqrt()
    angle = second.double() * math.pi
    return (radius[:, None] * torch.stack([angle.cos().float(), angle.sin().float()], dim=1)).view(-1)[:count]


def philox_words(state: torch.Tensor, num_calls: int) -> list[torch.Tensor]:
    """The four words of each call, as int64 tensors: key state[0], counters (0 ... num_calls - 1, state[1])."""
    low, high = state & 0xFFFFFFFF, (state >> 32) & 0xFFFFFFFF
    index = torch.arange(num_calls, device=state.device)
    offset = torch.zeros_like(index)
    key: Any = low[0], high[0]  # tensors serve as well as ints
    return philox([index & 0xFFFFFFFF, index >> 32, offset + low[1], offset + high[1]], key)


def check_dtype(operator: str, argument: str, dtype: Any) -> None:
    """Raises unless numbers are made in that dtype."""
    if dtype not in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        raise argument_type_error(operator, argument, "be float32, bfloat16 or float16", name)


def _draw_state(device: torch.device) -> torch.Tensor:
    """Two numbers of 63 bits from torch's generator: by a kernel of torch's, which graphs capture as any other."""
    return torch.empty(2, dtype=torch.int64, device=device).random_()


def _randn_cpu(state: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(normal_numbers(state, out.shape[0]))


_randn = kernel("rand.randn", cpu=_randn_cpu)


def bench_cases() -> list[BenchCase]:
    """A few numbers, some that end within a vector, and 10^8."""
    sizes = [(1000, torch.float32), (12_345, torch.bfloat16), (10**8, torch.float32), (10**8, torch.bfloat16)]
    return [_case(*size) for size in sizes]


def _case(count: int, dtype: torch.dtype) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        return {"input": torch.zeros(count, dtype=dtype, device=device)}

    params = {"count": count, "dtype": str(dtype).removeprefix("torch.")}
    return BenchCase(_NAME, params, make, count * dtype.itemsize, _MAX_DIFF)
