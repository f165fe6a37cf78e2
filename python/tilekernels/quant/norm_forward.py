"""RMSNorm of rows, of the sum with a residual where there is one, plain or cast to FP8 with a scale for 32 channels."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import empty_matrix, empty_sf, requests_of, size_of, with_made
from ..errors import argument_error, argument_type_error, check_int
from ..layout import SfLayout, align, ceildiv
from ..testing.cases import BenchCase
from ._norm import FORWARD_SHARE, as_rows, check_like, check_rows, mean_of_rows
from ._reference import QuantTensor, cast_ref
from ._sf import SF_DTYPES, amax_clamps, asked_sf, sf_alignment
from ._swiglu import check_number, refuse_fmt

_NAME = "quant.norm_forward"
_NAME_WITH_CAST = "quant.norm_forward_and_per_token_cast"

_GROUP = 32

# Outputs of a matrix as the extension is asked for them, by argument 0; those of a batch are made before its launches
_LIKE_X_OF, _RSTD = requests_of(size_of(0, 0), size_of(0, 1)), (torch.float32, 0, size_of(0, 0))

_MEGA_MOE_ROWS = 128  # that each block of mega_moe_sf is padded to
_MEGA_MOE_CHANNELS = 128  # four groups: one word of mega_moe_sf


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(out, rstd, z): RMSNorm of z = x + residual, or of z = x.

    x: (T, H) or (batch, T, H), bf16 or fp32, unit stride in H, any others; H % 16 == 0, at most 8192. weight: (H,) of
    x's dtype, dense, or None. residual: like x, or None. In fp32: rstd = rsqrt(sum(z^2) / H + eps), out =
    (z * rstd) * (weight * out_scale), without weight (z * rstd) * out_scale; z and out are rounded to x's dtype. out,
    residual_out: what out and z are written to, of x's shape and dtype, unit stride in H; without a residual
    residual_out is left alone and z is x itself. rstd: fp32 of x's shape without H, None unless with_rstd.
    No output may overlap an input or another one. Sums have a set order: see `norm_forward_ref`.
    """
    scalars = _check_inputs(_NAME, x, weight, eps, residual, out_scale, 16)
    if out is not None:
        check_like(_NAME, "out", out, x)
    residual_out = _check_residual_out(_NAME, x, residual, residual_out)
    if x.dim() == 2:
        outputs = (
            _LIKE_X_OF[x.dtype] if out is None else out,
            _asked_inputs(x, residual, residual_out),
            _RSTD if with_rstd else None,
        )
        out, z, rstd = with_made(outputs, _norm_forward(x, weight, residual, *outputs, *scalars))
        return out, rstd, x if residual is None else z
    for rows in as_rows((x, residual, out, residual_out)):
        _norm_forward.check(rows[0], weight, rows[1], rows[2], rows[3], None, *scalars)
    if out is None:
        out = _empty_like(x)
    z, rstd = _empty_inputs(x, residual, residual_out), _empty_rstd(x, with_rstd)
    for rows in as_rows((x, residual, out, None if residual is None else z, _as_column(rstd))):
        _norm_forward(rows[0], weight, rows[1], rows[2], rows[3], _as_vector(rows[4]), *scalars)
    return out, rstd, z


