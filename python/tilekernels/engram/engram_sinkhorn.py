"""The optimiser of the embedding tables: a momentum step, then norms of a big matrix's rows and columns in turns."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..config import num_sms_for
from ..errors import argument_error, argument_type_error, shape_of
from ..moe._fma import fma
from ..testing.cases import BenchCase
from ._checks import HIDDEN_MULTIPLE, check_hidden

_MOMENTUM = "engram.engram_sinkhorn_momentum_update"
_STEP = "engram.engram_sinkhorn_step"
_REDUCE = "engram.engram_sinkhorn_step_reduce"
_FINALIZE = "engram.engram_sinkhorn_finalize"

_WORKERS_PER_SM = 3

# Outputs as the extension is asked for them
_UPDATE = (torch.float32, 0, size_of(1, 0))
_ROW_NORM = (torch.float32, 0, size_of(0, 0))
_LIKE_MATRIX = (torch.float32, 0, size_of(0, 0), size_of(0, 1))

# Sums over a row, or over rows, differ in order
_MAX_DIFF = 1e-11


def engram_sinkhorn_momentum_update(
    grad: torch.Tensor, momentum_buffer: torch.Tensor, beta1: float, nesterov: bool = True
) -> torch.Tensor:
    """One step of momentum: m = fma(momentum, beta1, (1 - beta1) * grad), written back to momentum_buffer.

    grad, momentum_buffer: bf16 or fp32 each, dense, of one number of elements, a multiple of 256. Returns fp32 with the
    shape of momentum_buffer: with nesterov fma(grad, 1 - beta1, beta1 * m), otherwise m, as it was before it was
    rounded to the buffer's dtype. beta1 and 1 - beta1 (subtracted in float64) are rounded to fp32; exact but for that.
    """
    for name, tensor in (("grad", grad), ("momentum_buffer", momentum_buffer)):
        if not isinstance(tensor, torch.Tensor):
            raise argument_type_error(_MOMENTUM, name, "be a tensor", type(tensor).__name__)
        if not tensor.is_contiguous():
            raise argument_error(_MOMENTUM, name, "be dense", f"strides {tensor.stride()}")
        if tensor.numel() % HIDDEN_MULTIPLE:
            raise argument_error(_MOMENTUM, name, f"have a multiple of {HIDDEN_MULTIPLE} elements", tensor.numel())
    out = _momentum_update(grad.view(-1), momentum_buffer.view(-1), _UPDATE, beta1, nesterov)
    return out.view(momentum_buffer.shape)


def engram_sinkhorn_momentum_update_ref(
    grad: torch.Tensor, momentum_buffer: torch.Tensor, beta1: float, nesterov: bool = True
) -> torch.Tensor:
    """`engram_sinkhorn_momentum_update` in plain torch, exact."""
    wide = grad.float().view(momentum_buffer.shape)
    decay, share = (torch.tensor(factor, dtype=torch.float32, device=grad.device) for factor in (beta1, 1 - beta1))
    moment = fma(momentum_buffer.float(), decay, share * wide)
    momentum_buffer.copy_(moment)
    return fma(wide, share, decay * moment) if nesterov else moment


def engram_sinkhorn_step(
    matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of the rows of x = row_scale * matrix * col_scale, which row_scale is divided by, and what columns remain.

    matrix: (num_rows, num_cols) fp32, num_cols % 256 == 0. row_scale: (num_rows,) fp32, divided in place by norm + eps.
    col_scale: (num_cols,) fp32. All dense. Returns (row_norm, col_sumsq_partial): fp32 (num_rows,), and (num_workers,
    num_cols), whose sum over the first dimension (`engram_sinkhorn_step_reduce`) is that of (x / (norm + eps))^2 over
    all rows. num_workers is three times `config.get_num_sms`; the last bits of the partial sums depend on it.
    """
    check_hidden(_STEP, "matrix", matrix, 2)
    _check_tensor(_STEP, "row_scale", row_scale)
    _, num_cols = shape_of(_STEP, "matrix", matrix, 2)
    partial = (torch.float32, 0, _num_workers(matrix.device), num_cols)
    return _sinkhorn_step(matrix, row_scale, col_scale, _ROW_NORM, partial, eps)


