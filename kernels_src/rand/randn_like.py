"""Normal random numbers, counter based: number i depends on the state and on i alone, whatever the grid.

A call of Philox makes four numbers; a thread makes several vectors of 16 bytes, a block's width apart, whose keys of
the ten rounds are found once.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_THREADS = 256
_COUNT = {"fp32": 4, "bf16": 8, "fp16": 8}  # numbers of 16 bytes
_VECTORS = {"fp32": 4, "bf16": 2, "fp16": 2}  # of a thread


@T.macro
def _make_numbers(numbers, keys, offset, chunk, count):
    for i in T.unroll(count // 4):
        T.call_extern(
            "handle",
            "tk::normal_x4",
            T.address_of(keys[0]),
            offset,
            chunk * (count // 4) + i,
            T.address_of(numbers[i * 4]),
        )


@kernel(
    axes=grid(kind=dtype_of("out", **_DTYPES), form=forms("aligned", "general")),
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    },
)
def randn(kind, form):
    """Fill out with normal random numbers of mean 0 and variance 1, rounded to its dtype.

    Numbers 4 * i ... 4 * i + 3 come from Philox4x32-10 with the key state[0] and the counter (i, state[1]), 64 bits
    each, by the method of Box and Muller. state lies on the GPU, so that a replayed CUDA graph may find another one.
    """
    count, vectors = _COUNT[kind], _VECTORS[kind]
    tile = count * vectors * _THREADS
    size = T.dynamic("size", "int64")

    @T.prim_func
    def main(state: T.Tensor((2,), "int64"), out: T.Tensor((size,), _DTYPES[kind])):
        T.assume(size <= (1 << 41))
        with T.Kernel(T.ceildiv(size, tile), threads=_THREADS) as block:
            include("normal.cuh")
            keys = T.alloc_local((20,), "uint32")
            numbers = T.alloc_local((count,), "float32")
            offset = T.alloc_var("int64")
            start = T.alloc_var("int64")
            T.call_extern("handle", "tk::find_keys", state[0], T.address_of(keys[0]))
            offset = state[1]
            start = T.cast(block, "int64") * (vectors * _THREADS) + T.get_thread_binding()
            # Without a test between them the calls of a thread overlap
            if form == "aligned" and (T.cast(block, "int64") + 1) * tile <= size:
                for vector in T.unroll(vectors):
                    chunk = start + vector * _THREADS
                    _make_numbers(numbers, keys, offset, chunk, count)
                    for i in T.vectorized(count):
                        out[chunk * count + i] = T.cast(numbers[i], _DTYPES[kind])
            else:
                for vector in T.serial(vectors):
                    chunk = start + vector * _THREADS
                    if chunk * count < size:
                        _make_numbers(numbers, keys, offset, chunk, count)
                        for i in T.unroll(count):
                            if chunk * count + i < size:
                                out[chunk * count + i] = T.cast(numbers[i], _DTYPES[kind])

    return main
