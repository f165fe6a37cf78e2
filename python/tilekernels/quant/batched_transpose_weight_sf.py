"""Block scales of weights in the packed layouts that a grouped FP8 product wants for both orders of its operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error, argument_type_error
from ..layout import PACKED_PER_WORD, ceildiv
from ..testing.cases import BenchCase
from ._formats import name_of_dtype

WEIGHT_SF = "quant.batched_transpose_weight_sf"

_BLOCK_SIZES = (32, 128)
_TILE = 128  # what rows and columns of a weight come in
_NOT_AN_EXPONENT = -0x7F800001  # sign and mantissa: 0x807FFFFF as int32

Pair = tuple[torch.Tensor, torch.Tensor]


def batched_transpose_weight_sf(
    sf: Sequence[torch.Tensor], block_size: int, transpose_sf1s: Sequence[bool], outs: Sequence[Pair | None]
) -> list[Pair]:
    """(sf0, sf1) of each weight: exponents packed along the rows of its scales, and along the columns.

    sf: for each weight of n x k channels, both multiples of 128, dense fp32 powers of two (n / B, k / B) or (G, n / B,
    k / B), all on one device. block_size: B, 32 or 128.
    sf0: int32 (G, n, ceil(k / B / 4)), strides (.., 1, n): byte j of word (i, w) is the exponent of sf[i / B, 4 w + j].
    sf1: int32 (G, k, ceil(n / B / 4)), strides (.., 1, k): byte j of word (i, w) is the exponent of sf[4 w + j, i / B];
    where transpose_sf1s says so, its transposed view. Without G there is none in the results. Bytes beyond the last
    block are zero.
    outs: None for each weight, or the pair of an earlier call to write into. New pairs of a call share one buffer.
    On a GPU sign and mantissa of a scale are passed over; on a CPU a scale that is no power of two raises.
    """
    _check_sequences(sf, block_size, transpose_sf1s, outs)
    for i, scales in enumerate(sf):
        _check_scales(i, scales, sf[0], block_size)
    shapes = [_buffer_shapes(scales, block_size) for scales in sf]
    for i, (shape, transposed, pair) in enumerate(zip(shapes, transpose_sf1s, outs, strict=True)):
        if pair is not None:
            _check_pair(i, pair, sf[i], shape, transposed)
    buffers = _buffers(sf, shapes, transpose_sf1s, outs)
    for scales, (sf0, sf1) in zip(sf, buffers, strict=True):
        _kernel(scales if scales.dim() == 3 else scales[None], sf0, sf1, block_size)
    return [
        pair if pair is not None else _as_pair(scales, *buffer, transposed)
        for scales, buffer, transposed, pair in zip(sf, buffers, transpose_sf1s, outs, strict=True)
    ]


def batched_transpose_weight_sf_ref(
    sf: Sequence[torch.Tensor],
    block_size: int,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[Pair | None] | None = None,
) -> list[Pair]:
    """`batched_transpose_weight_sf` in plain torch; the results are always new."""
    pairs = []
    for scales, transposed in zip(sf, transpose_sf1s, strict=True):
        grouped = scales if scales.dim() == 3 else scales[None]
        lines = _packed(grouped, block_size), _packed(grouped.transpose(1, 2), block_size)
        pairs.append(_as_pair(scales, *lines, transposed))
    return pairs


def _packed(scales: torch.Tensor, block_size: int) -> torch.Tensor:
    """(G, R, C) to words (G, ceil(C / 4), R * block_size)."""
    exponents = (scales.contiguous().view(torch.int32) >> 23) & 0xFF
    exponents = torch.nn.functional.pad(exponents, (0, -scales.shape[2] % PACKED_PER_WORD))
    shifts = torch.arange(0, 32, 8, dtype=torch.int32, device=scales.device)
    groups, rows, _ = scales.shape
    words = (exponents.view(groups, rows, -1, PACKED_PER_WORD) << shifts).sum(-1, dtype=torch.int32)
    return words.transpose(1, 2).repeat_interleave(block_size, dim=2)


def _buffer_shapes(scales: torch.Tensor, block_size: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Of sf0 and sf1 as they lie in memory."""
    num_groups = scales.shape[0] if scales.dim() == 3 else 1
    rows, columns = scales.shape[-2:]
    return (
        (num_groups, ceildiv(columns, PACKED_PER_WORD), rows * block_size),
        (num_groups, ceildiv(rows, PACKED_PER_WORD), columns * block_size),
    )


def _buffers(
    sf: Sequence[torch.Tensor], shapes: list[Any], transpose_sf1s: Sequence[bool], outs: Sequence[Pair | None]
) -> list[Pair]:
    """Dense (G, words, length) tensors to write: those given, and parts of one new buffer."""
    total = sum(_product(part) for pair, shape in zip(outs, shapes, strict=True) if pair is None for part in shape)
    rest = torch.empty(total, dtype=torch.int32, device=sf[0].device) if total else None
    buffers = []
    for pair, shape, transposed in zip(outs, shapes, transpose_sf1s, strict=True):
        if pair is not None:
            sf0, sf1 = pair[0].transpose(-1, -2), pair[1] if transposed else pair[1].transpose(-1, -2)
        else:
            assert rest is not None
            sf0, sf1, rest = rest.split((*map(_product, shape), rest.numel() - sum(map(_product, shape))))
        buffers.append((sf0.view(shape[0]), sf1.view(shape[1])))
    return buffers


def _product(shape: tuple[int, int, int]) -> int:
    return shape[0] * shape[1] * shape[2]


