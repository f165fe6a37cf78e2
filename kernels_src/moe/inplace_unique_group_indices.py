"""Removes repeated group indices within each token's row, in place.

A thread takes an entry and looks at those before it. Others may be blanking some of these meanwhile, but never the
first one of a value, which alone decides: what is read in between does not matter.
"""

import tilelang.language as T

from ..declare import kernel

_THREADS = 256


@kernel(pass_configs={"tl.disable_safe_memory_legalize": True})  # bounds are tested by hand
def inplace_unique_group_indices():
    """Set each entry of group_indices to -1 that repeats an earlier one of its row, if it lies in [0, num_groups)."""
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")

    @T.prim_func
    def main(group_indices: T.Tensor((num_tokens, num_topk), "int64"), num_groups: T.int32):
        T.assume(num_topk <= _THREADS)
        with T.Kernel(T.ceildiv(num_tokens, T.truncdiv(_THREADS, T.max(num_topk, 1))), threads=_THREADS) as block:
            thread = T.get_thread_binding()
            # Variables, so that the divisions stay 32 bits wide
            rows = T.alloc_var("int32")
            row = T.alloc_var("int32")
            token = T.alloc_var("int32")
            slot = T.alloc_var("int32")
            repeated = T.alloc_var("bool")
            rows = T.truncdiv(_THREADS, num_topk)
            row = T.truncdiv(thread, num_topk)
            token = block * rows + row
            slot = thread - row * num_topk
            if row < rows and token < num_tokens:
                group = group_indices[token, slot]
                repeated = False
                for earlier in T.serial(slot):
                    if group_indices[token, earlier] == group:
                        repeated = True
                if repeated and group >= 0 and group < num_groups:
                    group_indices[token, slot] = T.int64(-1)

    return main
