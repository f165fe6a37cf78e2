"""Sizes and random inputs that tests and benchmarks of several operators share.

TK_FULL_TEST=1 adds the rare sizes: no tokens, one token's top-k, other expert counts.
"""

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..layout import align

__all__ = [
    "generate_e5m6_inputs",
    "generate_hidden_sizes",
    "generate_moe_params",
    "generate_num_tokens",
    "generate_rand_float",
    "generate_topk_idx",
]

_HIDDEN_SIZES = (576, 2048, 2560, 3072, 4096, 6144, 7168)
_NUM_TOKENS = (4001, 8001)
_NUM_SEND_TOKENS = 4001

# Exponents of generate_rand_float: with them most of fp32's range is met, and scales of a block still differ.
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = -110, 126


def generate_num_tokens(alignment: int = 1, is_benchmark: bool = False) -> list[int]:
    """Token counts, rounded up to `alignment`; a full test run starts with none."""
    sizes = [align(num_tokens, alignment) for num_tokens in _NUM_TOKENS]
    return [0, *sizes] if _is_full_test() and not is_benchmark else sizes


def generate_hidden_sizes(align: int = 64) -> list[int]:
    """The hidden sizes of real models that are multiples of `align`."""
    return [hidden for hidden in _HIDDEN_SIZES if hidden % align == 0]


def generate_moe_params(is_benchmark: bool = False) -> Iterator[dict[str, int]]:
    """Expert-parallel settings: num_send_tokens, num_topk, num_experts (of one rank) and num_ep_ranks."""
    full = _is_full_test()
    if full and not is_benchmark:
        yield {"num_send_tokens": 0, "num_topk": 1, "num_experts": 1, "num_ep_ranks": 1}
    for num_topk in (1, 2, 6, 7, 8, 9) if full else (2, 6, 8, 9):
        for total_experts in (72, 256, 288, 384) if full else (72, 256):
            for num_ep_ranks in (1, 8, 64, 72, 256) if full else (8, 64):
                if total_experts % num_ep_ranks == 0:
                    yield {
                        "num_send_tokens": _NUM_SEND_TOKENS,
                        "num_topk": num_topk,
                        "num_experts": total_experts // num_ep_ranks,
                        "num_ep_ranks": num_ep_ranks,
                    }


def generate_topk_idx(params: dict[str, int], device: Any = None) -> torch.Tensor:
    """Expert choices as one rank sees them: int64 (M, num_topk), -1 for experts of other ranks.

    Every rank's tokens choose among all experts; those that chose none of this rank's are left out.
    """
    device = _default_device(device)
    num_tokens = params["num_send_tokens"] * params["num_ep_ranks"]
    num_experts, num_topk = params["num_experts"], params["num_topk"]
    scores = torch.rand(num_tokens, num_experts * params["num_ep_ranks"], device=device, dtype=torch.bfloat16)
    chosen = scores.topk(num_topk, dim=-1).indices
    local = chosen < num_experts
    return torch.where(local, chosen, -1)[local.any(dim=-1)]


def generate_rand_float(shape: tuple[int, ...], device: Any = None) -> torch.Tensor:
    """fp32 values over nearly the whole range: normal numbers times a power of two of their own; all finite."""
    device = _default_device(device)
    limit = torch.finfo(torch.float32).max / 8
    exponents = torch.randint(_SMALLEST_EXPONENT, _LARGEST_EXPONENT + 1, shape, device=device)
    return torch.ldexp(torch.randn(shape, device=device), exponents).clamp(-limit, limit)


def generate_e5m6_inputs(num_tokens: int, hidden: int, dtype: torch.dtype) -> Iterable[tuple[torch.Tensor, bool]]:
    """(input, whether it is a special one) for e5m6: random values, then values around the format's subnormals.

    The special inputs end each row in 65024, the format's largest number, so that the row's scale is one.
    """
    device = _default_device(None)
    yield torch.randn((num_tokens, hidden), dtype=dtype, device=device), False
    for value in (2.0**-20, 2.0**-14 * 63 / 64, 2.0**-14):
        x = torch.full((num_tokens, hidden), value, dtype=dtype, device=device)
        x[:, -1] = 65024
        yield x, True


def _is_full_test() -> bool:
    return os.environ.get("TK_FULL_TEST", "0").lower() in ("1", "true")


def _default_device(device: Any) -> torch.device:
    return torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
