"""A matrix rounded, in place, to the numbers that a per-token cast to FP8 or FP4 can hold.

A thread holds neighbouring channels of two tokens between the read and the write, as in per_token_cast.
"""

import tilelang.language as T

from ..common.casting import (
    MAX_VALUES,
    SOURCES,
    TARGETS,
    elements,
    group_maxima,
    largest_magnitude,
    load_row,
    make_scales,
)
from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_THREADS = 128
_TILE = 512  # channels of a block of threads
_TOKENS = 2  # of a thread
_CHANNELS = {"bf16": 16, "fp32": 8}  # of a thread


@kernel(
    axes=grid(
        kind=dtype_of("x", bf16="bfloat16", fp32="float32"), fmt=("e4m3", "e2m1"), form=forms("aligned", "general")
    ),
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand, once for a thread's channels
        "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    },
)
def per_token_cast_and_cast_back(kind, fmt, form):
    """Round x to the format's numbers times a scale for every num_per_channels channels of a row, in place."""
    dtype, tag, bits = SOURCES[kind]
    channels = _CHANNELS[kind] if form == "aligned" else 8
    across = _TILE // channels
    down = _THREADS // across
    vector = elements(128 // bits, bits, dtype) if form == "aligned" else 1
    num_tokens, hidden, x_stride = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("x_stride", "int64")

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, hidden), (x_stride, 1), dtype),
        clamp_min: T.float32,
        round_sf: T.bool,
        use_e4m3_sf: T.bool,
        num_per_channels: T.int32,
    ):
        T.assume(128 % num_per_channels == 0)
        T.assume(num_per_channels >= 16)
        T.assume(hidden % 64 == 0)
        T.assume(hidden % num_per_channels == 0)
        T.assume(x_stride % vector == 0)
        with T.Kernel(T.ceildiv(hidden, _TILE) * T.ceildiv(num_tokens, _TOKENS * down), threads=_THREADS) as block:
            include("cast_and_back.cuh", "scale.cuh")
            values = T.alloc_local((_TOKENS * channels,), dtype)
            largest = T.alloc_local((_TOKENS,), "float32")
            scales = T.alloc_local((_TOKENS,), "float32")
            factors = T.alloc_local((_TOKENS,), "float32")
            tile_row = T.alloc_var("int32")
            tile_col = T.alloc_var("int32")
            tile_row = T.truncdiv(block, T.ceildiv(hidden, _TILE))
            tile_col = T.truncmod(block, T.ceildiv(hidden, _TILE))
            thread = T.get_thread_binding()
            first_row = tile_row * (_TOKENS * down) + thread // across
            chunk = tile_col * across + thread % across
            # Threads beyond the matrix read something of it and write nothing
            x_chunk = T.min(chunk, T.truncdiv(hidden, channels) - 1)
            for token in T.unroll(_TOKENS):
                row = T.min(first_row + token * down, num_tokens - 1)
                load_row(x, row, x_chunk, channels, vector, values, token * channels)
            for token in T.unroll(_TOKENS):
                largest[token] = largest_magnitude(kind, channels, values, token * channels)
            group_maxima(_TOKENS, channels, largest, num_per_channels)
            scale_kind = T.Select(use_e4m3_sf, 2, 0)
            make_scales(_TOKENS, largest, clamp_min, MAX_VALUES[fmt], round_sf, scale_kind, scales, factors)
            if chunk * channels < hidden:
                for token in T.unroll(_TOKENS):
                    row = first_row + token * down
                    if row < num_tokens:
                        T.call_extern(
                            "handle",
                            f"tk::cast_and_back<{tag}, {TARGETS[fmt][1]}, {channels}>",
                            T.address_of(values[token * channels]),
                            factors[token],
                            scales[token],
                        )
                        for i in T.unroll(channels // vector):
                            for j in T.vectorized(vector):
                                x[row, chunk * channels + i * vector + j] = values[token * channels + i * vector + j]

    return main
