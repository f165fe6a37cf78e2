"""Matrix products of bf16 or fp16 matrices, summed in fp32."""

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import requests_of, size_of
from ..errors import argument_error, argument_type_error
from ..testing.cases import BenchCase


def matmul(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """a times the transpose of b: summed in fp32 over the whole of K, rounded once.

    a: (M, K) and b: (N, K), both bf16 or both fp16, of any sizes, 0 and 1 included. Fast where rows are dense, 16-byte
    aligned and a multiple of 8 elements apart, also where M and N are odd; every other view runs too. out: (M, N) of
    the inputs' dtype or fp32, unit column stride, any row stride; made if None, of out_dtype, by default the inputs'
    dtype. It must not share memory with a or b. Returns out. The order of the sum is unspecified, but the same in each
    call on one kind of GPU with tensors of these shapes, strides and alignments.
    """
    if out is None:
        return _matmul(a, b, _OUT_OF[_check_out_dtype(a, out_dtype)])
    if out_dtype is not None and out_dtype != getattr(out, "dtype", out_dtype):
        raise argument_error("gemm.matmul", "out_dtype", f"be that of out, {out.dtype}", out_dtype)
    _matmul(a, b, out)
    return out


def matmul_ref(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`matmul` in plain torch: a product of fp32 matrices, which must not be computed in TF32."""
    product = a.float() @ b.float().t()
    return product.to(out_dtype or a.dtype) if out is None else out.copy_(product)


# (M, N) of each dtype, as the extension is asked for it.
_OUT_OF = requests_of(size_of(0, 0), size_of(1, 0))


def _check_out_dtype(a: torch.Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The output's dtype; any that there is where a is refused anyway, since the kernel's check says so better."""
    dtype = getattr(a, "dtype", None)
    if dtype is not torch.bfloat16 and dtype is not torch.float16:
        return torch.float32
    if out_dtype is None or out_dtype == dtype:
        return dtype
    if out_dtype != torch.float32:
        raise argument_type_error("gemm.matmul", "out_dtype", f"be torch.float32 or {dtype}", out_dtype)
    return out_dtype


def _matmul_cpu(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    matmul_ref(a, b, out)


_matmul = kernel("gemm.matmul", cpu=_matmul_cpu)

# Squared and halved, as calc_diff counts: 2e-3 of the norm, which the rounding of bf16 alone can make
_MAX_DIFF = 2e-6

# (M, N, K) of bf16, largest first; layers of open models
_BENCH_SHAPES = [
    (8192, 8192, 8192),
    (4096, 4096, 7168),
    (4096, 18432, 7168),
    (4096, 7168, 2048),
    (1024, 7168, 2048),
    (512, 7168, 7168),
    (256, 7168, 2048),
    (128, 7168, 2048),
    (128, 2112, 7168),
    (64, 7168, 7168),
    (64, 576, 7168),
    (16, 7168, 7168),
    (8, 4096, 4096),
    (1, 7168, 7168),
    (1, 2048, 7168),
]


def bench_cases() -> list[BenchCase]:
    """A small call, and products from the largest that is compute bound to a single row, which is memory bound."""
    return [_case(64, 200, 328), *(_case(*shape) for shape in _BENCH_SHAPES)]


def _case(m: int, n: int, k: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        a = torch.randn((m, k), device=device).bfloat16()
        return {"a": a, "b": torch.randn((n, k), device=device).bfloat16()}

    num_bytes = 2 * (m * k + n * k + m * n)
    return BenchCase("gemm.matmul", {"m": m, "n": n, "k": k}, make, num_bytes, max_diff=_MAX_DIFF)
