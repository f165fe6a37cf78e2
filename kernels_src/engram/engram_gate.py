"""The gate between residual streams and looked-up values, forward and backward.

Per token and stream: three sums over a row make the gate, then the row is written: a token's row is needed twice and
read once. A block keeps one stream, whose weights (and in the backward pass their gradients) stay in registers, and
walks over the tokens; the blocks of the streams take the same tokens at about the same time, so that the shared values
come from L2. Where that is slower, blocks of the backward pass, whose gradients of values mix the streams, take whole
tokens. Rows travel through a ring in shared memory by asynchronous copies; a thread copies what it will read itself, so
that the ring needs no barriers. Forms differ in the width of a row that their threads hold; the last one takes any
hidden size, stride and address, and reads rows twice.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import arch, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
    "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}

_KIB = 1024
_CHANNELS = 8  # of an access of 16 bytes
_STREAMS = 4  # of the backward pass
_GENERAL_THREADS, _GENERAL_BLOCKS = 256, 8
# Of shared memory, for the driver and for sums
_RESERVED = 2 * _KIB


class _Ring:
    """The sizes of a form: threads of a block, 16-byte pieces of a row that a thread holds, and the ring's stages."""

    def __init__(self, threads: int, steps: int, rows: int, blocks: int, stages: int) -> None:
        self.threads, self.steps, self.rows = threads, steps, rows
        self.capacity = threads * steps * _CHANNELS
        self.piece = threads * _CHANNELS  # elements that one step of all threads holds
        # What a block of four has of the columns of all rows of grad_out
        self.quarter = self.capacity // _STREAMS
        self.quarter_chunks = self.quarter // _CHANNELS
        self.quarter_steps = -(-self.quarter_chunks // threads)
        self.blocks = blocks  # of a multiprocessor that are meant to run at a time
        stage_bytes = rows * self.capacity * 2
        room = arch().smem_per_block - _RESERVED
        self.stages = max(1, min(stages, room // stage_bytes))


# Form -> threads, pieces of a row, blocks of a multiprocessor, stages. A stage of the forward pass is a row of x, k
# and v; that of the backward pass one of grad_out, x, k and v, and a quarter of the four rows of grad_out. More is not
# faster: with 2560 columns the backward pass moves 97 % of a copy's bytes with two blocks of two stages, 90 % with two
# of four or three of two.
_FORWARD = {
    "h2048": (64, 4, 4, 3),
    "h2560": (64, 5, 6, 2),
    "h3072": (96, 4, 4, 2),
    "h4096": (128, 4, 4, 2),
    "h6144": (192, 4, 2, 3),
    "h7168": (224, 4, 1, 5),
    "h8192": (256, 4, 1, 4),
}
# Four warps at least: each of the first four has a thread that copies saved numbers
_BACKWARD = {
    "h2048": (128, 2, 2, 2),
    "h2560": (160, 2, 2, 2),
    "h3072": (192, 2, 2, 2),
    "h4096": (256, 2, 2, 2),
    "h6144": (256, 3, 1, 2),
    "h7168": (224, 4, 1, 2),
    "h8192": (512, 2, 1, 2),
}
# Instead, where shared memory takes whole tokens: a stage has four rows of grad_out, x and k, and one of v. Two blocks
# of a cluster that share a wider token and exchange their sums were slower than streams (7168 columns: 86 %).
_BACKWARD_TOKENS = {"h4096": (512, 1, 1, 2)}


def _forward_ring(form: str) -> _Ring:
    threads, steps, blocks, stages = _FORWARD[form]
    return _Ring(threads, steps, 3, blocks, stages)


def _backward_ring(form: str) -> tuple[_Ring, bool]:
    """The ring, and whether its stages are whole tokens."""
    if form in _BACKWARD_TOKENS:
        threads, steps, blocks, stages = _BACKWARD_TOKENS[form]
        ring = _Ring(threads, steps, 3 * _STREAMS + 1, blocks, stages)
        if ring.stages > 1:
            return ring, True
    threads, steps, blocks, stages = _BACKWARD[form]
    return _Ring(threads, steps, 5, blocks, stages), False


# ---- what both directions share --------------------------------------------------------------------------------------


def _copy(target, at, tensor, *indices):
    """Start copying 16 bytes from tensor[indices] to target[at ...]."""
    start = T.access_ptr(tensor[indices], "r", _CHANNELS)
    return T.ptx_cp_async(T.access_ptr(target[at], "w", _CHANNELS), start, _CHANNELS)


@T.macro
def _load_weights(weights, weight_fused, stream, hidden, ring):
    """A thread's weights of a stream; zero beyond the row."""
    thread = T.get_thread_binding()
    for step in T.unroll(ring.steps):
        chunk = step * ring.threads + thread
        for i in T.unroll(_CHANNELS // 4):
            if chunk * _CHANNELS < hidden:
                for j in T.vectorized(4):
                    weights[step * _CHANNELS + i * 4 + j] = weight_fused[stream, chunk * _CHANNELS + i * 4 + j]
            else:
                for j in T.vectorized(4):
                    weights[step * _CHANNELS + i * 4 + j] = T.float32(0)


@T.macro
def _read_mask(image_token_mask, token, is_image):
    is_image[0] = False
    if not T.isnullptr(image_token_mask.data):
        is_image[0] = image_token_mask[token]


def _block_sums(count, threads, sums, scratch, turn):
    name = f"tk::block_sums<{count}, {threads}>"
    return T.call_extern("handle", name, T.address_of(sums[0]), T.address_of(scratch[0]), turn)


# ---- forward ---------------------------------------------------------------------------------------------------------


def _num_groups(num_sms, num_streams, blocks):
    """How many tokens are worked on at a time: each by a block for every stream."""
    return T.max(T.truncdiv(num_sms * blocks, num_streams), 1)


@T.macro
def _fetch_forward(ring_buffer, hidden_states, k, v, token, stream, slot, hidden, num_tokens, ring):
    """Start copying a row of x, k and v to a slot of the ring; a group of copies is closed in any case."""
    thread = T.get_thread_binding()
    if token < num_tokens:
        for step in T.unroll(ring.steps):
            chunk = step * ring.threads + thread
            if chunk * _CHANNELS < hidden:
                at = slot * (3 * ring.capacity) + step * ring.piece + thread * _CHANNELS
                _copy(ring_buffer, at, hidden_states, token, stream, chunk * _CHANNELS)
                _copy(ring_buffer, at + ring.capacity, k, token, stream, chunk * _CHANNELS)
                _copy(ring_buffer, at + 2 * ring.capacity, v, token, chunk * _CHANNELS)
    T.ptx_commit_group()


@T.macro
def _save(results, sums, saved, token, stream):
    """The saved numbers of a row, by one thread. `saved`: dot, gate_score, rstd_x, rstd_k; all or none are there."""
    if T.get_thread_binding() == 0:
        if not T.isnullptr(saved[0].data):
            saved[0][token, stream] = sums[0]
        if not T.isnullptr(saved[1].data):
            saved[1][token, stream] = results[0]
        if not T.isnullptr(saved[2].data):
            saved[2][token, stream] = results[1]
        if not T.isnullptr(saved[3].data):
            saved[3][token, stream] = results[2]


@T.macro
def _forward_row(ring_buffer, weights, scratch, out, saved, token, stream, slot, turn, is_image, scalars, ring):
    """One row that has arrived. scalars: (hidden, eps, clamp_value)."""
    thread = T.get_thread_binding()
    sums = T.alloc_local((3,), "float32")
    results = T.alloc_local((3,), "float32")
    target = T.alloc_local((_CHANNELS,), "bfloat16")
    hidden, eps, clamp_value = scalars
    for i in T.unroll(3):
        sums[i] = T.float32(0)
    for step in T.unroll(ring.steps):
        if (step * ring.threads + thread) * _CHANNELS < hidden:
            at = slot * (3 * ring.capacity) + step * ring.piece + thread * _CHANNELS
            T.call_extern(
                "handle",
                "tk::add_products_x8",
                T.address_of(ring_buffer[at]),
                T.address_of(ring_buffer[at + ring.capacity]),
                T.address_of(weights[step * _CHANNELS]),
                T.address_of(sums[0]),
            )
    _block_sums(3, ring.threads, sums, scratch, turn)
    T.call_extern("handle", "tk::find_gate", T.address_of(sums[0]), hidden, eps, clamp_value, T.address_of(results[0]))
    for step in T.unroll(ring.steps):
        chunk = step * ring.threads + thread
        if chunk * _CHANNELS < hidden:
            at = slot * (3 * ring.capacity) + step * ring.piece + thread * _CHANNELS
            if is_image[0]:
                for i in T.vectorized(_CHANNELS):
                    target[i] = ring_buffer[at + i]
            else:
                T.call_extern(
                    "handle",
                    "tk::gate_x8",
                    T.address_of(ring_buffer[at]),
                    T.address_of(ring_buffer[at + 2 * ring.capacity]),
                    results[0],
                    T.address_of(target[0]),
                )
            for i in T.vectorized(_CHANNELS):
                out[token, stream, chunk * _CHANNELS + i] = target[i]
    if not is_image[0]:
        _save(results, sums, saved, token, stream)


@T.macro
def _forward_by_ring(
    hidden_states,
    k,
    v,
    weight_fused,
    image_token_mask,
    out,
    saved,
    block,
    num_tokens,
    num_streams,
    num_sms,
    scalars,
    ring,
):
    include("gate.cuh")
    ring_buffer = T.alloc_shared((ring.stages * 3 * ring.capacity,), "bfloat16")
    scratch = T.alloc_shared((2 * 3 * (ring.threads // 32),), "float32")
    weights = T.alloc_local((ring.steps * _CHANNELS,), "float32")
    is_image = T.alloc_local((1,), "bool")
    token = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    next_slot = T.alloc_var("int32")
    turn = T.alloc_var("int32")
    stream = T.alloc_var("int32")
    groups = T.alloc_var("int32")
    stream = T.truncmod(block, num_streams)
    groups = _num_groups(num_sms, num_streams, ring.blocks)
    token = T.truncdiv(block, num_streams)
    for stage in T.unroll(ring.stages - 1):
        _fetch_forward(
            ring_buffer, hidden_states, k, v, token + stage * groups, stream, stage, scalars[0], num_tokens, ring
        )
    if token < num_tokens:
        _load_weights(weights, weight_fused, stream, scalars[0], ring)
    slot = 0
    next_slot = ring.stages - 1
    turn = 0
    while token < num_tokens:
        _fetch_forward(
            ring_buffer, hidden_states, k, v, token + (ring.stages - 1) * groups, stream, next_slot, scalars[0],
            num_tokens, ring,
        )  # fmt: skip
        _read_mask(image_token_mask, token, is_image)
        T.ptx_wait_group(ring.stages - 1)
        _forward_row(ring_buffer, weights, scratch, out, saved, token, stream, slot, turn, is_image, scalars, ring)
        token += groups
        next_slot = slot
        slot = T.if_then_else(slot == ring.stages - 1, 0, slot + 1)
        turn += 1


@T.macro
def _forward_general(
    hidden_states, k, v, weight_fused, image_token_mask, out, saved, block, num_tokens, num_streams, num_sms, scalars
):
    """Element by element, rows read twice."""
    include("gate.cuh")
    scratch = T.alloc_shared((2 * 3 * (_GENERAL_THREADS // 32),), "float32")
    sums = T.alloc_local((3,), "float32")
    results = T.alloc_local((3,), "float32")
    is_image = T.alloc_local((1,), "bool")
    token = T.alloc_var("int32")
    turn = T.alloc_var("int32")
    stream = T.alloc_var("int32")
    thread = T.get_thread_binding()
    stream = T.truncmod(block, num_streams)
    hidden, eps, clamp_value = scalars
    token = T.truncdiv(block, num_streams)
    turn = 0
    while token < num_tokens:
        _read_mask(image_token_mask, token, is_image)
        for i in T.unroll(3):
            sums[i] = T.float32(0)
        for i in T.serial(T.truncdiv(hidden, _GENERAL_THREADS)):
            T.call_extern(
                "handle",
                "tk::add_products",
                T.cast(hidden_states[token, stream, i * _GENERAL_THREADS + thread], "float32"),
                T.cast(k[token, stream, i * _GENERAL_THREADS + thread], "float32"),
                weight_fused[stream, i * _GENERAL_THREADS + thread],
                T.address_of(sums[0]),
            )
        _block_sums(3, _GENERAL_THREADS, sums, scratch, turn)
        T.call_extern(
            "handle", "tk::find_gate", T.address_of(sums[0]), hidden, eps, clamp_value, T.address_of(results[0])
        )
        for i in T.serial(T.truncdiv(hidden, _GENERAL_THREADS)):
            col = i * _GENERAL_THREADS + thread
            if is_image[0]:
                out[token, stream, col] = hidden_states[token, stream, col]
            else:
                out[token, stream, col] = T.cast(
                    T.call_extern(
                        "float32",
                        "__fmaf_rn",
                        results[0],
                        T.cast(v[token, col], "float32"),
                        T.cast(hidden_states[token, stream, col], "float32"),
                    ),
                    "bfloat16",
                )
        if not is_image[0]:
            _save(results, sums, saved, token, stream)
        token += _num_groups(num_sms, num_streams, _GENERAL_BLOCKS)
        turn += 1


@kernel(axes=grid(form=forms(*_FORWARD, "general")), pass_configs=_PASS_CONFIGS)
def engram_gate_fwd(form):
    """Write x + gate * v to out, and where they are given the dot product, the gate and both 1 / RMS of each row.

    out may be hidden_states. Rows of tokens in image_token_mask are copied, and nothing is saved for them. num_sms
    decides how many blocks share the tokens, not what they compute.
    """
    num_tokens, num_streams, hidden = T.dynamic("num_tokens"), T.dynamic("num_streams"), T.dynamic("hidden")
    k_strides = T.dynamic("k_token_stride", "int64"), T.dynamic("k_stream_stride", "int64"), 1
    v_stride = T.dynamic("v_stride", "int64")
    ring = None if form == "general" else _forward_ring(form)
    blocks, threads = (_GENERAL_BLOCKS, _GENERAL_THREADS) if form == "general" else (ring.blocks, ring.threads)
    rows, numbers = (num_tokens, num_streams, hidden), (num_tokens, num_streams)

    @T.prim_func
    def main(
        hidden_states: T.Tensor(rows, "bfloat16"),
        k: T.StridedTensor(rows, k_strides, "bfloat16"),
        v: T.StridedTensor((num_tokens, hidden), (v_stride, 1), "bfloat16"),
        weight_fused: T.Tensor((num_streams, hidden), "float32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        out: T.Tensor(rows, "bfloat16"),
        dot: T.Tensor(numbers, "float32"),
        gate_score: T.Tensor(numbers, "float32"),
        rstd_x: T.Tensor(numbers, "float32"),
        rstd_k: T.Tensor(numbers, "float32"),
        eps: T.float32,
        clamp_value: T.float32,
        num_sms: T.int32,
    ):
        T.assume(hidden % 256 == 0)
        T.assume(hidden >= 512)
        T.assume(num_streams > 0)
        T.assume(num_sms > 0)
        if form != "general":
            T.assume(hidden <= ring.capacity)
            T.assume(k_strides[0] % _CHANNELS == 0)
            T.assume(k_strides[1] % _CHANNELS == 0)
            T.assume(v_stride % _CHANNELS == 0)
        with T.Kernel(_num_groups(num_sms, num_streams, blocks) * num_streams, threads=threads) as block:
            if form == "general":
                _forward_general(
                    hidden_states, k, v, weight_fused, image_token_mask, out, (dot, gate_score, rstd_x, rstd_k),
                    block, num_tokens, num_streams, num_sms, (hidden, eps, clamp_value),
                )  # fmt: skip
            else:
                _forward_by_ring(
                    hidden_states, k, v, weight_fused, image_token_mask, out, (dot, gate_score, rstd_x, rstd_k),
                    block, num_tokens, num_streams, num_sms, (hidden, eps, clamp_value), ring,
                )  # fmt: skip

    return main


# ---- backward --------------------------------------------------------------------------------------------------------

# Saved numbers of a token, a row of the small ring: dot, gate_score, rstd_x and rstd_k of each stream
_NUMBERS = 4 * _STREAMS


def _copy_numbers(target, at, tensor, token):
    """Start copying a token's four numbers to target[at ...]."""
    start = T.access_ptr(tensor[token, 0], "r", _STREAMS)
    return T.ptx_cp_async(T.access_ptr(target[at], "w", _STREAMS), start, _STREAMS)


@T.macro
def _fetch_saved(buffer, saved_slot, at, source, token):
    if T.get_thread_binding() == at * 32:
        _copy_numbers(buffer, saved_slot * _NUMBERS + at * _STREAMS, source, token)


@T.macro
def _fetch_backward(buffers, rows, saved, token, stream, slot, saved_slot, hidden, num_tokens, ring):
    """Start copying what a row needs to a slot of the ring. rows: grad_out, hidden_states, k, v.

    The saved numbers are copied by four threads for all, which read them behind the next barrier.
    """
    thread = T.get_thread_binding()
    if token < num_tokens:
        for step in T.unroll(ring.steps):
            chunk = step * ring.threads + thread
            if chunk * _CHANNELS < hidden:
                at = slot * (ring.rows * ring.capacity) + step * ring.piece + thread * _CHANNELS
                _copy(buffers[0], at, rows[0], token, stream, chunk * _CHANNELS)
                _copy(buffers[0], at + ring.capacity, rows[1], token, stream, chunk * _CHANNELS)
                _copy(buffers[0], at + 2 * ring.capacity, rows[2], token, stream, chunk * _CHANNELS)
                _copy(buffers[0], at + 3 * ring.capacity, rows[3], token, chunk * _CHANNELS)
        # The quarter of the columns whose grad_v this block writes
        for step in T.unroll(ring.quarter_steps):
            chunk = step * ring.threads + thread
            if chunk * _CHANNELS * _STREAMS < hidden:
                if chunk < ring.quarter_chunks:
                    at = slot * (ring.rows * ring.capacity) + 4 * ring.capacity + chunk * _CHANNELS
                    col = stream * T.truncdiv(hidden, _STREAMS) + chunk * _CHANNELS
                    for i in T.unroll(_STREAMS):
                        _copy(buffers[0], at + i * ring.quarter, rows[0], token, i, col)
        _fetch_saved(buffers[1], saved_slot, 0, saved[0], token)
        _fetch_saved(buffers[1], saved_slot, 1, saved[1], token)
        _fetch_saved(buffers[1], saved_slot, 2, saved[2], token)
        _fetch_saved(buffers[1], saved_slot, 3, saved[3], token)
    T.ptx_commit_group()


@T.macro
def _backward_row(
    buffers, weights, grad_weights, scratch, outputs, token, stream, slot, saved_slot, turn, is_image, scalars, ring
):
    """One row that has arrived. outputs: grad_hidden_states, grad_k, grad_v; scalars: (hidden, clamp_value)."""
    thread = T.get_thread_binding()
    sums = T.alloc_local((1,), "float32")
    factors = T.alloc_local((3,), "float32")
    gates = T.alloc_local((_STREAMS,), "float32")
    grad_x = T.alloc_local((_CHANNELS,), "bfloat16")
    grad_k = T.alloc_local((_CHANNELS,), "bfloat16")
    hidden, clamp_value = scalars
    sums[0] = T.float32(0)
    for step in T.unroll(ring.steps):
        if (step * ring.threads + thread) * _CHANNELS < hidden:
            at = slot * (ring.rows * ring.capacity) + step * ring.piece + thread * _CHANNELS
            T.call_extern(
                "handle",
                "tk::add_dot_x8",
                T.address_of(buffers[0][at]),
                T.address_of(buffers[0][at + 3 * ring.capacity]),
                T.address_of(sums[0]),
            )
    _block_sums(1, ring.threads, sums, scratch, turn)
    numbers = saved_slot * _NUMBERS + stream
    T.call_extern(
        "handle",
        "tk::find_gate_gradient",
        sums[0],
        buffers[1][numbers],
        buffers[1][numbers + _STREAMS],
        buffers[1][numbers + 2 * _STREAMS],
        buffers[1][numbers + 3 * _STREAMS],
        hidden,
        clamp_value,
        T.address_of(factors[0]),
    )
    for step in T.unroll(ring.steps):
        chunk = step * ring.threads + thread
        if chunk * _CHANNELS < hidden:
            at = slot * (ring.rows * ring.capacity) + step * ring.piece + thread * _CHANNELS
            if is_image[0]:
                for i in T.vectorized(_CHANNELS):
                    grad_x[i] = buffers[0][at + i]
                for i in T.vectorized(_CHANNELS):
                    grad_k[i] = T.bfloat16(0)
            else:
                T.call_extern(
                    "handle",
                    "tk::gate_gradients_x8",
                    T.address_of(buffers[0][at]),
                    T.address_of(buffers[0][at + ring.capacity]),
                    T.address_of(buffers[0][at + 2 * ring.capacity]),
                    T.address_of(weights[step * _CHANNELS]),
                    T.address_of(factors[0]),
                    T.address_of(grad_weights[step * _CHANNELS]),
                    T.address_of(grad_x[0]),
                    T.address_of(grad_k[0]),
                )
            for i in T.vectorized(_CHANNELS):
                outputs[0][token, stream, chunk * _CHANNELS + i] = grad_x[i]
            for i in T.vectorized(_CHANNELS):
                outputs[1][token, stream, chunk * _CHANNELS + i] = grad_k[i]
    for i in T.unroll(_STREAMS):
        gates[i] = buffers[1][saved_slot * _NUMBERS + _STREAMS + i]
    for step in T.unroll(ring.quarter_steps):
        chunk = step * ring.threads + thread
        if chunk * _CHANNELS * _STREAMS < hidden:
            if chunk < ring.quarter_chunks:
                at = slot * (ring.rows * ring.capacity) + 4 * ring.capacity + chunk * _CHANNELS
                T.call_extern(
                    "handle",
                    "tk::value_gradients_x8",
                    T.address_of(buffers[0][at]),
                    ring.quarter,
                    T.address_of(gates[0]),
                    T.address_of(grad_x[0]),
                )
                if is_image[0]:
                    for i in T.vectorized(_CHANNELS):
                        grad_x[i] = T.bfloat16(0)
                col = stream * T.truncdiv(hidden, _STREAMS) + chunk * _CHANNELS
                for i in T.vectorized(_CHANNELS):
                    outputs[2][token, col + i] = grad_x[i]


@T.macro
def _store_grad_weights(grad_w_partial, grad_weights, group, stream, hidden, ring):
    thread = T.get_thread_binding()
    for step in T.unroll(ring.steps):
        chunk = step * ring.threads + thread
        if chunk * _CHANNELS < hidden:
            for i in T.unroll(_CHANNELS // 4):
                for j in T.vectorized(4):
                    grad_w_partial[group, stream, chunk * _CHANNELS + i * 4 + j] = grad_weights[
                        step * _CHANNELS + i * 4 + j
                    ]


@T.macro
def _backward_by_ring(
    rows, weight_fused, image_token_mask, saved, outputs, grad_w_partial, block, num_tokens, num_parts, scalars, ring
):
    include("gate.cuh")
    ring_buffer = T.alloc_shared((ring.stages * ring.rows * ring.capacity,), "bfloat16")
    saved_buffer = T.alloc_shared(((ring.stages + 1) * _NUMBERS,), "float32")
    scratch = T.alloc_shared((2 * (ring.threads // 32),), "float32")
    weights = T.alloc_local((ring.steps * _CHANNELS,), "float32")
    grad_weights = T.alloc_local((ring.steps * _CHANNELS,), "float32")
    is_image = T.alloc_local((1,), "bool")
    token = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    next_slot = T.alloc_var("int32")
    # One slot more, and one barrier later free again: other threads read what these copies write
    saved_slot = T.alloc_var("int32")
    next_saved_slot = T.alloc_var("int32")
    turn = T.alloc_var("int32")
    stream = T.alloc_var("int32")
    group = T.alloc_var("int32")
    buffers = (ring_buffer, saved_buffer)
    stream = block % _STREAMS
    group = block // _STREAMS
    token = group
    for stage in T.unroll(ring.stages - 1):
        _fetch_backward(
            buffers, rows, saved, token + stage * num_parts, stream, stage, stage, scalars[0], num_tokens, ring
        )
    if token < num_tokens:
        _load_weights(weights, weight_fused, stream, scalars[0], ring)
    for i in T.unroll(ring.steps * _CHANNELS):
        grad_weights[i] = T.float32(0)
    slot = 0
    next_slot = ring.stages - 1
    saved_slot = 0
    next_saved_slot = ring.stages - 1
    turn = 0
    while token < num_tokens:
        _fetch_backward(
            buffers, rows, saved, token + (ring.stages - 1) * num_parts, stream, next_slot, next_saved_slot,
            scalars[0], num_tokens, ring,
        )  # fmt: skip
        _read_mask(image_token_mask, token, is_image)
        T.ptx_wait_group(ring.stages - 1)
        _backward_row(
            buffers, weights, grad_weights, scratch, outputs, token, stream, slot, saved_slot, turn, is_image,
            scalars, ring,
        )  # fmt: skip
        token += num_parts
        next_slot = slot
        slot = T.if_then_else(slot == ring.stages - 1, 0, slot + 1)
        saved_slot = T.if_then_else(saved_slot == ring.stages, 0, saved_slot + 1)
        next_saved_slot = T.if_then_else(next_saved_slot == ring.stages, 0, next_saved_slot + 1)
        turn += 1
    _store_grad_weights(grad_w_partial, grad_weights, group, stream, scalars[0], ring)


@T.macro
def _fetch_token(ring_buffer, rows, token, slot, hidden, num_tokens, ring):
    """Start copying a token's rows to a slot of the ring: four of grad_out, hidden_states and k, and one of v."""
    thread = T.get_thread_binding()
    if token < num_tokens:
        if thread * _CHANNELS < hidden:
            at = slot * (ring.rows * ring.capacity) + thread * _CHANNELS
            for i in T.unroll(_STREAMS):
                _copy(ring_buffer, at + i * ring.capacity, rows[0], token, i, thread * _CHANNELS)
            for i in T.unroll(_STREAMS):
                _copy(ring_buffer, at + (_STREAMS + i) * ring.capacity, rows[1], token, i, thread * _CHANNELS)
            for i in T.unroll(_STREAMS):
                _copy(ring_buffer, at + (2 * _STREAMS + i) * ring.capacity, rows[2], token, i, thread * _CHANNELS)
            _copy(ring_buffer, at + 3 * _STREAMS * ring.capacity, rows[3], token, thread * _CHANNELS)
    T.ptx_commit_group()


@T.macro
def _load_numbers(numbers, saved, token, num_tokens):
    """The saved numbers of one of a token's streams, which is another in each of four lanes."""
    stream = T.get_thread_binding() % _STREAMS
    if token < num_tokens:
        numbers[0] = saved[0][token, stream]
        numbers[1] = saved[1][token, stream]
        numbers[2] = saved[2][token, stream]
        numbers[3] = saved[3][token, stream]


@T.macro
def _backward_token(
    ring_buffer, numbers, weights, grad_weights, scratch, outputs, token, slot, turn, is_image, scalars, ring
):
    """A token whose rows have arrived. outputs: grad_hidden_states, grad_k, grad_v; scalars: (hidden, clamp_value)."""
    thread = T.get_thread_binding()
    sums = T.alloc_local((_STREAMS,), "float32")
    factors = T.alloc_local((3 * _STREAMS,), "float32")
    gates = T.alloc_local((_STREAMS,), "float32")
    grad_x = T.alloc_local((_CHANNELS,), "bfloat16")
    grad_k = T.alloc_local((_CHANNELS,), "bfloat16")
    hidden, clamp_value = scalars
    at = slot * (ring.rows * ring.capacity) + thread * _CHANNELS
    for i in T.unroll(_STREAMS):
        sums[i] = T.float32(0)
    if thread * _CHANNELS < hidden:
        for i in T.unroll(_STREAMS):
            T.call_extern(
                "handle",
                "tk::add_dot_x8",
                T.address_of(ring_buffer[at + i * ring.capacity]),
                T.address_of(ring_buffer[at + 3 * _STREAMS * ring.capacity]),
                T.address_of(sums[i]),
            )
    _block_sums(_STREAMS, ring.threads, sums, scratch, turn)
    T.call_extern(
        "handle",
        "tk::find_gate_gradients_x4",
        T.address_of(sums[0]),
        T.address_of(numbers[0]),
        hidden,
        clamp_value,
        T.address_of(factors[0]),
        T.address_of(gates[0]),
    )
    if thread * _CHANNELS < hidden:
        for i in T.unroll(_STREAMS):
            if is_image[0]:
                for j in T.vectorized(_CHANNELS):
                    grad_x[j] = ring_buffer[at + i * ring.capacity + j]
                for j in T.vectorized(_CHANNELS):
                    grad_k[j] = T.bfloat16(0)
            else:
                T.call_extern(
                    "handle",
                    "tk::gate_gradients_x8",
                    T.address_of(ring_buffer[at + i * ring.capacity]),
                    T.address_of(ring_buffer[at + (_STREAMS + i) * ring.capacity]),
                    T.address_of(ring_buffer[at + (2 * _STREAMS + i) * ring.capacity]),
                    T.address_of(weights[i * _CHANNELS]),
                    T.address_of(factors[i * 3]),
                    T.address_of(grad_weights[i * _CHANNELS]),
                    T.address_of(grad_x[0]),
                    T.address_of(grad_k[0]),
                )
            for j in T.vectorized(_CHANNELS):
                outputs[0][token, i, thread * _CHANNELS + j] = grad_x[j]
            for j in T.vectorized(_CHANNELS):
                outputs[1][token, i, thread * _CHANNELS + j] = grad_k[j]
        T.call_extern(
            "handle",
            "tk::value_gradients_x8",
            T.address_of(ring_buffer[at]),
            ring.capacity,
            T.address_of(gates[0]),
            T.address_of(grad_x[0]),
        )
        if is_image[0]:
            for j in T.vectorized(_CHANNELS):
                grad_x[j] = T.bfloat16(0)
        for j in T.vectorized(_CHANNELS):
            outputs[2][token, thread * _CHANNELS + j] = grad_x[j]


@T.macro
def _backward_by_tokens(
    rows, weight_fused, image_token_mask, saved, outputs, grad_w_partial, block, num_tokens, num_parts, scalars, ring
):
    include("gate.cuh")
    T.annotate_min_blocks_per_sm(ring.blocks)
    ring_buffer = T.alloc_shared((ring.stages * ring.rows * ring.capacity,), "bfloat16")
    scratch = T.alloc_shared((2 * _STREAMS * (ring.threads // 32),), "float32")
    weights = T.alloc_local((_STREAMS * _CHANNELS,), "float32")
    grad_weights = T.alloc_local((_STREAMS * _CHANNELS,), "float32")
    numbers = T.alloc_local((4,), "float32")
    next_numbers = T.alloc_local((4,), "float32")
    is_image = T.alloc_local((1,), "bool")
    token = T.alloc_var("int32")
    slot = T.alloc_var("int32")
    next_slot = T.alloc_var("int32")
    turn = T.alloc_var("int32")
    thread = T.get_thread_binding()
    token = block
    for stage in T.unroll(ring.stages - 1):
        _fetch_token(ring_buffer, rows, token + stage * num_parts, stage, scalars[0], num_tokens, ring)
    for i in T.unroll(4):
        next_numbers[i] = T.float32(0)
    _load_numbers(next_numbers, saved, token, num_tokens)
    for i in T.unroll(_STREAMS * _CHANNELS // 4):
        if thread * _CHANNELS < scalars[0]:
            for j in T.vectorized(4):
                weights[i * 4 + j] = weight_fused[i // 2, thread * _CHANNELS + i % 2 * 4 + j]
        else:
            for j in T.vectorized(4):
                weights[i * 4 + j] = T.float32(0)
    for i in T.unroll(_STREAMS * _CHANNELS):
        grad_weights[i] = T.float32(0)
    slot = 0
    next_slot = ring.stages - 1
    turn = 0
    while token < num_tokens:
        _fetch_token(ring_buffer, rows, token + (ring.stages - 1) * num_parts, next_slot, scalars[0], num_tokens, ring)
        for i in T.unroll(4):
            numbers[i] = next_numbers[i]
        _load_numbers(next_numbers, saved, token + num_parts, num_tokens)
        _read_mask(image_token_mask, token, is_image)
        T.ptx_wait_group(ring.stages - 1)
        _backward_token(
            ring_buffer, numbers, weights, grad_weights, scratch, outputs, token, slot, turn, is_image, scalars, ring
        )
        token += num_parts
        next_slot = slot
        slot = T.if_then_else(slot == ring.stages - 1, 0, slot + 1)
        turn += 1
    for i in T.unroll(_STREAMS * _CHANNELS // 4):
        if thread * _CHANNELS < scalars[0]:
            for j in T.vectorized(4):
                grad_w_partial[block, i // 2, thread * _CHANNELS + i % 2 * 4 + j] = grad_weights[i * 4 + j]


@T.macro
def _backward_general(
    rows, weight_fused, image_token_mask, saved, outputs, grad_w_partial, block, num_tokens, num_parts, scalars
):
    """Element by element; a thread's columns of grad_w_partial serve as its sums."""
    include("gate.cuh")
    scratch = T.alloc_shared((2 * (_GENERAL_THREADS // 32),), "float32")
    sums = T.alloc_local((1,), "float32")
    factors = T.alloc_local((3,), "float32")
    grad_w = T.alloc_local((1,), "float32")
    found = T.alloc_local((2,), "float32")
    total = T.alloc_var("float32")
    is_image = T.alloc_local((1,), "bool")
    token = T.alloc_var("int32")
    turn = T.alloc_var("int32")
    stream = T.alloc_var("int32")
    group = T.alloc_var("int32")
    thread = T.get_thread_binding()
    hidden, clamp_value = scalars
    stream = block % _STREAMS
    group = block // _STREAMS
    token = group
    turn = 0
    for i in T.serial(T.truncdiv(hidden, _GENERAL_THREADS)):
        grad_w_partial[group, stream, i * _GENERAL_THREADS + thread] = T.float32(0)
    while token < num_tokens:
        _read_mask(image_token_mask, token, is_image)
        sums[0] = T.float32(0)
        for i in T.serial(T.truncdiv(hidden, _GENERAL_THREADS)):
            col = i * _GENERAL_THREADS + thread
            sums[0] = T.call_extern(
                "float32",
                "__fmaf_rn",
                T.cast(rows[0][token, stream, col], "float32"),
                T.cast(rows[3][token, col], "float32"),
                sums[0],
            )
        _block_sums(1, _GENERAL_THREADS, sums, scratch, turn)
        T.call_extern(
            "handle",
            "tk::find_gate_gradient",
            sums[0],
            saved[0][token, stream],
            saved[1][token, stream],
            saved[2][token, stream],
            saved[3][token, stream],
            hidden,
            clamp_value,
            T.address_of(factors[0]),
        )
        for i in T.serial(T.truncdiv(hidden, _GENERAL_THREADS)):
            col = i * _GENERAL_THREADS + thread
            if is_image[0]:
                outputs[0][token, stream, col] = rows[0][token, stream, col]
                outputs[1][token, stream, col] = T.bfloat16(0)
            else:
                grad_w[0] = grad_w_partial[group, stream, col]
                T.call_extern(
                    "handle",
                    "tk::gate_gradients_of",
                    T.cast(rows[0][token, stream, col], "float32"),
                    T.cast(rows[1][token, stream, col], "float32"),
                    T.cast(rows[2][token, stream, col], "float32"),
                    weight_fused[stream, col],
                    T.address_of(factors[0]),
                    T.address_of(grad_w[0]),
                    T.address_of(found[0]),
                )
                grad_w_partial[group, stream, col] = grad_w[0]
                outputs[0][token, stream, col] = T.cast(found[0], "bfloat16")
                outputs[1][token, stream, col] = T.cast(found[1], "bfloat16")
        # Each stream's block writes a quarter of the columns of grad_v
        for i in T.serial(T.ceildiv(hidden, _GENERAL_THREADS * _STREAMS)):
            col = stream * T.truncdiv(hidden, _STREAMS) + i * _GENERAL_THREADS + thread
            if (i * _GENERAL_THREADS + thread) * _STREAMS < hidden:
                total = T.float32(0)
                if not is_image[0]:
                    for j in T.unroll(_STREAMS):
                        total = T.call_extern(
                            "float32", "__fmaf_rn", T.cast(rows[0][token, j, col], "float32"), saved[1][token, j], total
                        )
                outputs[2][token, col] = T.cast(total, "bfloat16")
        token += num_parts
        turn += 1


@kernel(axes=grid(form=forms(*_BACKWARD, "general")), pass_configs=_PASS_CONFIGS)
def engram_gate_bwd(form):
    """Write the gradients of hidden_states, k and v, and parts of that of weight_fused, to be summed over their rows.

    dot, gate_score, rstd_x and rstd_k are what engram_gate_fwd saved. The rows of grad_w_partial say how many blocks
    share the tokens of a stream; all are written. For tokens in image_token_mask grad_out is passed on.
    """
    num_tokens, hidden, num_parts = T.dynamic("num_tokens"), T.dynamic("hidden"), T.dynamic("num_parts")
    k_strides = T.dynamic("k_token_stride", "int64"), T.dynamic("k_stream_stride", "int64"), 1
    grad_k_strides = T.dynamic("grad_k_token_stride", "int64"), T.dynamic("grad_k_stream_stride", "int64"), 1
    v_stride, grad_v_stride = T.dynamic("v_stride", "int64"), T.dynamic("grad_v_stride", "int64")
    ring, has_tokens = (None, False) if form == "general" else _backward_ring(form)
    threads = _GENERAL_THREADS if form == "general" else ring.threads
    rows, numbers = (num_tokens, _STREAMS, hidden), (num_tokens, _STREAMS)

    @T.prim_func
    def main(
        grad_out: T.Tensor(rows, "bfloat16"),
        hidden_states: T.Tensor(rows, "bfloat16"),
        k: T.StridedTensor(rows, k_strides, "bfloat16"),
        v: T.StridedTensor((num_tokens, hidden), (v_stride, 1), "bfloat16"),
        weight_fused: T.Tensor((_STREAMS, hidden), "float32"),
        dot: T.Tensor(numbers, "float32"),
        gate_score: T.Tensor(numbers, "float32"),
        rstd_x: T.Tensor(numbers, "float32"),
        rstd_k: T.Tensor(numbers, "float32"),
        image_token_mask: T.Tensor((num_tokens,), "bool"),
        grad_hidden_states: T.Tensor(rows, "bfloat16"),
        grad_k: T.StridedTensor(rows, grad_k_strides, "bfloat16"),
        grad_v: T.StridedTensor((num_tokens, hidden), (grad_v_stride, 1), "bfloat16"),
        grad_w_partial: T.Tensor((num_parts, _STREAMS, hidden), "float32"),
        clamp_value: T.float32,
    ):
        T.assume(hidden % 256 == 0)
        T.assume(hidden >= 512)
        T.assume(num_parts > 0)
        if form != "general":
            T.assume(hidden <= ring.capacity)
            T.assume(k_strides[0] % _CHANNELS == 0)
            T.assume(k_strides[1] % _CHANNELS == 0)
            T.assume(v_stride % _CHANNELS == 0)
            T.assume(grad_k_strides[0] % _CHANNELS == 0)
            T.assume(grad_k_strides[1] % _CHANNELS == 0)
            T.assume(grad_v_stride % _CHANNELS == 0)
        with T.Kernel(num_parts * (1 if has_tokens else _STREAMS), threads=threads) as block:
            if has_tokens:
                _backward_by_tokens(
                    (grad_out, hidden_states, k, v), weight_fused, image_token_mask,
                    (dot, gate_score, rstd_x, rstd_k), (grad_hidden_states, grad_k, grad_v), grad_w_partial,
                    block, num_tokens, num_parts, (hidden, clamp_value), ring,
                )  # fmt: skip
            elif form == "general":
                _backward_general(
                    (grad_out, hidden_states, k, v), weight_fused, image_token_mask,
                    (dot, gate_score, rstd_x, rstd_k), (grad_hidden_states, grad_k, grad_v), grad_w_partial,
                    block, num_tokens, num_parts, (hidden, clamp_value),
                )  # fmt: skip
            else:
                _backward_by_ring(
                    (grad_out, hidden_states, k, v), weight_fused, image_token_mask,
                    (dot, gate_score, rstd_x, rstd_k), (grad_hidden_states, grad_k, grad_v), grad_w_partial,
                    block, num_tokens, num_parts, (hidden, clamp_value), ring,
                )  # fmt: skip

    return main