def _as_pair(scales: torch.Tensor, sf0: torch.Tensor, sf1: torch.Tensor, transposed: bool) -> Pair:
    """Buffers (G, words, length) as the results show them."""
    if scales.dim() == 2:
        sf0, sf1 = sf0[0], sf1[0]
    return sf0.transpose(-1, -2), sf1 if transposed else sf1.transpose(-1, -2)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_sequences(sf: Any, block_size: Any, transpose_sf1s: Any, outs: Any) -> None:
    for argument, value in (("sf", sf), ("transpose_sf1s", transpose_sf1s), ("outs", outs)):
        if not isinstance(value, (tuple, list)):
            raise argument_type_error(WEIGHT_SF, argument, "be a list", type(value).__name__)
        if len(value) != len(sf):
            raise argument_error(WEIGHT_SF, argument, f"have an entry for each of {len(sf)} weights", len(value))
    if isinstance(block_size, bool) or not isinstance(block_size, int):
        raise argument_type_error(WEIGHT_SF, "block_size", "be an int", type(block_size).__name__)
    if block_size not in _BLOCK_SIZES:
        raise argument_error(WEIGHT_SF, "block_size", "be 32 or 128", block_size)
    for value in transpose_sf1s:
        if not isinstance(value, bool):
            raise argument_type_error(WEIGHT_SF, "transpose_sf1s", "hold bools", type(value).__name__)


def _check_scales(i: int, scales: Any, first: torch.Tensor, block_size: int) -> None:
    argument = f"sf[{i}]"
    if not isinstance(scales, torch.Tensor):
        raise argument_type_error(WEIGHT_SF, argument, "be a tensor", type(scales).__name__)
    if scales.dtype is not torch.float32:
        raise argument_error(WEIGHT_SF, argument, "be float32", name_of_dtype(scales.dtype))
    if scales.dim() not in (2, 3):
        raise argument_error(WEIGHT_SF, argument, "have 2 or 3 dimensions", scales.dim())
    multiple = _TILE // block_size
    shape = tuple(scales.shape)
    if shape[-1] % multiple or shape[-2] % multiple or 0 in shape:
        requirement = f"have rows and columns for multiples of {_TILE} channels, and at least one of each"
        raise argument_error(WEIGHT_SF, argument, requirement, shape)
    if not scales.is_contiguous():
        raise argument_error(WEIGHT_SF, argument, "be dense", f"strides {scales.stride()} for shape {shape}")
    if scales.device != first.device:
        raise argument_error(WEIGHT_SF, argument, f"be on {first.device}", scales.device)


def _check_pair(i: int, pair: Any, scales: torch.Tensor, shapes: Any, transposed: bool) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise argument_type_error(WEIGHT_SF, f"outs[{i}]", "be None or a pair (sf0, sf1)", type(pair).__name__)
    for j, (out, (groups, words, length)) in enumerate(zip(pair, shapes, strict=True)):
        argument = f"outs[{i}][{j}]"
        if not isinstance(out, torch.Tensor):
            raise argument_type_error(WEIGHT_SF, argument, "be a tensor", type(out).__name__)
        if out.dtype is not torch.int32:
            raise argument_error(WEIGHT_SF, argument, "be int32", name_of_dtype(out.dtype))
        if out.device != scales.device:
            raise argument_error(WEIGHT_SF, argument, f"be on {scales.device}", out.device)
        shape: tuple[int, ...] = (groups, words, length)
        strides: tuple[int, ...] = (words * length, length, 1)
        if j == 0 or not transposed:
            shape, strides = (groups, length, words), (words * length, 1, length)
        if scales.dim() == 2:
            shape, strides = shape[1:], strides[1:]
        if tuple(out.shape) != shape or out.stride() != strides:
            actual = f"shape {tuple(out.shape)} and strides {out.stride()}"
            raise argument_error(WEIGHT_SF, argument, f"have shape {shape} and strides {strides}", actual)


def _batched_transpose_weight_sf_cpu(sf: torch.Tensor, sf0: torch.Tensor, sf1: torch.Tensor, block_size: int) -> None:
    if (sf.view(torch.int32) & _NOT_AN_EXPONENT).any():
        raise argument_error(WEIGHT_SF, "sf", "hold positive powers of two", "other numbers")
    sf0.copy_(_packed(sf, block_size))
    sf1.copy_(_packed(sf.transpose(1, 2), block_size))


_kernel = kernel(WEIGHT_SF, cpu=_batched_transpose_weight_sf_cpu)


def bench_cases() -> list[BenchCase]:
    """Expert weights of a large model, dense weights, and a small one."""
    return [
        _case([(32, 4096, 7168), (32, 7168, 2048)], 128),
        _case([(1, 7168, 18432), (1, 18432, 7168)], 32),
        _case([(2, 512, 384), (1, 128, 256)], 128),
    ]


def _case(weights: list[tuple[int, int, int]], block_size: int) -> BenchCase:
    shapes = [(groups, n // block_size, k // block_size) for groups, n, k in weights]

    def make(device: Any) -> dict[str, Any]:
        sf = [torch.exp2(torch.randint(-20, 20, shape, device=device).float()) for shape in shapes]
        flags = [i % 2 == 1 for i in range(len(sf))]
        return {"sf": sf, "block_size": block_size, "transpose_sf1s": flags, "outs": [None] * len(sf)}

    words = sum(
        groups * (rows * columns + rows * block_size * ceildiv(columns, 4) + columns * block_size * ceildiv(rows, 4))
        for groups, rows, columns in shapes
    )
    return BenchCase(WEIGHT_SF, {"weights": weights, "block_size": block_size}, make, 4 * words)
