"""The sum of the partial gradients of the gate's fused weight, and what it adds to the gradients of its two factors.

The partial rows are shared by the warps of a block, and a warp has several rows in flight: a column has too few rows
to fill the memory's pipes one after another. The order of adding is fixed.
"""

import tilelang.language as T

from ..declare import forms, grid, kernel

_WARP = 32
_PARTS = 16
_IN_FLIGHT = 9  # rows of a warp: all of 132 parts at once


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
            row = T.alloc_var("int32")
            total = T.alloc_var("float32")
            of_hidden = T.alloc_var("float32")
            of_embed = T.alloc_var("float32")
            grad_hidden = T.alloc_var("float32")
            grad_embed = T.alloc_var("float32")
            thread = T.get_thread_binding()
            lane = thread % _WARP
            part = thread // _WARP
            chunk = tile * _WARP + lane
            col = tile * (_WARP * size) + thread
            # What the last step needs, in flight with the first rows
            if thread < _WARP * size:
                of_hidden = T.cast(weight_hidden[stream, col], "float32")
                of_embed = T.cast(weight_embed[stream, col], "float32")
                grad_hidden = grad_weight_hidden[stream, col]
                grad_embed = grad_weight_embed[stream, col]
            for i in T.unroll(size):
                sums[i] = T.float32(0)
            row = part
            while row < num_parts:
                for j in T.unroll(_IN_FLIGHT):
                    if row + j * _PARTS < num_parts:
                        for i in T.vectorized(size):
                            rows[j * size + i] = grad_w_partial[row + j * _PARTS, stream, chunk * size + i]
                for j in T.unroll(_IN_FLIGHT):
                    if row + j * _PARTS < num_parts:
                        for i in T.unroll(size):
                            sums[i] += rows[j * size + i]
                row += _IN_FLIGHT * _PARTS
            for i in T.vectorized(size):
                sums_of_parts[part, lane * size + i] = sums[i]
            T.sync_threads()
            if thread < _WARP * size:
                total = sums_of_parts[0, thread]
                for j in T.unroll(_PARTS - 1):
                    total += sums_of_parts[j + 1, thread]
                grad_weight_hidden[stream, col] = grad_hidden + total * of_embed
                grad_weight_embed[stream, col] = grad_embed + total * of_hidden

    return main
