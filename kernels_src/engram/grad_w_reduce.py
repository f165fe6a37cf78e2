"""The sum of the partial gradients of the gate's fused weight, and what it adds to the gradients of its two factors.

The partial rows are shared by the four warps of a block, a quarter to each, and a warp has several rows in flight: a
column has too few rows to fill the memory's pipes one after another. The order of adding is fixed.
"""

import tilelang.language as T

from ..declare import forms, grid, kernel

_WARP = 32
_PARTS = 4
_IN_FLIGHT = 8


@kernel(
    axes=grid(form=forms("aligned", "general")),
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_thread_storage_sync": True,  # barriers are set by hand
        "tl.disable_buffer_init_check": True,  # rows are loaded and added under the same test
    },
)
def grad_w_reduce(form):
    """Add s * weight_embed to grad_weight_hidden, s * weight_hidden to grad_weight_embed, s the sum over all parts."""
    size = 4 if form == "aligned" else 1
    num_parts, num_streams, hidden = T.dynamic("num_parts"), T.dynamic("num_streams"), T.dynamic("hidden")

    @T.prim_func
    def main(
        grad_w_partial: T.Tensor((num_parts, num_streams, hidden), "float32"),
        weight_hidden: T.Tensor((num_streams, hidden), "bfloat16"),
        weight_embed: T.Tensor((num_streams, hidden), "bfloat16"),
        grad_weight_hidden: T.Tensor((num_streams, hidden), "float32"),
        grad_weight_embed: T.Tensor((num_streams, hidden), "float32"),
    ):
        T.assume(hidden % 256 == 0)
        T.assume(num_streams <= 65535)
        with T.Kernel(T.ceildiv(hidden, _WARP * size), num_streams, threads=_WARP * _PARTS) as (tile, stream):
            sums_of_parts = T.alloc_shared((_PARTS, _WARP * size), "float32")
            rows = T.alloc_local((_IN_FLIGHT * size,), "float32")
            sums = T.alloc_local((size,), "float32")
            weights = T.alloc_local((2 * size,), "bfloat16")
            gradients = T.alloc_local((2 * size,), "float32")
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            lane = T.get_thread_binding() % _WARP
            part = T.get_thread_binding() // _WARP
            chunk = tile * _WARP + lane
            begin = T.ceildiv(num_parts, _PARTS) * part
            end = T.min(begin + T.ceildiv(num_parts, _PARTS), num_parts)
            for i in T.unroll(size):
                sums[i] = T.float32(0)
            if part == 0:
                for i in T.vectorized(size):
                    weights[i] = weight_hidden[stream, chunk * size + i]
                for i in T.vectorized(size):
                    weights[size + i] = weight_embed[stream, chunk * size + i]
                for i in T.vectorized(size):
                    gradients[i] = grad_weight_hidden[stream, chunk * size + i]
                for i in T.vectorized(size):
                    gradients[size + i] = grad_weight_embed[stream, chunk * size + i]
            while begin < end:
                for j in T.unroll(_IN_FLIGHT):
                    if begin + j < end:
                        for i in T.vectorized(size):
                            rows[j * size + i] = grad_w_partial[begin + j, stream, chunk * size + i]
                for j in T.unroll(_IN_FLIGHT):
                    if begin + j < end:
                        for i in T.unroll(size):
                            sums[i] += rows[j * size + i]
                begin += _IN_FLIGHT
            for i in T.vectorized(size):
                sums_of_parts[part, lane * size + i] = sums[i]
            T.sync_threads()
            if part == 0:
                for j in T.unroll(_PARTS - 1):
                    for i in T.unroll(size):
                        sums[i] += sums_of_parts[j + 1, lane * size + i]
                for i in T.unroll(size):
                    gradients[i] += sums[i] * T.cast(weights[size + i], "float32")
                    gradients[size + i] += sums[i] * T.cast(weights[i], "float32")
                for i in T.vectorized(size):
                    grad_weight_hidden[stream, chunk * size + i] = gradients[i]
                for i in T.vectorized(size):
                    grad_weight_embed[stream, chunk * size + i] = gradients[size + i]

    return main
