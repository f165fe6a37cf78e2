"""The product of pre-norm, residual x fn^T, and each token's sum of squares, in parts over the channels; gradients."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..errors import shape_of
from ..testing.cases import BenchCase
from ._checks import mixes_of
from ._splits import choose_num_parts, choose_num_splits, split_bounds

_NAME = "mhc.mhc_pre_norm_fn_partials"
_BACKWARD = "mhc.mhc_pre_norm_fn_partials_bwd"
_TF32_ROUNDING, _TF32_MASK = 0x1000, ~0x1FFF


def mhc_pre_norm_fn_partials(
    residual: torch.Tensor, fn: torch.Tensor, out_mul_splitted: torch.Tensor, sqrsum_splitted: torch.Tensor
) -> None:
    """Writes residual x fn^T and the sums of residual^2, in n_splits parts over the channels mhc_mult * hidden.

    residual: (num_tokens, mhc_mult, hidden) bf16. fn: (num_mixes, mhc_mult * hidden) fp32, num_mixes 8, 24 or 80.
    out_mul_splitted: (n_splits, num_tokens, num_mixes) fp32. sqrsum_splitted: (n_splits, num_tokens) fp32. All dense.

    fn is rounded to tf32, halves away from zero; products are exact and sums fp32. Parts are equal up to 128 channels;
    `choose_num_splits` of this module says how many are fast. `mhc_reduce_partials_and_rmsnorm_fwd` and
    `mhc_pre_big_fuse_fwd` take what is written.
    """
    _mhc_pre_norm_fn_partials(residual, fn, out_mul_splitted, sqrsum_splitted, mixes_of(_NAME, "fn", fn))


def make_partials(residual: torch.Tensor, fn: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `mhc_pre_norm_fn_partials` writes, in as many parts as are fast."""
    num_mixes, num_splits = mixes_of(_NAME, "fn", fn), choose_num_splits(residual.shape[0], fn.shape[1])
    out_mul, sqrsum = _mhc_pre_norm_fn_partials(
        residual,
        fn,
        (torch.float32, 0, num_splits, size_of(0, 0), num_mixes),
        (torch.float32, 0, num_splits, size_of(0, 0)),
        num_mixes,
    )
    return out_mul, sqrsum


def mhc_pre_norm_fn_partials_bwd(
    out_mul_grad: torch.Tensor,
    sqrsum_grad: torch.Tensor,
    residual: torch.Tensor,
    fn: torch.Tensor,
    residual_grad: torch.Tensor,
    fn_grad: torch.Tensor,
) -> None:
    """residual_grad += out_mul_grad x fn + 2 * residual * sqrsum_grad, and fn_grad = out_mul_grad^T x residual.

    out_mul_grad: (num_tokens, num_mixes) and sqrsum_grad: (num_tokens,), fp32, as `mhc_reduce_partials_and_rmsnorm_bwd`
    writes them for one group. residual, residual_grad: (num_tokens, mhc_mult, hidden) bf16. fn, fn_grad: (num_mixes,
    mhc_mult * hidden) fp32, num_mixes 8, 24 or 80. All dense.

    residual_grad is changed in place: what is added is formed in fp32, and the sum rounded to bf16. fn and out_mul_grad
    are rounded to tf32, halves away from zero; the order of fn_grad's sums does not change from call to call.
    """
    columns = mixes_of(_BACKWARD, "fn", fn)
    num_tokens, num_channels = shape_of(_BACKWARD, "residual", residual, 3)[0], fn.shape[1]
    workspace = (torch.float32, 0, choose_num_parts(num_tokens, num_channels), columns, num_channels)
    _mhc_pre_norm_fn_partials_bwd(out_mul_grad, sqrsum_grad, residual, fn, residual_grad, fn_grad, workspace, columns)


def mhc_pre_norm_fn_partials_ref(
    residual: torch.Tensor, fn: torch.Tensor, out_mul_splitted: torch.Tensor, sqrsum_splitted: torch.Tensor
) -> None:
    """`mhc_pre_norm_fn_partials` in plain torch."""
    rounded = round_to_tf32(fn)
    flat = residual.flatten(1)
    for split, (first, end) in enumerate(split_bounds(flat.shape[1], out_mul_splitted.shape[0], fn.shape[0])):
        x = flat[:, first:end].float()
        out_mul_splitted[split] = x @ rounded[:, first:end].t()
        sqrsum_splitted[split] = x.square().sum(dim=1)


