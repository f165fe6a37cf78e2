"""The share of the tokens that each expert gets, scaled so that an even spread is one: the f of a load-balancing loss.

Each block counts its share and leaves its counts in the workspace; after a barrier over the grid a warp sums up an
expert.
"""

import tilelang.language as T

from ..common.counting import MAX_COUNTED, count_share_of_block, fits
from ..declare import kernel

_WARP = 32
_WARPS = 16
_THREADS = _WARP * _WARPS
_ROWS_IN_FLIGHT = 5  # of the workspace, for each lane: 160 blocks
_FEW_BLOCKS = 5


@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_thread_storage_sync": True,  # barriers are set by hand
    },
)
def aux_fi():
    """Write count * num_experts / (num_tokens * num_aux_topk) of each expert to out: integer products, then a division.

    Entries outside of the experts' range are skipped. workspace has a row for each of num_sms blocks, which run at the
    same time; the result does not depend on their number.
    """
    num_tokens, num_topk, num_experts = T.dynamic("num_tokens"), T.dynamic("num_topk"), T.dynamic("num_experts")
    num_sms = T.dynamic("num_sms")

    @T.prim_func
    def main(
        topk_idx: T.Tensor((num_tokens, num_topk), "int64"),
        workspace: T.Tensor((num_sms, num_experts), "int32"),
        out: T.Tensor((num_experts,), "float32"),
        num_aux_topk: T.int32,
    ):
        T.assume(num_experts <= MAX_COUNTED)
        T.assume(fits(num_tokens, num_topk))
        T.assume(num_aux_topk > 0)
        T.assume(num_sms > 0)
        with T.Kernel(num_sms, threads=_THREADS) as block:
            histogram = T.alloc_shared((MAX_COUNTED,), "int32")
            thread = T.get_thread_binding()
            lane = thread % _WARP
            count = T.alloc_var("int32")
            rows = T.alloc_local((_ROWS_IN_FLIGHT,), "int32")
            count_share_of_block(topk_idx, histogram, block, (num_sms, num_tokens * num_topk, num_experts), _THREADS)
            for i in T.serial(T.ceildiv(num_experts, _THREADS)):
                if i * _THREADS + thread < num_experts:
                    workspace[block, i * _THREADS + thread] = histogram[i * _THREADS + thread]
            T.sync_grid()
            # Few blocks: a thread sums up an expert, many: a warp does
            width = T.if_then_else(num_sms <= _FEW_BLOCKS, 1, _WARP)
            across = T.if_then_else(num_sms <= _FEW_BLOCKS, _THREADS, _WARPS)
            for i in T.serial(T.ceildiv(num_experts, across * num_sms)):
                # Neighbouring experts to neighbouring blocks
                expert = (
                    i * across + T.if_then_else(num_sms <= _FEW_BLOCKS, thread, thread // _WARP)
                ) * num_sms + block
                first = T.if_then_else(num_sms <= _FEW_BLOCKS, 0, lane)
                if expert < num_experts:
                    count = 0
                    for j in T.serial(T.ceildiv(num_sms, _ROWS_IN_FLIGHT * width)):
                        for k in T.unroll(_ROWS_IN_FLIGHT):
                            row = (j * _ROWS_IN_FLIGHT + k) * width + first
                            rows[k] = T.if_then_else(row < num_sms, workspace[row, expert], 0)
                        for k in T.unroll(_ROWS_IN_FLIGHT):
                            count += rows[k]
                    if num_sms > _FEW_BLOCKS:
                        for j in T.unroll(5):
                            count += T.shfl_xor(count, 1 << j)
                    if first == 0:
                        routed = T.cast(T.cast(count, "int64") * num_experts, "float32")
                        slots = T.cast(T.cast(num_tokens, "int64") * num_aux_topk, "float32")
                        quotient = T.call_extern("float32", "__fdiv_rn", routed, slots)
                        # No tokens: zero, not 0 / 0
                        out[expert] = T.if_then_else(num_tokens > 0, quotient, T.float32(0))

    return main
