"""Weighted sums of each token's rows in a buffer sorted by expert: fused multiply-adds in the order of the slots.

A block takes a part of a token's row. Each lane of a warp looks up one slot: where its row is and what it is multiplied
by; the warp then walks over the slots that exist.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_OUT_DTYPES = {**_DTYPES, "e4m3": "float8_e4m3fn"}

_WARP = 32
_THREADS = 128
# Channels of a thread at a time, and how many times over by dtype; aligned blocks that a multiprocessor shall hold
_CHANNELS = 8
_STEPS = {"bf16": 2, "fp32": 1}
_MIN_BLOCKS = 10


@T.macro
def _find_rows(x_sf, topk_weights, token_topk_to_pos, token, num_topk, num_positions, position, factor):
    """position[0] = where the row of this lane's slot is, -1 for none; factor[0] = what it is multiplied by: its
    weight, times the scale of the row. The weight is loaded beside the position, not after it."""
    lane = T.get_thread_binding() % _WARP
    position[0] = -1
    factor[0] = T.float32(1)
    if lane < num_topk:
        position[0] = token_topk_to_pos[token, lane]
        if not T.isnullptr(topk_weights.data):
            factor[0] = topk_weights[token, lane]
    if position[0] >= num_positions:
        position[0] = -1
    if not T.isnullptr(x_sf.data):
        if position[0] >= 0:
            factor[0] = T.call_extern("float32", "__fmul_rn", factor[0], x_sf[position[0]])


@T.macro
def _add_row(x, row, tile, hidden, kind, vector, values, sums, factor, slot):
    """sums = fma(x[row], factor of the lane `slot`, sums) for a thread's channels; all are loaded before the first is
    used."""
    thread = T.get_thread_binding()
    for step in T.unroll(_STEPS[kind]):
        chunk = (tile * _STEPS[kind] + step) * _THREADS + thread
        if chunk * _CHANNELS < hidden:
            for i in T.unroll(_CHANNELS // vector):
                for j in T.vectorized(vector):
                    values[step * _CHANNELS + i * vector + j] = x[row, chunk * _CHANNELS + i * vector + j]
    row_factor = T.shfl_sync(factor[0], slot)
    for i in T.unroll(_STEPS[kind] * _CHANNELS):
        sums[i] = T.call_extern("float32", "__fmaf_rn", T.cast(values[i], "float32"), row_factor, sums[i])


@T.macro
def _write_sums(out, scale, token, tile, hidden, kind, fmt, vector, sums):
    """Convert a thread's sums and store them; those that become e4m3 times scale[0]."""
    thread = T.get_thread_binding()
    target = T.alloc_local((_CHANNELS,), _OUT_DTYPES[fmt])
    for step in T.unroll(_STEPS[kind]):
        chunk = (tile * _STEPS[kind] + step) * _THREADS + thread
        if chunk * _CHANNELS < hidden:
            if fmt == "e4m3":
                T.call_extern(
                    "handle",
                    f"tk::convert<tk::Fp32, tk::E4m3, {_CHANNELS}>",
                    T.address_of(sums[step * _CHANNELS]),
                    T.address_of(target[0]),
                    scale[0],
                )
            else:
                for i in T.unroll(_CHANNELS):
                    target[i] = T.cast(sums[step * _CHANNELS + i], _OUT_DTYPES[fmt])
            for i in T.unroll(_CHANNELS // vector):
                for j in T.vectorized(vector):
                    out[token, chunk * _CHANNELS + i * vector + j] = target[i * vector + j]


def _num_tiles(hidden, kind):
    """Parts of a row."""
    return T.ceildiv(hidden, _THREADS * _STEPS[kind] * _CHANNELS)


@T.macro
def _reduce(
    x, x_sf, topk_weights, token_topk_to_pos, sf, out, block, num_topk, hidden, num_positions, kind, fmt, vectors
):
    """One block. `vectors`: elements that one access of x and of out takes."""
    include("cast.cuh")
    if vectors[0] > 1:
        T.annotate_min_blocks_per_sm(_MIN_BLOCKS)
    values = T.alloc_local((_STEPS[kind] * _CHANNELS,), _DTYPES[kind])
    sums = T.alloc_local((_STEPS[kind] * _CHANNELS,), "float32")
    factor = T.alloc_local((1,), "float32")
    scale = T.alloc_local((1,), "float32")
    token = T.alloc_var("int32")
    tile = T.alloc_var("int32")
    position = T.alloc_local((1,), "int32")
    slots = T.alloc_var("uint32")
    slot = T.alloc_var("int32")
    row = T.alloc_var("int32")
    token = T.truncdiv(block, _num_tiles(hidden, kind))
    tile = T.truncmod(block, _num_tiles(hidden, kind))
    _find_rows(x_sf, topk_weights, token_topk_to_pos, token, num_topk, num_positions, position, factor)
    scale[0] = T.float32(1)
    if sf is not None:
        if not T.isnullptr(sf.data):
            scale[0] = sf[0]
    for i in T.unroll(_STEPS[kind] * _CHANNELS):
        sums[i] = T.float32(0)
    slots = T.cast(T.ballot(position[0] >= 0), "uint32")
    while slots != T.uint32(0):
        slot = T.call_extern("int32", "__ffs", slots) - 1
        slots = T.bitwise_and(slots, slots - T.uint32(1))
        row = T.shfl_sync(position[0], slot)
        _add_row(x, row, tile, hidden, kind, vectors[0], values, sums, factor, slot)
    _write_sums(out, scale, token, tile, hidden, kind, fmt, vectors[1], sums)


@kernel(
    axes=grid(kind=dtype_of("x", **_DTYPES), fmt=dtype_of("out", **_OUT_DTYPES), form=forms("aligned", "general")),
    where=lambda kind, fmt: fmt in (kind, "e4m3"),
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    },
)
def reduce_fused(kind, fmt, form):
    """Write to row t of out sf * the sum over s of topk_weights[t, s] * x_sf[p] * x[p], p = token_topk_to_pos[t, s].

    Negative positions are skipped. topk_weights, x_sf and sf may be null, which means one.
    """
    vectors = ({"bf16": 8, "fp32": 4}[kind], {"bf16": 8, "fp32": 4, "e4m3": 8}[fmt]) if form == "aligned" else (1, 1)
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")
    hidden, num_positions = T.dynamic("hidden"), T.dynamic("num_positions")

    if fmt == "e4m3":

        @T.prim_func
        def main(
            x: T.Tensor((num_positions, hidden), _DTYPES[kind]),
            x_sf: T.Tensor((num_positions,), "float32"),
            topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
            token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
            sf: T.Tensor((1,), "float32"),
            out: T.Tensor((num_tokens, hidden), _OUT_DTYPES[fmt]),
        ):
            T.assume(num_topk <= _WARP)
            T.assume(hidden % 256 == 0)
            with T.Kernel(num_tokens * _num_tiles(hidden, kind), threads=_THREADS) as block:
                _reduce(
                    x, x_sf, topk_weights, token_topk_to_pos, sf, out, block, num_topk, hidden, num_positions,
                    kind, fmt, vectors,
                )  # fmt: skip

        return main

    @T.prim_func
    def main(
        x: T.Tensor((num_positions, hidden), _DTYPES[kind]),
        x_sf: T.Tensor((num_positions,), "float32"),
        topk_weights: T.Tensor((num_tokens, num_topk), "float32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        out: T.Tensor((num_tokens, hidden), _OUT_DTYPES[fmt]),
    ):
        T.assume(num_topk <= _WARP)
        T.assume(hidden % 256 == 0)
        with T.Kernel(num_tokens * _num_tiles(hidden, kind), threads=_THREADS) as block:
            _reduce(
                x, x_sf, topk_weights, token_topk_to_pos, None, out, block, num_topk, hidden, num_positions,
                kind, fmt, vectors,
            )  # fmt: skip

    return main
