"""What the kernels share that count expert or group indices: int64 tensors of (tokens, slots) read as one flat list.

Indices outside of [0, limit) are passed over. Counts are integers, so that no order of adding changes them.
"""

from __future__ import annotations

import tilelang.language as T

# Most groups or experts that a block counts in shared memory
MAX_COUNTED = 1024

# Longest list: positions in it, and a sweep of all threads beyond its end, are counted in 32 bits
MAX_ENTRIES = 1 << 30

# Entries that a thread has in flight
IN_FLIGHT = 4


@T.macro
def load_entries(indices, values, first, step, end):
    """values[j] = entry first + j * step of the flat list, -1 from `end` on."""
    for j in T.unroll(IN_FLIGHT):
        # Row 0 and a column beyond it: the tensor is dense
        values[j] = T.if_then_else(first + j * step < end, indices[0, first + j * step], T.int64(-1))


@T.macro
def count_entries(indices, histogram, base, begin, end, mine, step, limit):
    """Add the entries begin + mine, begin + mine + step, ... before `end` to histogram[base ...].

    `limit` is 64 bits wide."""
    values = T.alloc_local((IN_FLIGHT,), "int64")
    for i in T.serial(T.ceildiv(end - begin, IN_FLIGHT * step)):
        load_entries(indices, values, begin + i * IN_FLIGHT * step + mine, step, end)
        for j in T.unroll(IN_FLIGHT):
            if values[j] >= 0 and values[j] < limit:
                T.atomic_add(histogram[base + T.cast(values[j], "int32")], 1)


@T.macro
def count_share_of_block(indices, histogram, block, sizes, threads):
    """Clear `histogram` and add the entries that fall to this block, sweep after sweep over the list.

    sizes: (blocks, entries, limit) in a tuple, because a macro renames the variables that it is given by themselves.
    """
    thread = T.get_thread_binding()
    for i in T.serial(T.ceildiv(sizes[2], threads)):
        if i * threads + thread < sizes[2]:
            histogram[i * threads + thread] = 0
    T.sync_threads()
    limit = T.cast(sizes[2], "int64")
    count_entries(indices, histogram, 0, 0, sizes[1], block * threads + thread, sizes[0] * threads, limit)
    T.sync_threads()


def fits(num_tokens, num_topk):
    """The guard for lists that are not too long."""
    return T.cast(num_tokens, "int64") * num_topk <= MAX_ENTRIES
