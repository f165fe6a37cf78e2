"""FP4 with scales that are powers of two, re-encoded without loss as FP8 with a scale for each larger block.

Tiles: a block of threads takes 128 x 128 channels, and a thread 16 channels of four tokens with their own exponents;
the largest goes over the lanes of a block, the tokens of a warp and, for blocks of more tokens, through shared memory.
Other blocks and addresses take two launches: the scales, a warp for each, then the data channel by channel.
"""

import tilelang.language as T

from ..common.casting import divide, exact_log2, load_row, load_scale, scale_kind, store_row, store_scales
from ..common.device import include
from ..declare import forms, grid, kernel

_TILE = 128
_WARP_ROWS = 16
_THREADS = 256
_CHANNELS = 16
_ACROSS = _TILE // _CHANNELS  # lanes of a token
_DOWN = 32 // _ACROSS  # tokens of a warp at a time
_TOKENS = _WARP_ROWS // _DOWN

_KINDS = ("float32", "int32")


def _num_sf_columns(hidden, block_cols, kind):
    return T.ceildiv(hidden, block_cols * T.if_then_else(kind == 1, 4, 1))


def _exponent_of(bits, kind):
    return T.call_extern("uint32", "tk::exponent_of", bits, kind)


def _block_exponent(most):
    return T.call_extern("int32", "tk::block_exponent", most)


def _scale_of_exponent(exponent):
    return T.call_extern("float32", "tk::scale_of_exponent", exponent)


# ---- tiles -----------------------------------------------------------------------------------------------------------


@T.macro
def _load_exponents(
    most, first_row, x_chunk, num_tokens, x_sf, x_sf_strides, x_block_rows, x_block_cols, x_sf_kind
):  # fmt: skip
    column = divide(x_chunk * _CHANNELS, x_block_cols)
    for token in T.unroll(_TOKENS):
        row = T.min(first_row + token * _DOWN, num_tokens - 1)
        most[token] = load_scale(x_sf, x_sf_strides, divide(row, x_block_rows), column, x_sf_kind)
    for token in T.unroll(_TOKENS):
        most[token] = _exponent_of(most[token], x_sf_kind)


