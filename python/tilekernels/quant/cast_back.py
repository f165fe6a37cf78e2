"""The way back from quantised data: values times the scales of their blocks, to bf16 or fp32."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error
from ..layout import SfLayout, ceildiv
from ..testing.cases import BenchCase
from . import _checks as checks
from ._formats import FORMATS, storage_width
from ._reference import Block, QuantTensor, cast_ref
from ._reference import cast_back_ref as block_cast_back_ref

CAST_BACK = "quant.cast_back"
PER_TOKEN = "quant.per_token_cast_back"

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cast_back(
    x: QuantTensor, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None = None
) -> torch.Tensor:
    """data * sf: one product in fp32, rounded to bf16 if asked.

    x: (data, sf). data: (T, H) e4m3 or (T, H / 2) int8 holding e2m1, H % 64 == 0, or with x_special_fmt='e5m6' (T,
    3 H / 2) uint8, H % 8 == 0; unit column stride, any row stride. sf: fp32, packed int32 or float8_e4m3fn, row- or
    column-major, one for each block of x_block_size = (rows, columns) of any size; the blocks at the edges may be
    partial. Packed words hold four neighbouring columns of blocks, but four rows where a block has one column.
    fmt: 'bf16' or 'fp32'. Returns (T, H), dense.
    """
    return _cast_back_of(CAST_BACK, x, fmt, x_block_size, x_special_fmt)


def per_token_cast_back(
    x: QuantTensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None
) -> torch.Tensor:
    """`cast_back` of data with a scale for every num_per_channels neighbours in a row, as `per_token_cast` makes it."""
    return _cast_back_of(PER_TOKEN, x, fmt, (1, num_per_channels), x_special_fmt)


def cast_back_ref(
    x: QuantTensor, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None = None
) -> torch.Tensor:
    """`cast_back` in plain torch."""
    return block_cast_back_ref(x, fmt, x_block_size)


def per_token_cast_back_ref(
    x: QuantTensor, fmt: str, num_per_channels: int, x_special_fmt: str | None = None
) -> torch.Tensor:
    """`per_token_cast_back` in plain torch."""
    return block_cast_back_ref(x, fmt, (1, num_per_channels))


def _cast_back_of(
    operator: str, x: QuantTensor, fmt: str, x_block_size: tuple[int, int], x_special_fmt: str | None
) -> torch.Tensor:
    dtype = _DTYPES.get(fmt) if isinstance(fmt, str) else None
    if dtype is None:
        raise argument_error(operator, "fmt", "be 'bf16' or 'fp32'", repr(fmt))
    data, sf, num_tokens, hidden = checks.sizes_of_quantised(operator, x, x_block_size, x_special_fmt)
    block_rows, block_cols = x_block_size
    out: torch.Tensor = _kernel(data, sf, (dtype, 0, num_tokens, hidden), block_rows, block_cols)
    return out


def _cast_back_cpu(x: torch.Tensor, x_sf: torch.Tensor, out: torch.Tensor, block_rows: int, block_cols: int) -> None:
    fmt = next(name for name, dtype in _DTYPES.items() if dtype == out.dtype)
    out.copy_(block_cast_back_ref((x, x_sf), fmt, (block_rows, block_cols)))


_kernel = kernel(CAST_BACK, cpu=_cast_back_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's settings, a round size, then small batches."""
    packed = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    rounded = {"round_sf": True}
    cases = []
    for hidden in (4096, 7168):
        for fmt in ("bf16", "fp32"):
            cases.append(_case(CAST_BACK, 8001, hidden, "e4m3", fmt, (128, 128), rounded))
            cases.append(_case(CAST_BACK, 8001, hidden, "e4m3", fmt, (128, 1), rounded))
            cases.append(_case(PER_TOKEN, 8001, hidden, "e2m1", fmt, (1, 128), packed))
            cases.append(_case(PER_TOKEN, 8001, hidden, "e4m3", fmt, (1, 128), packed))
            cases.append(_case(PER_TOKEN, 8001, hidden, "e5m6", fmt, (1, hidden), packed))
        cases.append(_case(PER_TOKEN, 8001, hidden, "e4m3", "bf16", (1, hidden), rounded))
    cases.append(_case(CAST_BACK, 8192, 7168, "e4m3", "bf16", (128, 128), {}))
    cases.append(_case(CAST_BACK, 8192, 7168, "e4m3", "fp32", (128, 128), {}))
    cases.append(_case(PER_TOKEN, 8192, 7168, "e2m1", "bf16", (1, 16), {"use_e4m3_sf": True}))
    for num_tokens in (1, 32, 256):
        cases.append(_case(CAST_BACK, num_tokens, 4096, "e4m3", "bf16", (128, 128), {}))
    cases.append(_case(PER_TOKEN, 8, 4096, "e4m3", "bf16", (1, 128), packed))
    return cases


def _case(
    operator: str, num_tokens: int, hidden: int, input_kind: str, fmt: str, block: Block, flags: dict[str, bool]
) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        x = cast_ref(torch.randn((num_tokens, hidden), device=device), input_kind, block, **flags)  # type: ignore[arg-type]
        sizes = {"x_block_size": block} if operator == CAST_BACK else {"num_per_channels": block[1]}
        return {"x": x, "fmt": fmt, **sizes, "x_special_fmt": "e5m6" if input_kind == "e5m6" else None}

    layout = SfLayout.from_flags(operator, **flags)
    num_bytes = num_tokens * (storage_width(hidden, FORMATS[input_kind]) + hidden * _DTYPES[fmt].itemsize)
    num_bytes += layout.num_bytes(ceildiv(num_tokens, block[0]), ceildiv(hidden, block[1]))
    params = {"num_tokens": num_tokens, "hidden": hidden, "in": input_kind, "fmt": fmt, "x_block_size": block}
    return BenchCase(operator, {**params, "sf": layout.label}, make, num_bytes)
