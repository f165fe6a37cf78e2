"""Norm weights taken into the matrix of pre-norm, and the gradients of both."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..testing.cases import BenchCase

_FORWARD, _BACKWARD = "mhc.mhc_fn_normw_merge_fwd", "mhc.mhc_fn_normw_merge_bwd"


def mhc_fn_normw_merge_fwd(fn: torch.Tensor, normw: torch.Tensor, out_fn: torch.Tensor) -> None:
    """Writes each row of fn times normw to out_fn.

    fn: (num_rows, num_columns) fp32, dense, any size. normw: (num_columns,) fp32. out_fn: like fn.
    """
    _mhc_fn_normw_merge_fwd(fn, normw, out_fn)


def mhc_fn_normw_merge_bwd(
    fn: torch.Tensor,
    normw: torch.Tensor,
    out_fn_grad: torch.Tensor,
    fn_grad: torch.Tensor,
    normw_grad: torch.Tensor,
) -> None:
    """Adds to fn_grad out_fn_grad * normw, and to normw_grad the sum over the rows, in order, of out_fn_grad * fn.

    fn, out_fn_grad, fn_grad: (num_rows, num_columns) fp32, dense. normw, normw_grad: (num_columns,) fp32. The two
    gradients are changed in place: initialise them.
    """
    _mhc_fn_normw_merge_bwd(fn, normw, out_fn_grad, fn_grad, normw_grad)


def mhc_fn_normw_merge_fwd_ref(fn: torch.Tensor, normw: torch.Tensor, out_fn: torch.Tensor) -> None:
    """`mhc_fn_normw_merge_fwd` in plain torch, exact."""
    torch.mul(fn, normw, out=out_fn)


def mhc_fn_normw_merge_bwd_ref(
    fn: torch.Tensor,
    normw: torch.Tensor,
    out_fn_grad: torch.Tensor,
    fn_grad: torch.Tensor,
    normw_grad: torch.Tensor,
) -> None:
    """`mhc_fn_normw_merge_bwd` in plain torch; where the kernel fuses a product into a sum, this rounds twice."""
    fn_grad += out_fn_grad * normw
    normw_grad += (out_fn_grad * fn).sum(dim=0)


_mhc_fn_normw_merge_fwd = kernel(_FORWARD, cpu=mhc_fn_normw_merge_fwd_ref)
_mhc_fn_normw_merge_bwd = kernel(_BACKWARD, cpu=mhc_fn_normw_merge_bwd_ref)


def bench_cases() -> list[BenchCase]:
    """The matrices of a small and of a large model."""
    return [
        _case(name, num_rows, num_columns)
        for name in (_FORWARD, _BACKWARD)
        for num_rows, num_columns in ((24, 4 * 1280), (24, 4 * 7168))
    ]


def _case(name: str, num_rows: int, num_columns: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        fn, other = torch.randn((2, num_rows, num_columns), device=device)
        normw = torch.rand(num_columns, device=device)
        if name == _FORWARD:
            return {"fn": fn, "normw": normw, "out_fn": other}
        grads = {"fn_grad": torch.randn_like(fn), "normw_grad": torch.randn_like(normw)}
        return {"fn": fn, "normw": normw, "out_fn_grad": other, **grads}

    params = {"num_rows": num_rows, "num_columns": num_columns}
    size = num_rows * num_columns
    num_bytes = 8 * size + 4 * num_columns if name == _FORWARD else 16 * size + 12 * num_columns
    # Products are fused into sums, and rows are added in order
    return BenchCase(name, params, make, num_bytes, max_diff=0.0 if name == _FORWARD else 1e-12)
