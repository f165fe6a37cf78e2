"""Where each token's copies go in a buffer sorted by expert, and back: a stable counting sort in one launch.

Every warp owns a run of the flat list of (token, slot) entries. First each warp counts the experts of its run; the
counts of a block go to the workspace. After a barrier over the grid every block knows how many entries of each expert
come before its own, and the warps walk their runs again in ascending order to give out positions. So the order is that
of the list, whatever the number of blocks.
"""

import tilelang.language as T

from ..common.counting import IN_FLIGHT, MAX_COUNTED, count_entries, fits, load_entries
from ..common.device import include
from ..declare import kernel

_WARP = 32
_WARPS = 16
_THREADS = _WARP * _WARPS
_ROWS_IN_FLIGHT = 8  # of the workspace


@T.macro
def _sum_blocks(workspace, totals, before, block, num_sms, num_experts):
    """totals[e] = entries of expert e, before[e] = those in blocks before this one."""
    thread = T.get_thread_binding()
    total = T.alloc_var("int32")
    earlier = T.alloc_var("int32")
    width = T.alloc_var("int32")
    parts = T.alloc_var("int32")
    part = T.alloc_var("int32")
    rows = T.alloc_local((_ROWS_IN_FLIGHT,), "int32")
    for i in T.unroll(MAX_COUNTED // _THREADS):
        totals[i * _THREADS + thread] = 0
        before[i * _THREADS + thread] = 0
    T.sync_threads()
    # Threads left over by few experts share the blocks among them
    width = T.min(num_experts, _THREADS)
    parts = T.truncdiv(_THREADS, width)
    part = T.truncdiv(thread, width)
    if part < parts:
        for i in T.serial(T.ceildiv(num_experts, _THREADS)):
            expert = i * _THREADS + thread - part * width
            if expert < num_experts:
                total = 0
                earlier = 0
                for j in T.serial(T.ceildiv(num_sms, _ROWS_IN_FLIGHT * parts)):
                    for k in T.unroll(_ROWS_IN_FLIGHT):
                        row = (j * _ROWS_IN_FLIGHT + k) * parts + part
                        rows[k] = T.if_then_else(row < num_sms, workspace[row, expert], 0)
                    for k in T.unroll(_ROWS_IN_FLIGHT):
                        total += rows[k]
                        earlier += T.if_then_else((j * _ROWS_IN_FLIGHT + k) * parts + part < block, rows[k], 0)
                T.atomic_add(totals[expert], total)
                T.atomic_add(before[expert], earlier)
    T.sync_threads()


@T.macro
def _scan_aligned(totals, starts, warp_sums, num_experts, alignment, end):
    """starts[e] = sum of the aligned counts before expert e; end = the sum of all. A thread takes two neighbours."""
    thread = T.get_thread_binding()
    lane = thread % _WARP
    warp = thread // _WARP
    first = T.alloc_var("int32")
    second = T.alloc_var("int32")
    scanned = T.alloc_var("int32")
    other = T.alloc_var("int32")
    first = T.ceildiv(totals[2 * thread], alignment) * alignment
    second = T.ceildiv(totals[2 * thread + 1], alignment) * alignment
    scanned = first + second
    for i in T.unroll(5):
        other = T.shfl_up(scanned, 1 << i)
        if lane >= (1 << i):
            scanned += other
    if lane == _WARP - 1:
        warp_sums[warp] = scanned
    T.sync_threads()
    scanned -= first + second
    end[0] = 0
    for i in T.unroll(_WARPS):
        if i < warp:
            scanned += warp_sums[i]
        end[0] += warp_sums[i]
    T.sync_threads()  # starts may lie where warp_sums lay
    starts[2 * thread] = scanned
    starts[2 * thread + 1] = scanned + first
    T.sync_threads()


@T.macro
def _write_padding(outputs, begin, end, first, step, num_positions):
    """-1 at the positions begin + first, begin + first + step, ... before `end`."""
    position = T.alloc_var("int32")
    position = begin + first
    while position < T.min(end, num_positions):
        outputs[0][position] = -1
        outputs[1][position] = -1
        outputs[2][position] = -1
        position += step


@T.macro
def _assign_positions(
    topk_idx, outputs, token_topk_to_pos, next_position, base, begin, end, lane, num_topk, num_experts, num_positions
):
    """Give the entries of a warp's run their positions, 32 at a time, and count on in next_position[base + expert]."""
    values = T.alloc_local((IN_FLIGHT,), "int64")
    key = T.alloc_var("int32")
    rank = T.alloc_var("int32")
    position = T.alloc_var("int32")
    for i in T.serial(T.ceildiv(end - begin, IN_FLIGHT * _WARP)):
        load_entries(topk_idx, values, begin + i * IN_FLIGHT * _WARP + lane, _WARP, end)
        for j in T.unroll(IN_FLIGHT):
            flat = begin + (i * IN_FLIGHT + j) * _WARP + lane
            key = T.if_then_else(values[j] >= 0 and values[j] < num_experts, T.cast(values[j], "int32"), -1)
            same = T.match_any_sync(key)
            rank = T.call_extern("int32", "tk::lanes_before", same)
            position = -1
            if key >= 0:
                position = next_position[base + key] + rank
            T.sync_warp()
            if key >= 0 and rank == 0:
                next_position[base + key] = position + T.popcount(same)
            T.sync_warp()
            if flat < end:
                token_topk_to_pos[0, flat] = position
                if position >= 0 and position < num_positions:
                    outputs[0][position] = key
                    outputs[1][position] = T.truncdiv(flat, num_topk)
                    outputs[2][position] = flat


@kernel(
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_thread_storage_sync": True,  # barriers are set by hand
    },
)
def get_fused_mapping():
    """Write where each (token, slot) goes in a buffer sorted by expert, the inverse map, and each expert's segment.

    Entries of an expert keep their order; segments are rounded up to `alignment`; -1 stands for padding and for entries
    outside of the experts' range. Positions beyond the pos_* tensors are not written. workspace has a row for each of
    num_sms blocks, which run at the same time.
    """
    num_tokens, num_topk = T.dynamic("num_tokens"), T.dynamic("num_topk")
    num_experts, num_positions = T.dynamic("num_experts"), T.dynamic("num_positions")
    num_sms = T.dynamic("num_sms")

    @T.prim_func
    def main(
        topk_idx: T.Tensor((num_tokens, num_topk), "int64"),
        workspace: T.Tensor((num_sms, num_experts), "int32"),
        pos_to_expert: T.Tensor((num_positions,), "int32"),
        pos_to_token: T.Tensor((num_positions,), "int32"),
        pos_to_token_topk: T.Tensor((num_positions,), "int32"),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), "int32"),
        expert_start: T.Tensor((num_experts,), "int32"),
        expert_end: T.Tensor((num_experts,), "int32"),
        num_tokens_per_expert: T.Tensor((num_experts,), "int32"),
        alignment: T.int32,
    ):
        T.assume(fits(num_tokens, num_topk))
        T.assume(num_experts > 0)
        T.assume(num_experts <= MAX_COUNTED)
        T.assume(alignment > 0)
        T.assume(num_sms > 0)
        with T.Kernel(num_sms, threads=_THREADS) as block:
            include("warp.cuh")
            # Per warp and expert: first how many, then the next free position
            counts = T.alloc_shared((_WARPS * MAX_COUNTED,), "int32")
            totals = T.alloc_shared((MAX_COUNTED,), "int32")
            before = T.alloc_shared((MAX_COUNTED,), "int32")
            starts = T.alloc_shared((MAX_COUNTED,), "int32")
            warp_sums = T.alloc_shared((_WARPS,), "int32")
            all_end = T.alloc_local((1,), "int32")
            run = T.alloc_var("int32")
            begin = T.alloc_var("int32")
            end = T.alloc_var("int32")
            sum_ = T.alloc_var("int32")
            expert_at = T.alloc_var("int32")
            thread = T.get_thread_binding()
            lane = thread % _WARP
            warp = thread // _WARP
            outputs = (pos_to_expert, pos_to_token, pos_to_token_topk)

            # Count
            run = T.ceildiv(num_tokens * num_topk, num_sms * _WARPS)
            begin = T.min((block * _WARPS + warp) * run, num_tokens * num_topk)
            end = T.min(begin + run, num_tokens * num_topk)
            for i in T.serial(T.ceildiv(num_experts, _WARP)):
                if i * _WARP + lane < num_experts:
                    counts[warp * MAX_COUNTED + i * _WARP + lane] = 0
            T.sync_warp()
            count_entries(topk_idx, counts, warp * MAX_COUNTED, begin, end, lane, _WARP, T.cast(num_experts, "int64"))
            T.sync_threads()
            for i in T.serial(T.ceildiv(num_experts, _THREADS)):
                expert = i * _THREADS + thread
                if expert < num_experts:
                    sum_ = 0
                    for w in T.unroll(_WARPS):
                        sum_ += counts[w * MAX_COUNTED + expert]
                    workspace[block, expert] = sum_
            T.sync_grid()

            # Find each warp's first position of each expert
            _sum_blocks(workspace, totals, before, block, num_sms, num_experts)
            _scan_aligned(totals, starts, warp_sums, num_experts, alignment, all_end)
            for i in T.serial(T.ceildiv(num_experts, _THREADS)):
                expert = i * _THREADS + thread
                if expert < num_experts:
                    sum_ = starts[expert] + before[expert]
                    for w in T.unroll(_WARPS):
                        own = T.alloc_var("int32")
                        own = counts[w * MAX_COUNTED + expert]
                        counts[w * MAX_COUNTED + expert] = sum_
                        sum_ += own
                    if block == 0:
                        size = T.ceildiv(totals[expert], alignment) * alignment
                        expert_start[expert] = starts[expert]
                        expert_end[expert] = starts[expert] + size
                        num_tokens_per_expert[expert] = size
            T.sync_threads()

            # Positions, then the padding of some experts and of the end
            _assign_positions(
                topk_idx, outputs, token_topk_to_pos, counts, warp * MAX_COUNTED, begin, end, lane,
                num_topk, num_experts, num_positions,
            )  # fmt: skip
            expert_at = block
            while expert_at < num_experts:
                first = starts[expert_at] + totals[expert_at]
                next_start = starts[expert_at] + T.ceildiv(totals[expert_at], alignment) * alignment
                _write_padding(outputs, first, next_start, thread, _THREADS, num_positions)
                expert_at += num_sms
            _write_padding(
                outputs, all_end[0], num_positions, block * _THREADS + thread, num_sms * _THREADS, num_positions
            )

    return main
