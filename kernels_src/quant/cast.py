"""Conversions of a tensor, element by element, between bf16, fp32, fp16 and e4m3, without scales.

A thread takes 16 bytes of the wider side at a time, some of them a block apart before it stores the first. The last
ones, where the tensor ends within them, go one by one.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

# label -> (dtype in the kernel, tag in cast_values.cuh, bytes)
_TYPES = {
    "bf16": ("bfloat16", "tk::Bf16", 2),
    "fp32": ("float32", "tk::Fp32", 4),
    "fp16": ("float16", "tk::Fp16", 2),
    "e4m3": ("float8_e4m3fn", "tk::E4m3", 1),
}
_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16", "e4m3": "float8_e4m3fn"}
_STOCHASTIC = (("fp32", "bf16"), ("fp32", "e4m3"), ("bf16", "e4m3"))

_THREADS = 128
_STEPS = 4


@T.macro
def _load(x, values, chunk, step, count, vector, num_elements):
    """values = the elements of a chunk, as far as there are any."""
    if (chunk + 1) * count <= num_elements:
        for i in T.unroll(count // vector):
            for j in T.vectorized(vector):
                values[step * count + i * vector + j] = x[chunk * count + i * vector + j]
    else:
        for i in T.unroll(count):
            if chunk * count + i < num_elements:
                values[step * count + i] = x[chunk * count + i]


@T.macro
def _store(target, out, chunk, count, vector, num_elements):
    if (chunk + 1) * count <= num_elements:
        for i in T.unroll(count // vector):
            for j in T.vectorized(vector):
                out[chunk * count + i * vector + j] = target[i * vector + j]
    else:
        for i in T.unroll(count):
            if chunk * count + i < num_elements:
                out[chunk * count + i] = target[i]


@kernel(
    axes=grid(
        kind=dtype_of("x", **_DTYPES),
        fmt=dtype_of("out", **_DTYPES),
        stochastic=(False, True),
        form=forms("aligned", "general"),
    ),
    where=lambda kind, fmt, stochastic: kind != fmt and (not stochastic or (kind, fmt) in _STOCHASTIC),
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    },
)
def cast(kind, fmt, stochastic, form):
    """Convert each element of x to out, to nearest or with random bits hashed from four neighbours."""
    count = 4 if "fp32" in (kind, fmt) else 8
    vector = count if form == "aligned" else 1
    num_elements = T.dynamic("num_elements", "int64")
    tags = f"<{_TYPES[kind][1]}, {_TYPES[fmt][1]}, {count}>"

    @T.prim_func
    def main(
        x: T.Tensor((num_elements,), _TYPES[kind][0]),
        out: T.Tensor((num_elements,), _TYPES[fmt][0]),
    ):
        with T.Kernel(T.ceildiv(num_elements, _STEPS * _THREADS * count), threads=_THREADS) as block:
            include("cast_values.cuh")
            values = T.alloc_local((_STEPS * count,), _TYPES[kind][0])
            target = T.alloc_local((count,), _TYPES[fmt][0])
            chunk = T.alloc_var("int64")
            chunk = T.cast(block, "int64") * (_STEPS * _THREADS) + T.get_thread_binding()
            for step in T.unroll(_STEPS):
                _load(x, values, chunk + step * _THREADS, step, count, vector, num_elements)
            for step in T.unroll(_STEPS):
                if (chunk + step * _THREADS) * count < num_elements:
                    ends = T.address_of(values[step * count]), T.address_of(target[0])
                    if stochastic:
                        group = T.cast((chunk + step * _THREADS) * (count // 4), "uint32")
                        T.call_extern("handle", "tk::cast_values_stochastic" + tags, *ends, group)
                    else:
                        T.call_extern("handle", "tk::cast_values" + tags, *ends)
                    _store(target, out, chunk + step * _THREADS, count, vector, num_elements)

    return main