def mhc_pre_norm_fn_partials_bwd_ref(
    out_mul_grad: torch.Tensor,
    sqrsum_grad: torch.Tensor,
    residual: torch.Tensor,
    fn: torch.Tensor,
    residual_grad: torch.Tensor,
    fn_grad: torch.Tensor,
) -> None:
    """`mhc_pre_norm_fn_partials_bwd` in plain torch."""
    grad, x = round_to_tf32(out_mul_grad), residual.flatten(1).float()
    added = grad @ round_to_tf32(fn) + x * (2 * sqrsum_grad)[:, None]
    residual_grad.copy_(residual_grad.float() + added.view(residual.shape))
    fn_grad.copy_(grad.t() @ x)


def round_to_tf32(x: torch.Tensor) -> torch.Tensor:
    """x in fp32 with tf32's 10 bits of mantissa, halves away from zero."""
    return ((x.contiguous().view(torch.int32) + _TF32_ROUNDING) & _TF32_MASK).view(torch.float32)


def _mhc_pre_norm_fn_partials_cpu(
    residual: torch.Tensor,
    fn: torch.Tensor,
    out_mul_splitted: torch.Tensor,
    sqrsum_splitted: torch.Tensor,
    num_columns: int,
) -> None:
    mhc_pre_norm_fn_partials_ref(residual, fn, out_mul_splitted, sqrsum_splitted)


def _mhc_pre_norm_fn_partials_bwd_cpu(
    out_mul_grad: torch.Tensor,
    sqrsum_grad: torch.Tensor,
    residual: torch.Tensor,
    fn: torch.Tensor,
    residual_grad: torch.Tensor,
    fn_grad: torch.Tensor,
    workspace: torch.Tensor,
    num_columns: int,
) -> None:
    mhc_pre_norm_fn_partials_bwd_ref(out_mul_grad, sqrsum_grad, residual, fn, residual_grad, fn_grad)


_mhc_pre_norm_fn_partials_bwd = kernel(_BACKWARD, cpu=_mhc_pre_norm_fn_partials_bwd_cpu)
_mhc_pre_norm_fn_partials = kernel(_NAME, cpu=_mhc_pre_norm_fn_partials_cpu)


def bench_cases() -> list[BenchCase]:
    """A few tokens, then the sizes of models."""
    sizes = [(16, 4, 1280), *((num_tokens, 4, hidden) for hidden in (2560, 7168) for num_tokens in (4096, 8192))]
    return [case(*size) for case in (_case, _backward_case) for size in sizes]


def _case(num_tokens: int, mhc_mult: int, hidden: int) -> BenchCase:
    num_columns = mhc_mult * (mhc_mult + 2)
    n_splits = choose_num_splits(num_tokens, mhc_mult * hidden)

    def make(device: Any) -> dict[str, Any]:
        return {
            "residual": torch.randn((num_tokens, mhc_mult, hidden), device=device).bfloat16(),
            "fn": torch.randn((num_columns, mhc_mult * hidden), device=device) * 1e-4,
            "out_mul_splitted": torch.empty((n_splits, num_tokens, num_columns), device=device),
            "sqrsum_splitted": torch.empty((n_splits, num_tokens), device=device),
        }

    params = {"num_tokens": num_tokens, "mhc_mult": mhc_mult, "hidden": hidden, "n_splits": n_splits}
    num_bytes = mhc_mult * hidden * (2 * num_tokens + 4 * num_columns) + 4 * n_splits * num_tokens * (num_columns + 1)
    return BenchCase(_NAME, params, make, num_bytes, max_diff=1e-9)  # fp32 sums in another order


def _backward_case(num_tokens: int, mhc_mult: int, hidden: int) -> BenchCase:
    num_columns = mhc_mult * (mhc_mult + 2)

    def make(device: Any) -> dict[str, Any]:
        return {
            "out_mul_grad": torch.randn((num_tokens, num_columns), device=device),
            "sqrsum_grad": torch.randn(num_tokens, device=device),
            "residual": torch.randn((num_tokens, mhc_mult, hidden), device=device).bfloat16(),
            "fn": torch.randn((num_columns, mhc_mult * hidden), device=device) * 1e-1,
            "residual_grad": torch.randn((num_tokens, mhc_mult, hidden), device=device).bfloat16(),
            "fn_grad": torch.empty((num_columns, mhc_mult * hidden), device=device),
        }

    params = {"num_tokens": num_tokens, "mhc_mult": mhc_mult, "hidden": hidden}
    num_bytes = mhc_mult * hidden * (6 * num_tokens + 8 * num_columns) + 4 * num_tokens * (num_columns + 1)
    # A sum in another order may round to bf16 the other way
    return BenchCase(_BACKWARD, params, make, num_bytes, max_diff=1e-7)
