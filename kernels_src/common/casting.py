"""What the cast kernels share: formats, loads and stores of a thread's channels, and the calls of the device
helpers.
"""

from __future__ import annotations

import tilelang.language as T

# Storage of x and of the output: label -> (dtype in the kernel, tag in cast.cuh, bits of a channel)
SOURCES = {
    "bf16": ("bfloat16", "tk::Bf16", 16),
    "fp32": ("float32", "tk::Fp32", 32),
    "e4m3": ("float8_e4m3fn", "tk::E4m3", 8),
    "e2m1": ("int8", "tk::E2m1", 4),
}
TARGETS = {
    "e4m3": ("float8_e4m3fn", "tk::E4m3", 8),
    "e2m1": ("int8", "tk::E2m1", 4),
    "e5m6": ("uint8", "tk::E5m6", 12),
}
MAX_VALUES = {"e4m3": 448.0, "e2m1": 6.0, "e5m6": 65024.0}

# A scale tensor is declared as uint8 whatever its storage; its dtype tells which of scale.cuh's kinds it is.
SCALE_DTYPES = ("float32", "int32", "float8_e4m3fn")


def scale_kind(tensor: str) -> str:
    """The expression for a derived parameter: 0 fp32, 1 packed UE8M0, 2 e4m3."""
    return f"select(is_dtype({tensor}, int32), 1, select(is_dtype({tensor}, float8_e4m3fn), 2, 0))"


def elements(channels: int, bits: int, dtype: str) -> int:
    """How many elements of `dtype` store that many channels."""
    return channels * bits // {"bfloat16": 16, "float32": 32}.get(dtype, 8)


@T.macro
def load_row(source, row, chunk, count, vector, target, first):
    """target[first + i] = source[row, chunk * count + i], in accesses of `vector` elements."""
    for i in T.unroll(count // vector):
        for j in T.vectorized(vector):
            target[first + i * vector + j] = source[row, chunk * count + i * vector + j]


@T.macro
def store_row(source, target, row, chunk, count, vector):
    """target[row, chunk * count + i] = source[i], in accesses of `vector` elements."""
    for i in T.unroll(count // vector):
        for j in T.vectorized(vector):
            target[row, chunk * count + i * vector + j] = source[i * vector + j]


# ---- calls of cast.cuh and scale.cuh; registers go as local buffers --------------------------------------------------


def largest_magnitude(kind, channels, source, first):
    return T.call_extern(
        "float32", f"tk::largest_magnitude<{SOURCES[kind][1]}, {channels}>", T.address_of(source[first])
    )


def group_maxima(count, channels, largest, num_per_channels):
    """Share `count` maxima among the lanes of a group, `channels` channels each."""
    return T.call_extern("handle", f"tk::group_maxima<{count}, {channels}>", T.address_of(largest[0]), num_per_channels)


def make_scales(count, largest, clamp_min, max_value, round_sf, kind, scales, inverses):
    starts = T.address_of(scales[0]), T.address_of(inverses[0])
    first = T.address_of(largest[0])
    return T.call_extern(
        "handle", f"tk::make_scales<{count}>", first, clamp_min, T.float32(max_value), round_sf, kind, *starts
    )


def store_scales(count, sf, strides, num_columns, row, row_step, num_rows, column, kind, scales):
    start, values = T.access_ptr(sf[0, 0], "w"), T.address_of(scales[0])
    name = f"tk::store_scales<{count}>"
    return T.call_extern("handle", name, start, *strides, num_columns, row, row_step, num_rows, column, kind, values)


def load_scale(sf, strides, row, column, kind):
    """The stored bits."""
    return T.call_extern("uint32", "tk::load_scale", T.access_ptr(sf[0, 0], "r"), *strides, row, column, kind)


def decode_scale(bits, kind):
    return T.call_extern("float32", "tk::decode_scale", bits, kind)


def divide(index, size):
    """index // size, by a shift where size is a power of two."""
    return T.call_extern("int32", "tk::divide", index, size)


def convert(name, source, source_first, target, factor, *more):
    """target = convert(source * factor) for the channels of a thread, in registers."""
    return T.call_extern("handle", name, T.address_of(source[source_first]), T.address_of(target[0]), factor, *more)


def nearest(kind, fmt, channels):
    """Rounding to nearest; e2m1 sources go through a table of magnitudes."""
    tags = f"{TARGETS[fmt][1]}, {channels}"
    return f"tk::convert_e2m1<{tags}>" if kind == "e2m1" else f"tk::convert<{SOURCES[kind][1]}, {tags}>"


def stochastic_rounding(kind, fmt, channels):
    return f"tk::convert_stochastic<{SOURCES[kind][1]}, {TARGETS[fmt][1]}, {channels}>"


def exact_log2(value):
    return T.call_extern("int32", "tk::exact_log2", value)


def reciprocal(value):
    return T.call_extern("float32", "tk::reciprocal", value)
