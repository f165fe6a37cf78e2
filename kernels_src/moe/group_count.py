"""How often each group (or expert) occurs among the indices of all tokens.

Each block counts its share in shared memory while block 0 clears the result; after a barrier over the grid the blocks
add up.
"""

import tilelang.language as T

from ..common.counting import MAX_COUNTED, count_share_of_block, fits
from ..declare import kernel

_THREADS = 512


@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_thread_storage_sync": True,  # barriers are set by hand
    },
)
def group_count():
    """Write to out how many entries of group_idx name each group; entries outside of its range are skipped.

    num_sms blocks run at the same time; the result does not depend on their number.
    """
    num_tokens, num_topk, num_groups = T.dynamic("num_tokens"), T.dynamic("num_topk"), T.dynamic("num_groups")

    @T.prim_func
    def main(
        group_idx: T.Tensor((num_tokens, num_topk), "int64"), out: T.Tensor((num_groups,), "int32"), num_sms: T.int32
    ):
        T.assume(num_groups <= MAX_COUNTED)
        T.assume(fits(num_tokens, num_topk))
        T.assume(num_sms > 0)
        with T.Kernel(num_sms, threads=_THREADS) as block:
            histogram = T.alloc_shared((MAX_COUNTED,), "int32")
            thread = T.get_thread_binding()
            if block == 0:
                for i in T.serial(T.ceildiv(num_groups, _THREADS)):
                    if i * _THREADS + thread < num_groups:
                        out[i * _THREADS + thread] = 0
            count_share_of_block(group_idx, histogram, block, (num_sms, num_tokens * num_topk, num_groups), _THREADS)
            T.sync_grid()
            for i in T.serial(T.ceildiv(num_groups, _THREADS)):
                group = i * _THREADS + thread
                if group < num_groups:
                    if histogram[group] > 0:
                        T.atomic_add(out[group], histogram[group])

    return main
