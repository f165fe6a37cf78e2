"""Rotary position embedding in place.

A thread keeps its columns and its token, and so its cosines and sines, and takes some heads; lanes are neighbouring
pieces of a head, then neighbouring heads. Both halves of a pair are read before either is written.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import dtype_of, forms, grid, kernel

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_DEVICE_TYPES = {"bf16": "__nv_bfloat16", "fp32": "float"}

_THREADS = 128
_HEADS = 2  # of a thread, both in flight; four are 2 to 6 % slower


def _num_blocks(num_tokens, num_heads, dim, pairs):
    return T.ceildiv(num_tokens * T.ceildiv(num_heads, _HEADS) * T.truncdiv(dim, 2 * pairs), _THREADS)


@T.macro
def _load_angles(cos_sin_cache, angles, row, first, second, half_pieces, pairs, vector):
    """angles = the cosines, then the sines of a thread's pairs; rows outside of the cache are zero.

    first, second: where the two halves of the pairs start, in units of half of them."""
    for i in T.unroll(2 * pairs):
        angles[i] = T.float32(0)
    if row >= 0 and row < cos_sin_cache.shape[0]:
        for i in T.unroll(pairs // 2 // vector):
            for j in T.vectorized(vector):
                angles[i * vector + j] = cos_sin_cache[row, first * (pairs // 2) + i * vector + j]
        for i in T.unroll(pairs // 2 // vector):
            for j in T.vectorized(vector):
                angles[pairs // 2 + i * vector + j] = cos_sin_cache[row, second * (pairs // 2) + i * vector + j]
        for i in T.unroll(pairs // 2 // vector):
            for j in T.vectorized(vector):
                angles[pairs + i * vector + j] = cos_sin_cache[
                    row, (2 * half_pieces + first) * (pairs // 2) + i * vector + j
                ]
        for i in T.unroll(pairs // 2 // vector):
            for j in T.vectorized(vector):
                angles[pairs + pairs // 2 + i * vector + j] = cos_sin_cache[
                    row, (2 * half_pieces + second) * (pairs // 2) + i * vector + j
                ]


@T.macro
def _load_heads(x, values, batch, token, head, counts, piece, half_pieces, pairs, vector):
    """The thread's heads: head, head + num_groups, ..., and of each a piece of both halves.

    counts: (heads, num_groups), in a tuple, because a macro renames the variables that it is given by themselves."""
    for i in T.unroll(_HEADS):
        if head + i * counts[1] < counts[0]:
            for j in T.unroll(pairs // vector):
                for k in T.vectorized(vector):
                    values[i * 2 * pairs + j * vector + k] = x[
                        batch, token, head + i * counts[1], piece * pairs + j * vector + k
                    ]
            for j in T.unroll(pairs // vector):
                for k in T.vectorized(vector):
                    values[i * 2 * pairs + pairs + j * vector + k] = x[
                        batch, token, head + i * counts[1], (half_pieces + piece) * pairs + j * vector + k
                    ]


@T.macro
def _rotate_heads(values, angles, conjugate, kind, interleaved, pairs):
    for i in T.unroll(_HEADS):
        T.call_extern(
            "handle",
            f"tk::rotate<{_DEVICE_TYPES[kind]}, {interleaved}, {pairs}>",
            T.address_of(values[i * 2 * pairs]),
            T.address_of(angles[0]),
            conjugate,
        )


@T.macro
def _store_heads(values, x, batch, token, head, counts, piece, half_pieces, pairs, vector):
    for i in T.unroll(_HEADS):
        if head + i * counts[1] < counts[0]:
            for j in T.unroll(pairs // vector):
                for k in T.vectorized(vector):
                    x[batch, token, head + i * counts[1], piece * pairs + j * vector + k] = values[
                        i * 2 * pairs + j * vector + k
                    ]
            for j in T.unroll(pairs // vector):
                for k in T.vectorized(vector):
                    x[batch, token, head + i * counts[1], (half_pieces + piece) * pairs + j * vector + k] = values[
                        i * 2 * pairs + pairs + j * vector + k
                    ]


@T.macro
def _rotate_block(x, cos_sin_cache, positions, block, sizes, flags, position_stride, kind, pairs, vectors):
    """One block's share of query or key. sizes: (num_batches, num_tokens, heads of x, dim); flags: (interleaved,
    conjugate, seqlen_offset, has_long_positions)."""
    angles = T.alloc_local((2 * pairs,), "float32")
    values = T.alloc_local((_HEADS * 2 * pairs,), _DTYPES[kind])
    half_pieces = T.alloc_var("int32")
    num_groups = T.alloc_var("int32")
    item = T.alloc_var("int32")
    piece = T.alloc_var("int32")
    first = T.alloc_var("int32")
    second = T.alloc_var("int32")
    head = T.alloc_var("int32")
    token = T.alloc_var("int32")
    batch = T.alloc_var("int32")
    row = T.alloc_var("int64")
    half_pieces = T.truncdiv(sizes[3], 2 * pairs)
    num_groups = T.ceildiv(sizes[2], _HEADS)
    item = block * _THREADS + T.get_thread_binding()
    piece = T.bitwise_and(item, half_pieces - 1)
    item = T.truncdiv(item, half_pieces)
    token = T.truncdiv(item, num_groups)
    head = item - token * num_groups
    batch = 0
    if sizes[0] > 1:
        batch = T.truncdiv(token, sizes[1])
        token = token - batch * sizes[1]
    first = piece * 2
    second = piece * 2 + 1
    if flags[0]:
        first = piece
        second = half_pieces + piece
    if batch < sizes[0] and token < sizes[1]:
        row = T.cast(token, "int64")
        if not T.isnullptr(positions.data):
            row = T.call_extern(
                "int64",
                "tk::load_position",
                T.access_ptr(positions[0, 0], "r"),
                T.cast(batch, "int64") * position_stride + token,
                flags[3],
            )
        row += flags[2]
        # Heads before angles, which wait for the position
        _load_heads(x, values, batch, token, head, (sizes[2], num_groups), piece, half_pieces, pairs, vectors[0])
        _load_angles(cos_sin_cache, angles, row, first, second, half_pieces, pairs, vectors[1])
        if flags[0]:
            _rotate_heads(values, angles, flags[1], kind, "true", pairs)
        else:
            _rotate_heads(values, angles, flags[1], kind, "false", pairs)
        _store_heads(values, x, batch, token, head, (sizes[2], num_groups), piece, half_pieces, pairs, vectors[0])


@kernel(
    axes=grid(kind=dtype_of("query", **_DTYPES), form=forms("aligned", "general")),
    accepts={"positions": ("int32", "int64")},
    derived={"has_long_positions": "is_dtype(positions, int64)"},
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    },
)
def apply_rotary(kind, form):
    """Rotate the pairs of each head of query and key in place by the angles in row positions + seqlen_offset of
    cos_sin_cache.

    key may be null. Without positions the token's own number counts. Rows outside of the cache make zeros. A pair is a
    channel of each half, or two neighbours if interleaved; conjugate turns the other way.
    """
    pairs = {"bf16": 8, "fp32": 4}[kind]  # of a thread in a head: two pieces of 16 bytes
    vectors = (pairs, pairs // 2) if form == "aligned" else (1, 1)
    num_batches, num_tokens, dim = T.dynamic("num_batches"), T.dynamic("num_tokens"), T.dynamic("dim")
    num_heads, num_key_heads = T.dynamic("num_heads"), T.dynamic("num_key_heads")
    names = "batch", "token", "head"
    strides = tuple(T.dynamic(f"query_{name}_stride", "int64") for name in names)
    key_strides = tuple(T.dynamic(f"key_{name}_stride", "int64") for name in names)
    num_positions = T.dynamic("num_positions")
    cache_stride, position_stride = T.dynamic("cache_stride", "int64"), T.dynamic("position_stride", "int64")

    @T.prim_func
    def main(
        query: T.StridedTensor((num_batches, num_tokens, num_heads, dim), (*strides, 1), _DTYPES[kind]),
        key: T.StridedTensor((num_batches, num_tokens, num_key_heads, dim), (*key_strides, 1), _DTYPES[kind]),
        cos_sin_cache: T.StridedTensor((num_positions, dim), (cache_stride, 1), "float32"),
        positions: T.StridedTensor((num_batches, num_tokens), (position_stride, 1), "uint8"),
        interleaved: T.bool,
        conjugate: T.bool,
        seqlen_offset: T.int64,
        has_long_positions: T.bool,
    ):
        T.assume(T.Or(dim == 64, dim == 128))
        if form == "aligned":
            T.assume(strides[0] % vectors[0] == 0)
            T.assume(strides[1] % vectors[0] == 0)
            T.assume(strides[2] % vectors[0] == 0)
            T.assume(key_strides[0] % vectors[0] == 0)
            T.assume(key_strides[1] % vectors[0] == 0)
            T.assume(key_strides[2] % vectors[0] == 0)
            T.assume(cache_stride % vectors[1] == 0)
        num_query_blocks = _num_blocks(num_batches * num_tokens, num_heads, dim, pairs)
        num_key_blocks = _num_blocks(num_batches * num_tokens, num_key_heads, dim, pairs)
        with T.Kernel(num_query_blocks + num_key_blocks, threads=_THREADS) as block:
            include("rotary.cuh")
            flags = (interleaved, conjugate, seqlen_offset, has_long_positions)
            if block < num_query_blocks:
                _rotate_block(
                    query, cos_sin_cache, positions, block, (num_batches, num_tokens, num_heads, dim), flags,
                    position_stride, kind, pairs, vectors,
                )  # fmt: skip
            else:
                if not T.isnullptr(key.data):
                    _rotate_block(
                        key, cos_sin_cache, positions, block - num_query_blocks,
                        (num_batches, num_tokens, num_key_heads, dim), flags, position_stride, kind, pairs, vectors,
                    )  # fmt: skip

    return main
