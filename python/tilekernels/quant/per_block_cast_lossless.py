"""FP4 re-encoded without loss as FP8, with scales for larger blocks."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error
from ..layout import SfLayout, ceildiv
from ..testing.cases import BenchCase
from . import _checks as checks
from ._formats import E4M3, decode, encode
from ._reference import Block, QuantTensor, cast_ref
from ._sf import SF_DTYPES, block_amax, load_sf, sf_alignment, spread, store_sf

LOSSLESS = "quant.per_block_cast_lossless"

# e4m3 holds e2m1's largest number times 2^6 and its smallest times 2^-5
_BINADES_ABOVE, _BINADES_BELOW = 6, 5


def per_block_cast_lossless(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """The same values in e4m3: each is exactly what data * sf was in e2m1.

    x: (data, sf). data: (T, H / 2) int8 holding e2m1, H % 32 == 0, unit column stride, any row stride. sf: powers of
    two, of which only the exponent is read, one for each block of x_block_size = (rows, columns): fp32 or packed int32,
    row- or column-major. fmt: 'e4m3'. out_block_size: multiples of x_block_size; the columns of both are powers of two,
    and at least 2 where scales are packed. Blocks at the edges may be partial.
    Returns data (T, H), dense, and scales: the largest of the block's in x times 2^-6, or 0 where that exponent is
    below fp32's; the flags are those of `per_block_cast`, round_sf changes nothing.

    The scales of x within a block of the output must lie within a factor of 2^11. A GPU does not check that and rounds
    what does not fit; on a CPU it raises ArgumentError.
    """
    layout = SfLayout.from_flags(LOSSLESS, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if fmt != E4M3.name:
        raise argument_error(LOSSLESS, "fmt", "be 'e4m3'", repr(fmt))
    data, x_sf, num_tokens, hidden = checks.sizes_of_lossless(LOSSLESS, x, x_block_size, out_block_size, layout)
    rows, columns = ceildiv(num_tokens, out_block_size[0]), ceildiv(hidden, out_block_size[1])
    out = (E4M3.dtype, 0, num_tokens, hidden)
    out_sf = (SF_DTYPES[layout.dtype], sf_alignment(layout), rows, layout.columns(columns))
    made: QuantTensor = _kernel(data, x_sf, out, out_sf, *x_block_size, *out_block_size)
    return made


def per_block_cast_lossless_ref(
    x: QuantTensor,
    fmt: str,
    x_block_size: tuple[int, int],
    out_block_size: tuple[int, int],
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """`per_block_cast_lossless` in plain torch; unused packed bytes and padding rows are zero."""
    values = decode(x[0])
    exponent, out_exponent, above = _exponents(x, x_block_size, out_block_size)
    power = spread(exponent - above, *x_block_size, *values.shape)
    factor = ((power + 127).clamp(min=0) << 23).view(torch.float32)
    layout = SfLayout.from_flags(LOSSLESS, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    return encode(values * factor, E4M3.name), store_sf((out_exponent << 23).view(torch.float32), layout)


def _exponents(x: QuantTensor, x_block: Block, out_block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Biased exponents of the scales of x, of those of the output, and of the latter for each block of x."""
    rows, columns = x[0].shape[0], 2 * x[0].shape[1]
    x_sf = load_sf(x[1], ceildiv(rows, x_block[0]), ceildiv(columns, x_block[1]))
    exponent = (x_sf.contiguous().view(torch.int32) >> 23) & 0xFF
    ratio = (out_block[0] // x_block[0], out_block[1] // x_block[1])
    out_exponent = (block_amax(exponent.float(), *ratio).int() - _BINADES_ABOVE).clamp(min=0)
    return exponent, out_exponent, spread(out_exponent, *ratio, *exponent.shape)


def _per_block_cast_lossless_cpu(
    x: torch.Tensor,
    x_sf: torch.Tensor,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    x_block_rows: int,
    x_block_cols: int,
    out_block_rows: int,
    out_block_cols: int,
) -> None:
    packed = out_sf.dtype == torch.int32
    blocks = (x_block_rows, x_block_cols), (out_block_rows, out_block_cols)
    exponent, _, above = _exponents((x, x_sf), *blocks)
    if (exponent + _BINADES_BELOW < above).any():
        requirement = "have scales within a factor of 2^11 in each block of the output"
        raise argument_error(LOSSLESS, "x", requirement, "a wider range")
    data, sf = per_block_cast_lossless_ref((x, x_sf), E4M3.name, *blocks, False, packed, packed)
    out.copy_(data)
    out_sf.copy_(sf)


_kernel = kernel(LOSSLESS, cpu=_per_block_cast_lossless_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's settings, a round size and a small batch."""
    packed = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    cases = []
    for num_tokens, hidden in ((8001, 4096), (8001, 7168), (8192, 7168)):
        for block in ((1, 128), (32, 32), (128, 128)):
            cases.append(_case(num_tokens, hidden, block, packed))
    cases.append(_case(8001, 7168, (128, 128), {"round_sf": True}))
    for num_tokens in (1, 32, 256):
        cases.append(_case(num_tokens, 4096, (128, 128), packed))
    return cases


def _case(num_tokens: int, hidden: int, block: Block, flags: dict[str, bool]) -> BenchCase:
    x_block = (1, 32)

    def make(device: Any) -> dict[str, Any]:
        x = cast_ref(torch.randn((num_tokens, hidden), device=device).clamp(-4, 4), "e2m1", x_block, **flags)  # type: ignore[arg-type]
        return {"x": x, "fmt": "e4m3", "x_block_size": x_block, "out_block_size": block, **flags}

    layout = SfLayout.from_flags(LOSSLESS, **flags)
    num_bytes = num_tokens * hidden * 3 // 2
    for rows, columns in (x_block, block):
        num_bytes += layout.num_bytes(ceildiv(num_tokens, rows), ceildiv(hidden, columns))
    params = {"num_tokens": num_tokens, "hidden": hidden, "x_block_size": x_block, "out_block_size": block}
    return BenchCase(LOSSLESS, {**params, "sf": layout.label}, make, num_bytes)
