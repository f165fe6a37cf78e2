"""Expert indices of all ranks to those of one tensor-parallel rank, -1 for what lies on other ranks."""

import tilelang.language as T

from ..common.counting import fits
from ..common.device import include
from ..declare import dtype_of, grid, kernel

_DTYPES = {"i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8"}
_THREADS = 256
# Entries of a thread, a block apart
_ENTRIES = 2


@kernel(
    axes=grid(dtype=dtype_of("indices", **_DTYPES)),
    pass_configs={"tl.disable_safe_memory_legalize": True},  # bounds are tested by hand
)
def mask_indices_by_tp(dtype):
    """Write the indices of tensor-parallel rank tp_rank to out, counted from its first expert, and -1 for all others.

    A GPU holds num_experts_per_gpu experts; num_tp_ranks neighbouring GPUs share their tokens.
    """
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def main(
        indices: T.Tensor((num_tokens, num_topk), _DTYPES[dtype]),
        out: T.Tensor((num_tokens, num_topk), _DTYPES[dtype]),
        num_experts_per_gpu: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        T.assume(fits(num_tokens, num_topk))
        T.assume(num_experts_per_gpu > 0)
        T.assume(num_tp_ranks > 0)
        with T.Kernel(T.ceildiv(num_tokens * num_topk, _THREADS * _ENTRIES), threads=_THREADS) as block:
            include("routing.cuh")
            values = T.alloc_local((_ENTRIES,), _DTYPES[dtype])
            # Row 0 and a column beyond it: the tensors are dense. All are loaded before the first is divided
            for i in T.unroll(_ENTRIES):
                flat = (block * _ENTRIES + i) * _THREADS + T.get_thread_binding()
                values[i] = T.if_then_else(flat < num_tokens * num_topk, indices[0, flat], T.cast(-1, _DTYPES[dtype]))
            for i in T.unroll(_ENTRIES):
                flat = (block * _ENTRIES + i) * _THREADS + T.get_thread_binding()
                if flat < num_tokens * num_topk:
                    local = T.call_extern(
                        "int64",
                        "tk::mask_index_by_tp",
                        T.cast(values[i], "int64"),
                        num_experts_per_gpu,
                        tp_rank,
                        num_tp_ranks,
                    )
                    out[0, flat] = T.cast(local, _DTYPES[dtype])

    return main