@T.macro
def _find_largest(most, shared, out_block_rows, out_block_cols):
    """most[token] = the largest exponent of the token's block."""
    thread = T.get_thread_binding()
    warp = thread // 32
    T.call_extern("handle", "tk::share_exponents", T.address_of(most[0]), out_block_rows, out_block_cols)
    if out_block_rows > _WARP_ROWS:
        if thread % 32 < _ACROSS:
            shared[warp, thread % _ACROSS] = most[0]
        T.sync_threads()
        for other in T.unroll(_THREADS // 32):
            first = T.bitwise_and(warp * _WARP_ROWS, -out_block_rows)
            if first <= other * _WARP_ROWS and other * _WARP_ROWS < first + out_block_rows:
                most[0] = T.max(most[0], shared[other, thread % _ACROSS])
        for token in T.unroll(_TOKENS - 1):
            most[token + 1] = most[0]


@T.macro
def _store_tile_scales(
    exponents, scale, out_sf, out_sf_strides, num_out_sf_rows, num_out_sf_columns, first_row, chunk, hidden,
    out_block_rows, out_block_cols, out_sf_kind,
):  # fmt: skip
    """The first thread of each block stores; bytes of a packed word beyond the last block become 0."""
    column = chunk * _CHANNELS
    if T.bitwise_and(column, out_block_cols - 1) == 0:
        group = T.shift_right(column, exact_log2(out_block_cols))
        for token in T.unroll(_TOKENS):
            row = first_row + token * _DOWN
            if T.bitwise_and(row, out_block_rows - 1) == 0:
                sf_row = T.shift_right(row, exact_log2(out_block_rows))
                scale[0] = T.Select(column < hidden, _scale_of_exponent(exponents[token]), T.float32(0))
                store_scales(
                    1, out_sf, out_sf_strides, num_out_sf_columns, sf_row, 0, num_out_sf_rows, group, out_sf_kind,
                    scale,
                )  # fmt: skip
                if out_sf_kind == 1 and column < hidden and column + out_block_cols >= hidden:
                    scale[0] = T.float32(0)
                    for i in T.serial(3 - T.bitwise_and(group, 3)):
                        store_scales(
                            1, out_sf, out_sf_strides, num_out_sf_columns, sf_row, 0, num_out_sf_rows, group + 1 + i,
                            out_sf_kind, scale,
                        )  # fmt: skip


# ---- any block -------------------------------------------------------------------------------------------------------


@T.macro
def _write_block_scale(
    block, x_sf, x_sf_strides, out_sf, out_sf_strides, num_x_rows, num_x_columns, num_out_sf_rows, num_out_sf_columns,
    num_out_columns, rows_ratio, cols_ratio, x_sf_kind, out_sf_kind,
):  # fmt: skip
    """The scale of one block by one warp; of columns that only fill a packed word it is 0."""
    include("lossless.cuh")
    lane = T.get_thread_binding()
    most = T.alloc_local((1,), "uint32")
    scale = T.alloc_local((1,), "float32")
    row = T.alloc_var("int32")
    column = T.alloc_var("int32")
    x_column = T.alloc_var("int32")
    row = T.truncdiv(block, num_out_columns)
    column = T.truncmod(block, num_out_columns)
    most[0] = T.uint32(0)
    for x_row in T.serial(T.min(rows_ratio, num_x_rows - row * rows_ratio)):
        for i in T.serial(T.ceildiv(cols_ratio, 32)):
            x_column = column * cols_ratio + i * 32 + lane
            if i * 32 + lane < cols_ratio and x_column < num_x_columns:
                bits = load_scale(x_sf, x_sf_strides, row * rows_ratio + x_row, x_column, x_sf_kind)
                most[0] = T.max(most[0], _exponent_of(bits, x_sf_kind))
    most[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(0xFFFFFFFF), most[0])
    scale[0] = T.Select(column * cols_ratio < num_x_columns, _scale_of_exponent(_block_exponent(most[0])), T.float32(0))
    if lane == 0:
        store_scales(1, out_sf, out_sf_strides, num_out_sf_columns, row, 0, num_out_sf_rows, column, out_sf_kind, scale)


@T.macro
def _convert_pair(
    x, x_sf, x_sf_strides, out, out_sf, out_sf_strides, row, pair, x_block_rows, x_block_cols, out_block_rows,
    out_block_cols, x_sf_kind, out_sf_kind,
):  # fmt: skip
    """The two channels of one byte."""
    code = T.alloc_var("uint32")
    power = T.alloc_var("int32")
    x_bits = T.alloc_var("uint32")
    out_bits = T.alloc_var("uint32")
    for i in T.unroll(2):
        x_column = divide(pair * 2 + i, x_block_cols)
        out_column = divide(pair * 2 + i, out_block_cols)
        x_bits = load_scale(x_sf, x_sf_strides, divide(row, x_block_rows), x_column, x_sf_kind)
        out_bits = load_scale(out_sf, out_sf_strides, divide(row, out_block_rows), out_column, out_sf_kind)
        power = T.cast(_exponent_of(x_bits, x_sf_kind), "int32") - T.cast(_exponent_of(out_bits, out_sf_kind), "int32")
        code = T.bitwise_and(T.shift_right(T.cast(x[row, pair], "uint32"), T.uint32(4 * i)), T.uint32(15))
        out[row, pair * 2 + i] = T.cast(T.call_extern("uint32", "tk::convert_e2m1_code", code, power), "uint8")


@kernel(
    axes=grid(form=forms("aligned", "general")),
    accepts={"x": ("int8",), "x_sf": _KINDS, "out": ("float8_e4m3fn",), "out_sf": _KINDS},
    derived={"x_sf_kind": scale_kind("x_sf"), "out_sf_kind": scale_kind("out_sf")},
    pass_configs={
        "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
        "tl.disable_buffer_init_check": True,  # it does not see what helpers write
    },
)
def per_block_cast_lossless(form):
    """Re-encode x, packed e2m1 with the powers of two x_sf, as e4m3 with a scale for each larger block in out_sf."""
    num_tokens, width = T.dynamic("num_tokens"), T.dynamic("width")
    num_x_sf_rows, num_x_sf_columns = T.dynamic("num_x_sf_rows"), T.dynamic("num_x_sf_columns")
    num_out_sf_rows, num_out_sf_columns = T.dynamic("num_out_sf_rows"), T.dynamic("num_out_sf_columns")
    x_stride = T.dynamic("x_stride", "int64")
    x_sf_strides = T.dynamic("x_sf_row_stride", "int64"), T.dynamic("x_sf_column_stride", "int64")
    out_sf_strides = T.dynamic("out_sf_row_stride", "int64"), T.dynamic("out_sf_column_stride", "int64")
    hidden = width * 2

    @T.prim_func
    def main(
        x: T.StridedTensor((num_tokens, width), (x_stride, 1), "uint8"),
        x_sf: T.StridedTensor((num_x_sf_rows, num_x_sf_columns), x_sf_strides, "uint8"),
        out: T.Tensor((num_tokens, width * 2), "uint8"),
        out_sf: T.StridedTensor((num_out_sf_rows, num_out_sf_columns), out_sf_strides, "uint8"),
        x_block_rows: T.int32,
        x_block_cols: T.int32,
        out_block_rows: T.int32,
        out_block_cols: T.int32,
        x_sf_kind: T.int32,
        out_sf_kind: T.int32,
    ):
        T.assume(x_block_rows > 0)
        T.assume(x_block_cols > 0)
        T.assume(out_block_rows > 0)
        T.assume(out_block_cols > 0)
        T.assume(out_block_rows % x_block_rows == 0)
        T.assume(out_block_cols % x_block_cols == 0)
        T.assume(width % 16 == 0)
        T.assume(T.ceildiv(num_tokens, x_block_rows) == num_x_sf_rows)
        T.assume(_num_sf_columns(hidden, x_block_cols, x_sf_kind) == num_x_sf_columns)
        T.assume(T.ceildiv(num_tokens, out_block_rows) == num_out_sf_rows)
        T.assume(_num_sf_columns(hidden, out_block_cols, out_sf_kind) == num_out_sf_columns)
        if form == "aligned":
            T.assume(_TILE % out_block_rows == 0)
            T.assume(_TILE % out_block_cols == 0)
            T.assume(x_block_cols % _CHANNELS == 0)
            T.assume(x_stride % (_CHANNELS // 2) == 0)
            with T.Kernel(T.ceildiv(hidden, _TILE) * T.ceildiv(num_tokens, _TILE), threads=_THREADS) as block:
                include("lossless.cuh")
                source = T.alloc_local((_TOKENS * _CHANNELS // 2,), "uint8")
                target = T.alloc_local((_CHANNELS,), "uint8")
                own = T.alloc_local((_TOKENS,), "uint32")
                most = T.alloc_local((_TOKENS,), "uint32")
                exponents = T.alloc_local((_TOKENS,), "int32")
                scale = T.alloc_local((1,), "float32")
                shared = T.alloc_shared((_THREADS // 32, _ACROSS), "uint32")
                tile_row = T.alloc_var("int32")
                tile_col = T.alloc_var("int32")
                tile_row = T.truncdiv(block, T.ceildiv(hidden, _TILE))
                tile_col = T.truncmod(block, T.ceildiv(hidden, _TILE))
                thread = T.get_thread_binding()
                first_row = tile_row * _TILE + thread // 32 * _WARP_ROWS + thread % 32 // _ACROSS
                chunk = tile_col * _ACROSS + thread % _ACROSS
                # Instead of what is beyond the matrix its last channels and tokens are read, and nothing is written
                x_chunk = T.min(chunk, T.truncdiv(width, _CHANNELS // 2) - 1)
                for token in T.unroll(_TOKENS):
                    own[token] = T.uint32(0)
                if first_row < num_tokens:
                    _load_exponents(
                        own, first_row, x_chunk, num_tokens, x_sf, x_sf_strides, x_block_rows, x_block_cols, x_sf_kind
                    )
                    for token in T.unroll(_TOKENS):
                        row = T.min(first_row + token * _DOWN, num_tokens - 1)
                        load_row(x, row, x_chunk, _CHANNELS // 2, _CHANNELS // 2, source, token * _CHANNELS // 2)
                for token in T.unroll(_TOKENS):
                    most[token] = own[token]
                _find_largest(most, shared, out_block_rows, out_block_cols)
                for token in T.unroll(_TOKENS):
                    exponents[token] = _block_exponent(most[token])
                _store_tile_scales(
                    exponents, scale, out_sf, out_sf_strides, num_out_sf_rows, num_out_sf_columns, first_row, chunk,
                    hidden, out_block_rows, out_block_cols, out_sf_kind,
                )  # fmt: skip
                if chunk * _CHANNELS < hidden:
                    for token in T.unroll(_TOKENS):
                        row = first_row + token * _DOWN
                        if row < num_tokens:
                            T.call_extern(
                                "handle",
                                f"tk::convert_e2m1_by_power<{_CHANNELS}>",
                                T.address_of(source[token * _CHANNELS // 2]),
                                T.address_of(target[0]),
                                T.cast(own[token], "int32") - exponents[token],
                            )
                            store_row(target, out, row, chunk, _CHANNELS, _CHANNELS)
        else:
            num_out_columns = num_out_sf_columns * T.if_then_else(out_sf_kind == 1, 4, 1)
            with T.Kernel(num_out_sf_rows * num_out_columns, threads=32) as block:
                _write_block_scale(
                    block, x_sf, x_sf_strides, out_sf, out_sf_strides, num_x_sf_rows, T.ceildiv(hidden, x_block_cols),
                    num_out_sf_rows, num_out_sf_columns, num_out_columns, T.truncdiv(out_block_rows, x_block_rows),
                    T.truncdiv(out_block_cols, x_block_cols), x_sf_kind, out_sf_kind,
                )  # fmt: skip
            with T.Kernel(num_tokens * T.ceildiv(width, _THREADS), threads=_THREADS) as block:
                include("lossless.cuh")
                row = T.alloc_var("int32")
                pair = T.alloc_var("int32")
                row = T.truncdiv(block, T.ceildiv(width, _THREADS))
                pair = T.truncmod(block, T.ceildiv(width, _THREADS)) * _THREADS + T.get_thread_binding()
                if pair < width:
                    _convert_pair(
                        x, x_sf, x_sf_strides, out, out_sf, out_sf_strides, row, pair, x_block_rows, x_block_cols,
                        out_block_rows, out_block_cols, x_sf_kind, out_sf_kind,
                    )  # fmt: skip

    return main