def norm_forward_and_per_token_cast(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
    out_bf16: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    mega_moe_sf: torch.Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
) -> tuple[QuantTensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """((data, sf), out_bf16, rstd, z): `norm_forward`, cast as `per_token_cast` casts its rounded result.

    fmt: 'e4m3', num_per_channels: 32; H % 32 == 0. The three flags are those of `per_token_cast`; sf of a batch is
    (batch, T, columns), each matrix stored as for itself. out: (data, sf) to write into, either may be None; data of
    x's shape, sf row-major, unit stride in the last dimension. out_bf16: the rounded result in bf16, None unless
    with_out_bf16 or given. Unused bytes of packed scales are zero. All else is as in `norm_forward`.

    mega_moe_sf, with mega_moe_block_m, for a 2-D x, round_sf and H % 128 == 0: receives the exponents once more. int32
    (T, H / 128), strides (1, R), R at least ceil(T / block_m) * align(block_m, 128). In column w the word of token t,
    whose byte j belongs to scale 4 w + j, has the place b * align(block_m, 128) + i // 128 * 128 + i % 32 * 4 +
    i % 128 // 32, where b = t // block_m and i = t % block_m. All other words stay as they are.
    """
    layout = SfLayout.from_flags(_NAME_WITH_CAST, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if fmt != "e4m3":
        raise refuse_fmt(_NAME_WITH_CAST, fmt, "'e4m3'")
    if num_per_channels != _GROUP:
        raise argument_error(_NAME_WITH_CAST, "num_per_channels", f"be {_GROUP}", num_per_channels)
    eps_and_scale = _check_inputs(_NAME_WITH_CAST, x, weight, eps, residual, out_scale, _GROUP)
    data, sf = _given_outputs(out, x, layout)
    if out_bf16 is not None:
        check_like(_NAME_WITH_CAST, "out_bf16", out_bf16, x, torch.bfloat16)
    residual_out = _check_residual_out(_NAME_WITH_CAST, x, residual, residual_out)
    block_m = _check_mega_moe(x, layout, mega_moe_sf, mega_moe_block_m)
    scalars = (*eps_and_scale, amax_clamps["e4m3", False], layout.rounded, block_m)
    if x.dim() == 2:
        outputs = (
            _LIKE_X_OF[torch.float8_e4m3fn] if data is None else data,
            asked_sf(layout, _GROUP) if sf is None else sf,
            _LIKE_X_OF[torch.bfloat16] if out_bf16 is None and with_out_bf16 else out_bf16,
            _asked_inputs(x, residual, residual_out),
            _RSTD if with_rstd else None,
        )
        made = _norm_forward_and_per_token_cast(x, weight, residual, *outputs, mega_moe_sf, *scalars)
        data, sf, out_bf16, z, rstd = with_made(outputs, made)
        return (data, sf), out_bf16, rstd, x if residual is None else z
    for rows in as_rows((x, residual, data, sf, out_bf16, residual_out)):
        _norm_forward_and_per_token_cast.check(
            rows[0], weight, rows[1], rows[2], rows[3], rows[4], rows[5], None, mega_moe_sf, *scalars
        )
    if data is None:
        data = _empty_like(x, torch.float8_e4m3fn)
    if sf is None:
        sf = _make_sf(x, layout)
    if out_bf16 is None and with_out_bf16:
        out_bf16 = _empty_like(x, torch.bfloat16)
    z, rstd = _empty_inputs(x, residual, residual_out), _empty_rstd(x, with_rstd)
    for rows in as_rows((x, residual, data, sf, out_bf16, None if residual is None else z, _as_column(rstd))):
        _norm_forward_and_per_token_cast(rows[0], weight, *rows[1:6], _as_vector(rows[6]), mega_moe_sf, *scalars)
    return (data, sf), out_bf16, rstd, z


def norm_forward_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    with_rstd: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`norm_forward` in plain torch, its sum in the order of a block of 128 threads with sixteen channels each."""
    z = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    rows = z.reshape(-1, z.shape[-1]).float()
    rstd = torch.rsqrt(mean_of_rows(rows * rows, FORWARD_SHARE) + eps)
    scaled = rows * rstd
    factor = out_scale if weight is None else weight.float() * out_scale
    out = (scaled * factor).to(x.dtype).view(z.shape)
    return out, rstd.view(x.shape[:-1]) if with_rstd else None, z


def norm_forward_and_per_token_cast_ref(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    fmt: str,
    num_per_channels: int,
    residual: torch.Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    mega_moe_sf: torch.Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
) -> tuple[QuantTensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """`norm_forward_and_per_token_cast` in plain torch."""
    y, rstd, z = norm_forward_ref(x, weight, eps, residual, out_scale, with_rstd)
    layout = SfLayout.from_flags(_NAME_WITH_CAST, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    data, sf = _empty_like(x, torch.float8_e4m3fn), _make_sf(x, layout)
    matrices = [(y, data, sf)] if y.dim() == 2 else zip(y, data, sf, strict=True)
    for y_rows, data_rows, sf_rows in matrices:
        _cast_rows(y_rows, data_rows, sf_rows, layout, amax_clamps["e4m3", False])
    if mega_moe_sf is not None:
        _store_mega_moe(mega_moe_sf, mega_moe_block_m, y, amax_clamps["e4m3", False])
    return (data, sf), y.bfloat16() if with_out_bf16 else None, rstd, z


def _cast_rows(y: torch.Tensor, data: torch.Tensor, sf: torch.Tensor, layout: SfLayout, clamp_min: float) -> None:
    result = cast_ref(
        y, "e4m3", (1, _GROUP), round_sf=layout.rounded, use_packed_ue8m0=layout.packed, clamp_min=clamp_min
    )
    data.copy_(result[0])
    sf.copy_(result[1])


def _store_mega_moe(target: torch.Tensor, block_m: int, y: torch.Tensor, clamp_min: float) -> None:
    words = cast_ref(y, "e4m3", (1, _GROUP), round_sf=True, use_packed_ue8m0=True, clamp_min=clamp_min)[1]
    token = torch.arange(y.shape[0], device=y.device)
    inside = token % block_m
    place = token // block_m * align(block_m, _MEGA_MOE_ROWS) + inside // 128 * 128 + inside % 32 * 4
    place = place + inside % 128 // 32
    storage = target.as_strided((target.stride(1) if target.shape[1] > 1 else int(place.max()) + 1,), (1,))
    for column in range(target.shape[1]):
        storage.as_strided(storage.shape, (1,), target.storage_offset() + column * target.stride(1))[place] = words[
            :, column
        ]


# ---- arguments and outputs -------------------------------------------------------------------------------------------


def _check_inputs(
    operator: str,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None,
    out_scale: float,
    multiple: int,
) -> tuple[float, float]:
    """Returns eps and out_scale as the kernels take them."""
    check_rows(operator, x, multiple)
    if residual is not None:
        check_like(operator, "residual", residual, x)
    if weight is not None:
        check_like(operator, "weight", weight, x, shape=x.shape[-1:])
    return check_number(operator, "eps", eps), check_number(operator, "out_scale", out_scale)


def _check_residual_out(
    operator: str, x: torch.Tensor, residual: torch.Tensor | None, residual_out: torch.Tensor | None
) -> torch.Tensor | None:
    """residual_out where it is used."""
    if residual is None or residual_out is None:
        return None
    check_like(operator, "residual_out", residual_out, x)
    return residual_out


def _check_mega_moe(x: torch.Tensor, layout: SfLayout, sf: torch.Tensor | None, block_m: int) -> int:
    """Tokens of a block; 1 without such scales."""
    name = _NAME_WITH_CAST
    check_int(name, "mega_moe_block_m", block_m, 0)
    if block_m == 0 if sf is not None else block_m != 0:
        raise argument_error(name, "mega_moe_block_m", "be given together with mega_moe_sf", block_m)
    if sf is None:
        return 1
    if not layout.rounded:
        raise argument_error(name, "round_sf", "be True where mega_moe_sf is given", False)
    if x.dim() != 2:
        raise argument_error(name, "x", "have 2 dimensions where mega_moe_sf is given", x.dim())
    num_tokens, hidden = x.shape
    if hidden % _MEGA_MOE_CHANNELS:
        requirement = f"have a multiple of {_MEGA_MOE_CHANNELS} channels where mega_moe_sf is given"
        raise argument_error(name, "x", requirement, hidden)
    if not isinstance(sf, torch.Tensor):
        raise argument_type_error(name, "mega_moe_sf", "be a tensor", type(sf).__name__)
    expected = (num_tokens, hidden // _MEGA_MOE_CHANNELS)
    if sf.shape != expected:
        raise argument_error(name, "mega_moe_sf", f"have shape {expected}", tuple(sf.shape))
    num_rows = ceildiv(num_tokens, block_m) * align(block_m, _MEGA_MOE_ROWS)
    if sf.shape[1] > 1 and sf.stride(1) < num_rows:
        raise argument_error(name, "mega_moe_sf", f"have columns of at least {num_rows} rows", sf.stride(1))
    return block_m


def _given_outputs(out: Any, x: torch.Tensor, layout: SfLayout) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Data and scales that a caller gave; either may be None."""
    name = _NAME_WITH_CAST
    if out is None:
        return None, None
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise argument_type_error(name, "out", "be a pair (data, sf)", type(out).__name__)
    data, sf = out
    if data is not None:
        check_like(name, "out", data, x, torch.float8_e4m3fn)
    if sf is not None:
        if layout.col_major:
            raise argument_error(name, "use_tma_aligned_col_major_sf", "be False where out_sf is given", True)
        columns = layout.columns(x.shape[-1] // _GROUP)
        check_like(name, "out_sf", sf, x, SF_DTYPES[layout.dtype], (*x.shape[:-1], columns))
    return data, sf


def _empty_like(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Dense."""
    if x.dim() == 2:
        return empty_matrix(x.shape[0], x.shape[1], dtype or x.dtype, x.device)
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


def _asked_inputs(x: torch.Tensor, residual: torch.Tensor | None, residual_out: torch.Tensor | None) -> Any:
    """What the sum of a matrix and its residual is written to, None without a residual."""
    return _LIKE_X_OF[x.dtype] if residual is not None and residual_out is None else residual_out


def _empty_inputs(x: torch.Tensor, residual: torch.Tensor | None, residual_out: torch.Tensor | None) -> torch.Tensor:
    """What is normalised: x itself, or what their sum is written to."""
    if residual is None:
        return x
    return _empty_like(x) if residual_out is None else residual_out


def _empty_rstd(x: torch.Tensor, with_rstd: bool) -> torch.Tensor | None:
    return torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device) if with_rstd else None


def _make_sf(x: torch.Tensor, layout: SfLayout) -> torch.Tensor:
    columns, dtype = layout.columns(x.shape[-1] // _GROUP), SF_DTYPES[layout.dtype]
    alignment = sf_alignment(layout)
    if x.dim() == 2:
        return empty_sf(x.shape[0], columns, dtype, alignment, x.device)
    num_batches, num_tokens = x.shape[:2]
    if not alignment:
        return torch.empty((num_batches, num_tokens, columns), dtype=dtype, device=x.device)
    pitch = align(num_tokens, alignment)
    padded = torch.empty_strided(
        (num_batches, pitch, columns), (columns * pitch, 1, pitch), dtype=dtype, device=x.device
    )
    return padded[:, :num_tokens]


def _as_column(rstd: torch.Tensor | None) -> torch.Tensor | None:
    """With a dimension in the place of channels, so that it is cut into rows like the others."""
    return None if rstd is None else rstd.unsqueeze(-1)


def _as_vector(rstd: torch.Tensor | None) -> torch.Tensor | None:
    return None if rstd is None else rstd.squeeze(-1)


# ---- on CPU ----------------------------------------------------------------------------------------------------------


def _norm_forward_cpu(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
    rstd: torch.Tensor | None,
    eps: float,
    out_scale: float,
) -> None:
    y, row_rstd, z = norm_forward_ref(x, weight, eps, residual, out_scale, True)
    out.copy_(y)
    _write_optional(residual_out, z)
    _write_optional(rstd, row_rstd)


def _norm_forward_and_per_token_cast_cpu(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    out_sf: torch.Tensor,
    out_bf16: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    rstd: torch.Tensor | None,
    mega_moe_sf: torch.Tensor | None,
    eps: float,
    out_scale: float,
    clamp_min: float,
    round_sf: bool,
    mega_moe_block_m: int,
) -> None:
    y, row_rstd, z = norm_forward_ref(x, weight, eps, residual, out_scale, True)
    _cast_rows(y, out, out_sf, SfLayout(rounded=round_sf, packed=out_sf.dtype == torch.int32), clamp_min)
    _write_optional(out_bf16, y)
    _write_optional(residual_out, z)
    _write_optional(rstd, row_rstd)
    if mega_moe_sf is not None:
        _store_mega_moe(mega_moe_sf, mega_moe_block_m, y, clamp_min)


def _write_optional(target: torch.Tensor | None, value: torch.Tensor | None) -> None:
    if target is not None and value is not None:
        target.copy_(value)


_norm_forward = kernel(_NAME, cpu=_norm_forward_cpu)
_norm_forward_and_per_token_cast = kernel(_NAME_WITH_CAST, cpu=_norm_forward_and_per_token_cast_cpu)


def bench_cases() -> list[BenchCase]:
    """Few tokens, then hidden sizes of large models, with and without what is optional."""
    packed = {"use_tma_aligned_col_major_sf": True, "round_sf": True, "use_packed_ue8m0": True}
    cases = []
    for num_tokens, hidden in ((1, 7168), (8, 2048), (256, 7168), (8192, 2048), (8192, 4096), (8192, 7168)):
        for residual in (False, True):
            cases.append(_case(num_tokens, hidden, torch.bfloat16, residual))
            cases.append(_case(num_tokens, hidden, torch.bfloat16, residual, packed))
    cases.append(_case(8192, 7168, torch.float32, False))
    cases.append(_case(8192, 7168, torch.float32, True, {}))
    return cases


def _case(
    num_tokens: int, hidden: int, dtype: torch.dtype, residual: bool, flags: dict[str, bool] | None = None
) -> BenchCase:
    """flags: None for the plain norm."""
    name = _NAME if flags is None else _NAME_WITH_CAST

    def make(device: Any) -> dict[str, Any]:
        x = torch.randn((num_tokens, hidden), device=device).to(dtype)
        weight = torch.randn(hidden, device=device).to(dtype)
        kwargs: dict[str, Any] = {"x": x, "weight": weight, "eps": 1e-6, "with_rstd": True}
        if residual:
            kwargs["residual"] = torch.randn((num_tokens, hidden), device=device).to(dtype)
        return kwargs if flags is None else {**kwargs, "fmt": "e4m3", "num_per_channels": _GROUP, **flags}

    size = dtype.itemsize
    num_bytes = num_tokens * (hidden * size * (3 if residual else 1) + 4) + hidden * size
    params = {"num_tokens": num_tokens, "hidden": hidden, "in": str(dtype).removeprefix("torch.")}
    params |= {"residual": True} if residual else {}
    if flags is None:
        return BenchCase(name, params, make, num_bytes + num_tokens * hidden * size)
    layout = SfLayout.from_flags(name, **flags)
    num_bytes += num_tokens * hidden + layout.num_bytes(num_tokens, hidden // _GROUP)
    return BenchCase(name, {**params, "sf": layout.label}, make, num_bytes)
