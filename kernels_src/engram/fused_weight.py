"""The product of the two weights of the gate's norms: exact in fp32."""

import tilelang.language as T

from ..declare import forms, grid, kernel

_THREADS = 128


@kernel(axes=grid(form=forms("aligned", "general")))
def fused_weight(form):
    """Write weight_hidden * weight_embed to out, in fp32."""
    size = 4 if form == "aligned" else 1
    num_streams, hidden = T.dynamic("num_streams"), T.dynamic("hidden")

    @T.prim_func
    def main(
        weight_hidden: T.Tensor((num_streams, hidden), "bfloat16"),
        weight_embed: T.Tensor((num_streams, hidden), "bfloat16"),
        out: T.Tensor((num_streams, hidden), "float32"),
    ):
        T.assume(hidden % 256 == 0)
        T.assume(num_streams <= 65535)
        with T.Kernel(T.ceildiv(hidden, _THREADS * size), num_streams, threads=_THREADS) as (tile, stream):
            chunk = tile * _THREADS + T.get_thread_binding()
            if chunk * size < hidden:
                for i in T.vectorized(size):
                    out[stream, chunk * size + i] = T.cast(weight_hidden[stream, chunk * size + i], "float32") * T.cast(
                        weight_embed[stream, chunk * size + i], "float32"
                    )

    return main
