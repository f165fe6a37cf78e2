"""What RMSNorm forward and backward share: checks, batches as rows, and sums in the kernels' order in plain torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..errors import argument_error, argument_type_error
from ..layout import ceildiv

MOST_CHANNELS = 8192  # that a block keeps in registers

# How a block shares a row: steps of so many threads with so many neighbouring channels each
FORWARD_SHARE, BACKWARD_SHARE = (128, 16), (256, 8)
_WARP = 32


def check_rows(operator: str, x: object, multiple: int, ranks: tuple[int, ...] = (2, 3)) -> None:
    """Rank and channels of x."""
    if not isinstance(x, torch.Tensor):
        raise argument_type_error(operator, "x", "be a tensor", type(x).__name__)
    if x.dim() not in ranks:
        names = " or ".join(str(rank) for rank in ranks)
        raise argument_error(operator, "x", f"have {names} dimensions", x.dim())
    hidden = x.shape[-1]
    if hidden % multiple or not 0 < hidden <= MOST_CHANNELS:
        requirement = f"have a multiple of {multiple} channels, at most {MOST_CHANNELS}"
        raise argument_error(operator, "x", requirement, hidden)


def check_like(
    operator: str,
    argument: str,
    value: object,
    x: torch.Tensor,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
) -> None:
    """A tensor of x's shape and dtype, unless others are named."""
    if not isinstance(value, torch.Tensor):
        raise argument_type_error(operator, argument, "be a tensor", type(value).__name__)
    if shape is None:
        shape = x.shape
    if value.shape != shape:
        raise argument_error(operator, argument, f"have shape {tuple(shape)}", tuple(value.shape))
    if value.dtype is not (dtype or x.dtype):
        requirement = f"be {str(dtype or x.dtype).removeprefix('torch.')}"
        raise argument_error(operator, argument, requirement, str(value.dtype).removeprefix("torch."))


Rows = tuple[torch.Tensor | None, ...]


def as_rows(tensors: Sequence[torch.Tensor | None]) -> Iterator[Rows]:
    """The tensors as matrices of rows: themselves, all batches at once where strides allow it, or batch after batch."""
    given = [tensor for tensor in tensors if tensor is not None]
    if given[0].dim() == 2:
        yield tuple(tensors)
    elif all(_is_one_matrix(tensor) for tensor in given):
        yield tuple(None if tensor is None else tensor.flatten(0, 1) for tensor in tensors)
    else:
        for batch in range(given[0].shape[0]):
            yield tuple(None if tensor is None else tensor[batch] for tensor in tensors)


def _is_one_matrix(tensor: torch.Tensor) -> bool:
    """Whether the batches of a tensor lie behind each other like the rows of each."""
    return tensor.shape[0] == 1 or tensor.stride(0) == tensor.shape[1] * tensor.stride(1)


# ---- in plain torch --------------------------------------------------------------------------------------------------


def sum_of_rows(terms: torch.Tensor, share: tuple[int, int]) -> torch.Tensor:
    """fp32 (T, H) to (T, 1), in the order of a block: neighbouring channels, a thread's steps, lanes by butterfly,
    warps."""
    num_rows, hidden = terms.shape
    num_threads, num_channels = share
    step = num_threads * num_channels
    num_steps = ceildiv(hidden, step)
    shared = torch.nn.functional.pad(terms, (0, num_steps * step - hidden))
    shared = shared.view(num_rows, num_steps, num_threads, num_channels)
    chunks = torch.zeros(shared.shape[:3], dtype=torch.float32, device=terms.device)
    for channel in range(num_channels):
        chunks = chunks + shared[..., channel]
    total = chunks[:, 0]
    for at in range(1, num_steps):
        total = total + chunks[:, at]
    lane = torch.arange(_WARP, device=terms.device)
    total = total.view(num_rows, num_threads // _WARP, _WARP)
    for bit in range(5):
        total = total + total[:, :, lane ^ (1 << bit)]
    result = total[:, :1, 0]
    for warp in range(1, num_threads // _WARP):
        result = result + total[:, warp : warp + 1, 0]
    return result


def mean_of_rows(terms: torch.Tensor, share: tuple[int, int]) -> torch.Tensor:
    """`sum_of_rows` over the number of channels."""
    # A tensor: by a number, torch multiplies with its reciprocal on a GPU
    return sum_of_rows(terms, share) / torch.full((1, 1), terms.shape[1], dtype=torch.float32, device=terms.device)