def engram_sinkhorn_step_ref(
    matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`engram_sinkhorn_step` in plain torch; each worker sums a run of rows."""
    row_norm = torch.empty_like(row_scale)
    partial = matrix.new_empty((_num_workers(matrix.device), matrix.shape[1]))
    _sinkhorn_step_cpu(matrix, row_scale, col_scale, row_norm, partial, eps)
    return row_norm, partial


def engram_sinkhorn_step_reduce(col_sumsq_partial: torch.Tensor, col_sumsq: torch.Tensor) -> None:
    """Writes the sum of col_sumsq_partial over its first dimension to col_sumsq.

    col_sumsq_partial: (num_workers, num_cols) fp32, col_sumsq: (num_cols,) fp32, dense, num_cols % 256 == 0. Summed in
    fp32, in an order that num_workers alone decides.
    """
    check_hidden(_REDUCE, "col_sumsq_partial", col_sumsq_partial, 2)
    _check_tensor(_REDUCE, "col_sumsq", col_sumsq)
    _sinkhorn_step_reduce(col_sumsq_partial, col_sumsq)


def engram_sinkhorn_step_reduce_ref(col_sumsq_partial: torch.Tensor, col_sumsq: torch.Tensor) -> None:
    """`engram_sinkhorn_step_reduce` in plain torch."""
    col_sumsq.copy_(col_sumsq_partial.sum(0))


def engram_sinkhorn_finalize(
    matrix: torch.Tensor,
    row_scale: torch.Tensor,
    col_scale: torch.Tensor,
    eps: float,
    alpha: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of x = row_scale * matrix * col_scale times alpha / (norm of the row + eps).

    Arguments as those of `engram_sinkhorn_step`, all left alone. Returns fp32 like matrix: out where it is given, which
    may be matrix itself.
    """
    check_hidden(_FINALIZE, "matrix", matrix, 2)
    made = _sinkhorn_finalize(matrix, row_scale, col_scale, _LIKE_MATRIX if out is None else out, eps, alpha)
    return made if out is None else out


def engram_sinkhorn_finalize_ref(
    matrix: torch.Tensor, row_scale: torch.Tensor, col_scale: torch.Tensor, eps: float, alpha: float
) -> torch.Tensor:
    """`engram_sinkhorn_finalize` in plain torch."""
    x = row_scale[:, None] * matrix * col_scale
    return x * (alpha / (x.square().sum(1, keepdim=True).sqrt() + eps))


def _check_tensor(operator: str, name: str, value: Any) -> None:
    """For outputs that the caller gives: the kernel's own check takes None for one."""
    if not isinstance(value, torch.Tensor):
        raise argument_type_error(operator, name, "be a tensor", type(value).__name__)


def _num_workers(device: torch.device) -> int:
    return _WORKERS_PER_SM * num_sms_for(device)


def _momentum_update_cpu(
    grad: torch.Tensor, momentum_buffer: torch.Tensor, out: torch.Tensor, beta1: float, nesterov: bool
) -> None:
    out.copy_(engram_sinkhorn_momentum_update_ref(grad, momentum_buffer, beta1, nesterov))


def _sinkhorn_step_cpu(
    matrix: torch.Tensor,
    row_scale: torch.Tensor,
    col_scale: torch.Tensor,
    row_norm: torch.Tensor,
    col_sumsq_partial: torch.Tensor,
    eps: float,
) -> None:
    x = row_scale[:, None] * matrix * col_scale
    row_norm.copy_(x.square().sum(1).sqrt())
    inverse = 1 / (row_norm + eps)
    row_scale *= inverse
    squares = (x * inverse[:, None]).square()
    share = -(-matrix.shape[0] // col_sumsq_partial.shape[0])
    for worker in range(col_sumsq_partial.shape[0]):
        col_sumsq_partial[worker] = squares[worker * share : (worker + 1) * share].sum(0)


def _sinkhorn_finalize_cpu(
    matrix: torch.Tensor,
    row_scale: torch.Tensor,
    col_scale: torch.Tensor,
    out: torch.Tensor,
    eps: float,
    alpha: float,
) -> None:
    out.copy_(engram_sinkhorn_finalize_ref(matrix, row_scale, col_scale, eps, alpha))


_momentum_update = kernel(_MOMENTUM, cpu=_momentum_update_cpu)
_sinkhorn_step = kernel(_STEP, cpu=_sinkhorn_step_cpu)
_sinkhorn_step_reduce = kernel(_REDUCE, cpu=engram_sinkhorn_step_reduce_ref)
_sinkhorn_finalize = kernel(_FINALIZE, cpu=_sinkhorn_finalize_cpu)


def bench_cases() -> list[BenchCase]:
    """A table of a few rows, and ones of a quarter of a gigabyte."""
    cases = [_momentum_case(64, torch.bfloat16, torch.float32), _momentum_case(2**18, torch.bfloat16, torch.float32)]
    cases += [
        _momentum_case(2**18, torch.bfloat16, torch.bfloat16),
        _momentum_case(2**18, torch.float32, torch.float32),
    ]
    for num_rows, num_cols in ((100, 256), (2**18, 256), (2**17, 512), (2**16, 1024), (2**15, 2048)):
        cases += [_rows_case(_STEP, num_rows, num_cols), _rows_case(_FINALIZE, num_rows, num_cols)]
    return [*cases, *(_reduce_case(*size) for size in ((396, 256), (396, 1024), (396, 4096)))]


def _momentum_case(num_rows: int, kind: torch.dtype, momentum: torch.dtype) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        grad, buffer = (torch.randn((num_rows, 256), device=device) for _ in range(2))
        return {"grad": grad.to(kind), "momentum_buffer": buffer.to(momentum), "beta1": 0.95, "nesterov": True}

    names = {"grad": str(kind).removeprefix("torch."), "momentum": str(momentum).removeprefix("torch.")}
    num_bytes = num_rows * 256 * (kind.itemsize + 2 * momentum.itemsize + 4)
    return BenchCase(_MOMENTUM, {"num_rows": num_rows, **names}, make, num_bytes)


def _rows_case(operator: str, num_rows: int, num_cols: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        inputs = {
            "matrix": torch.randn((num_rows, num_cols), device=device),
            "row_scale": torch.rand(num_rows, device=device) + 0.5,
            "col_scale": torch.rand(num_cols, device=device) + 0.5,
            "eps": 1e-8,
        }
        return inputs | ({"alpha": 0.2} if operator == _FINALIZE else {})

    # Of the partial sums none count: how many there are is the kernel's choice
    num_bytes = 8 * num_rows * num_cols + 4 * num_rows if operator == _FINALIZE else 4 * num_rows * (num_cols + 3)
    return BenchCase(operator, {"num_rows": num_rows, "num_cols": num_cols}, make, num_bytes, _MAX_DIFF)


def _reduce_case(num_workers: int, num_cols: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        partial = torch.rand((num_workers, num_cols), device=device)
        return {"col_sumsq_partial": partial, "col_sumsq": torch.empty(num_cols, device=device)}

    params = {"num_workers": num_workers, "num_cols": num_cols}
    return BenchCase(_REDUCE, params, make, 4 * num_workers * num_cols + 4 * num_cols, _MAX_DIFF)
