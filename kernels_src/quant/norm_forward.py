"""RMSNorm of rows, of the sum with a residual where there is one; also cast to FP8 with a scale for 32 channels.

A block takes a row and keeps it in registers between the sum of squares and the rest; norm.cuh has all of it. The sum
has a set order, the same in every form, which the reference takes too. wide: few tokens, a thread for every sixteen
channels. small: rows of one step, whose weights are read with them. large: all others. general: any stride and address.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_TAGS = {"bf16": "tk::Bf16", "fp32": "tk::Fp32"}
_FORMS = forms("wide", "small", "large", "general")

_STEP = 2048  # channels of 128 threads
_MOST = 8192
_WIDE_TOKENS = 256  # up to which more threads a row pay
# Form -> threads, steps, and blocks on an SM that registers are limited for, by kind
_PLAN = {
    "wide": (512, 1, {"bf16": 1, "fp32": 1}),
    "small": (128, 1, {"bf16": 10, "fp32": 8}),
    "large": (128, 4, {"bf16": 7, "fp32": 4}),
    "general": (128, 4, {"bf16": 4, "fp32": 4}),
}


def _are_aligned(*tensors: str) -> str:
    text = f"aligned({tensors[-1]}, 16)"
    for tensor in reversed(tensors[:-1]):
        text = f"and_(aligned({tensor}, 16), {text})"
    return text


def _helper(name: str, kind: str, form: str) -> str:
    threads, steps, _ = _PLAN[form]
    return f"tk::{name}<{_TAGS[kind]}, {threads}, {steps}, {str(form != 'general').lower()}>"


@T.macro
def _touch(tensor, first, access):
    """Says what a helper does that is handed tensor.data, which may be null."""
    if not T.isnullptr(tensor.data):
        T.call_extern("handle", "tk::touch", T.access_ptr(tensor[first], access))


@T.macro
def _forward(name, form, kind, x, weight, residual, out, residual_out, rstd, row, sizes, strides, scalars, cast):
    """One row. sizes: (hidden,); strides of x, residual, out and residual_out; scalars: (eps, out_scale)."""
    include("norm.cuh")
    T.annotate_min_blocks_per_sm(_PLAN[form][2][kind])
    shared = T.alloc_shared((_PLAN[form][0] + 4,), "float32")
    _touch(weight, 0, "r")
    _touch(residual, (0, 0), "r")
    _touch(residual_out, (0, 0), "w")
    _touch(rstd, 0, "w")
    T.call_extern(
        "handle",
        name,
        T.access_ptr(x[0, 0], "r"),
        strides[0],
        weight.data,
        residual.data,
        strides[1],
        T.access_ptr(out[0, 0], "w"),
        strides[2],
        residual_out.data,
        strides[3],
        rstd.data,
        row,
        sizes[0],
        *scalars,
        T.address_of(shared[0]),
        *cast,
    )


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), form=_FORMS),
    derived={"is_aligned": _are_aligned("x", "weight", "residual", "out", "residual_out")},
    pass_configs=_PASS_CONFIGS,
)
def norm_forward(kind, form):
    """Write (z * rstd) * (weight * out_scale) to out, where z = x + residual and rstd = 1 / sqrt(mean(z^2) + eps).

    z goes to residual_out and rstd to rstd, where they are given. weight, residual, residual_out and rstd may be null.
    """
    vector = {"bf16": 8, "fp32": 4}[kind] if form != "general" else 1
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")
    strides = [T.dynamic(f"{name}_stride", "int64") for name in ("x", "residual", "out", "residual_out")]

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (strides[0], 1), _DTYPES[kind]),
        weight: T.Tensor((hidden,), _DTYPES[kind]),
        residual: T.StridedTensor((num_tokens, hidden), (strides[1], 1), _DTYPES[kind]),
        out: T.StridedTensor((num_tokens, hidden), (strides[2], 1), _DTYPES[kind]),
        residual_out: T.StridedTensor((num_tokens, hidden), (strides[3], 1), _DTYPES[kind]),
        rstd: T.Tensor((num_tokens,), "float32"),
        eps: T.float32,
        out_scale: T.float32,
        is_aligned: T.bool,
    ):
        T.assume(hidden % 16 == 0)
        T.assume(hidden <= _MOST)
        T.assume(strides[0] % vector == 0)
        T.assume(strides[1] % vector == 0)
        T.assume(strides[2] % vector == 0)
        T.assume(strides[3] % vector == 0)
        if form != "general":
            T.assume(is_aligned)
        if form == "wide":
            T.assume(num_tokens <= _WIDE_TOKENS)
            T.assume(hidden > _STEP)
        if form == "small":
            T.assume(hidden <= _STEP)
        with T.Kernel(num_tokens, threads=_PLAN[form][0]) as row:
            _forward(
                _helper("norm_forward", kind, form), form, kind, x, weight, residual, out, residual_out, rstd, row,
                (hidden,), strides, (eps, out_scale), (),
            )  # fmt: skip

    return main


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), form=_FORMS),
    accepts={"out_sf": ("float32", "int32")},
    derived={
        "is_packed": "is_dtype(out_sf, int32)",
        "is_aligned": _are_aligned("x", "weight", "residual", "out", "residual_out", "out_bf16"),
    },
    pass_configs=_PASS_CONFIGS,
)
def norm_forward_and_per_token_cast(kind, form):
    """Cast what norm_forward computes, rounded to x's dtype, to out, e4m3 with a scale for every 32 channels in out_sf.

    out_bf16 receives the rounded result too, mega_moe_sf the exponents of the scales, in blocks of mega_moe_block_m
    tokens; both may be null.
    """
    vector, fp8_vector, bf16_vector = ({"bf16": 8, "fp32": 4}[kind], 16, 8) if form != "general" else (1, 1, 1)
    num_tokens, hidden, num_sf_columns = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_sf_columns")
    num_words = T.dynamic("num_words")
    strides = [T.dynamic(f"{name}_stride", "int64") for name in ("x", "residual", "out", "residual_out")]
    sf_strides = [T.dynamic(f"out_sf_{name}_stride", "int64") for name in ("row", "column")]
    other_strides = [T.dynamic(f"{name}_stride", "int64") for name in ("out_bf16", "mega_moe_sf")]

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (strides[0], 1), _DTYPES[kind]),
        weight: T.Tensor((hidden,), _DTYPES[kind]),
        residual: T.StridedTensor((num_tokens, hidden), (strides[1], 1), _DTYPES[kind]),
        out: T.StridedTensor((num_tokens, hidden), (strides[2], 1), "float8_e4m3fn"),
        out_sf: T.StridedTensor((num_tokens, num_sf_columns), (sf_strides[0], sf_strides[1]), "uint32"),
        out_bf16: T.StridedTensor((num_tokens, hidden), (other_strides[0], 1), "bfloat16"),
        residual_out: T.StridedTensor((num_tokens, hidden), (strides[3], 1), _DTYPES[kind]),
        rstd: T.Tensor((num_tokens,), "float32"),
        mega_moe_sf: T.StridedTensor((num_tokens, num_words), (1, other_strides[1]), "int32"),
        eps: T.float32,
        out_scale: T.float32,
        clamp_min: T.float32,
        round_sf: T.bool,
        mega_moe_block_m: T.int32,
        is_packed: T.bool,
        is_aligned: T.bool,
    ):
        T.assume(hidden % 32 == 0)
        T.assume(hidden <= _MOST)
        T.assume(num_sf_columns == T.ceildiv(hidden, 32 * T.if_then_else(is_packed, 4, 1)))
        T.assume(mega_moe_block_m > 0)
        T.assume(strides[0] % vector == 0)
        T.assume(strides[1] % vector == 0)
        T.assume(strides[2] % fp8_vector == 0)
        T.assume(strides[3] % vector == 0)
        T.assume(other_strides[0] % bf16_vector == 0)
        if form != "general":
            T.assume(is_aligned)
        if form == "wide":
            T.assume(num_tokens <= _WIDE_TOKENS)
            T.assume(hidden > _STEP)
        if form == "small":
            T.assume(hidden <= _STEP)
        with T.Kernel(num_tokens, threads=_PLAN[form][0]) as row:
            _touch(out_bf16, (0, 0), "w")
            _touch(mega_moe_sf, (0, 0), "w")
            _forward(
                _helper("norm_forward_and_cast", kind, form), form, kind, x, weight, residual, out, residual_out, rstd,
                row, (hidden,), strides, (eps, out_scale),
                (
                    T.access_ptr(out_sf[0, 0], "w"), sf_strides[0], sf_strides[1], num_sf_columns,
                    out_bf16.data, other_strides[0], mega_moe_sf.data, other_strides[1], mega_moe_block_m,
                    clamp_min, round_sf, is_packed,
                ),
            )  # fmt: skip

    return main
