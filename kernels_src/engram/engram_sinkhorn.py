"""The optimiser of the embedding tables: a momentum step, then norms of a large matrix's rows and columns in turns.

Only two vectors of scales are kept, so that each step reads the matrix once. A warp takes whole rows, several at a time
where they are short, and keeps the scales (and the sums) of its columns in registers. Forms differ in the columns that
a warp holds; the last one takes any width and address, and reads rows twice.
"""

import tilelang.language as T

from ..declare import dtype_of, forms, grid, kernel

_PASS_CONFIGS = {
    "tl.disable_safe_memory_legalize": True,  # bounds are tested by hand
    "tl.disable_buffer_init_check": True,  # rows are loaded and used under the same test
    "tl.disable_thread_storage_sync": True,  # barriers are set by hand
}

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}

_WARP = 32
_WARPS = 8
_THREADS = _WARP * _WARPS
_PIECE = _WARP * 4  # columns that the lanes of a warp hold in 16 bytes each
_IN_FLIGHT = 8  # pieces of a warp

# Form -> pieces of a row
_PIECES = {"c256": 2, "c512": 4, "c1024": 8}
# Callers ask for three times as many blocks of engram_sinkhorn_step as there are multiprocessors, and all are to run at
# a time: warps of a block
_STEP_BLOCKS = 3
_STEP_WARPS = {"c256": 8, "c512": 8, "c1024": 4, "general": 8}


def _fma(x, y, z):
    return T.call_extern("float32", "__fmaf_rn", x, y, z)


def _mul(x, y):
    return T.call_extern("float32", "__fmul_rn", x, y)


def _sqrt(x):
    return T.call_extern("float32", "__fsqrt_rn", x)


def _div(x, y):
    return T.call_extern("float32", "__fdiv_rn", x, y)


# ---- momentum --------------------------------------------------------------------------------------------------------


@kernel(
    axes=grid(
        kind=dtype_of("grad", **_DTYPES),
        momentum=dtype_of("momentum_buffer", **_DTYPES),
        form=forms("aligned", "general"),
    ),
    pass_configs=_PASS_CONFIGS,
)
def engram_sinkhorn_momentum_update(kind, momentum, form):
    """Write m = fma(momentum_buffer, beta1, (1 - beta1) * grad) back, and m, or with nesterov one step beyond, to out.

    beta1 and 1 - beta1 are rounded to fp32 each, m is only where it is stored.
    """
    # 16 bytes of the wider of the two
    count = (8 if kind == momentum == "bf16" else 4) if form == "aligned" else 1
    size = T.dynamic("size", "int64")

    @T.prim_func
    def main(
        grad: T.Tensor((size,), _DTYPES[kind]),
        momentum_buffer: T.Tensor((size,), _DTYPES[momentum]),
        out: T.Tensor((size,), "float32"),
        beta1: T.float64,
        nesterov: T.bool,
    ):
        T.assume(size % 256 == 0)
        T.assume(size <= (1 << 39))
        with T.Kernel(T.ceildiv(size, _THREADS * count), threads=_THREADS) as block:
            grads = T.alloc_local((count,), _DTYPES[kind])
            moments = T.alloc_local((count,), _DTYPES[momentum])
            results = T.alloc_local((count,), "float32")
            decay = T.alloc_var("float32")
            share = T.alloc_var("float32")
            decay = T.cast(beta1, "float32")
            share = T.cast(T.float64(1) - beta1, "float32")
            chunk = T.cast(block, "int64") * _THREADS + T.get_thread_binding()
            if chunk * count < size:
                for i in T.vectorized(count):
                    grads[i] = grad[chunk * count + i]
                for i in T.vectorized(count):
                    moments[i] = momentum_buffer[chunk * count + i]
                for i in T.unroll(count):
                    update = _fma(T.cast(moments[i], "float32"), decay, _mul(share, T.cast(grads[i], "float32")))
                    results[i] = update
                    moments[i] = T.cast(results[i], _DTYPES[momentum])
                    if nesterov:
                        results[i] = _fma(T.cast(grads[i], "float32"), share, _mul(decay, results[i]))
                for i in T.vectorized(count):
                    momentum_buffer[chunk * count + i] = moments[i]
                for j in T.unroll(max(count // 4, 1)):
                    for i in T.vectorized(min(count, 4)):
                        out[chunk * count + j * 4 + i] = results[j * 4 + i]

    return main


# ---- rows ------------------------------------------------------------------------------------------------------------


@T.macro
def _load_columns(col_scale, scales, lane, num_cols, pieces):
    for piece in T.unroll(pieces):
        if piece * _PIECE < num_cols:
            for i in T.vectorized(4):
                scales[piece * 4 + i] = col_scale[(piece * _WARP + lane) * 4 + i]
        else:
            for i in T.vectorized(4):
                scales[piece * 4 + i] = T.float32(0)


@T.macro
def _load_rows(matrix, row_scale, values, row_scales, bounds, lane, num_cols, pieces, warps):
    """A warp's rows first, first + warps, ... below end; bounds: (first, end), in a tuple, because a macro renames the
    variables that it is given by themselves."""
    for row in T.unroll(_IN_FLIGHT // pieces):
        if bounds[0] + row * warps < bounds[1]:
            row_scales[row] = row_scale[bounds[0] + row * warps]
            for piece in T.unroll(pieces):
                if piece * _PIECE < num_cols:
                    for i in T.vectorized(4):
                        values[(row * pieces + piece) * 4 + i] = matrix[
                            bounds[0] + row * warps, (piece * _WARP + lane) * 4 + i
                        ]
                else:
                    for i in T.vectorized(4):
                        values[(row * pieces + piece) * 4 + i] = T.float32(0)


@T.macro
def _scale_row(values, row_scales, scales, row, norm, pieces):
    """values = row_scale * values * col_scale for one row; norm[0] = the root of its sum of squares."""
    norm[0] = T.float32(0)
    for i in T.unroll(pieces * 4):
        values[row * pieces * 4 + i] = _mul(_mul(row_scales[row], values[row * pieces * 4 + i]), scales[i])
        norm[0] = _fma(values[row * pieces * 4 + i], values[row * pieces * 4 + i], norm[0])
    for i in T.unroll(5):
        norm[0] += T.shfl_xor(norm[0], 1 << i)
    norm[0] = _sqrt(norm[0])


@T.macro
def _norm_of_row(matrix, row_scale, col_scale, row, num_cols, norm, shared):
    """The same of a row by a block, element by element."""
    thread = T.get_thread_binding()
    value = T.alloc_var("float32")
    norm[0] = T.float32(0)
    for i in T.serial(T.truncdiv(num_cols, _THREADS)):
        value = _mul(_mul(row_scale, matrix[row, i * _THREADS + thread]), col_scale[i * _THREADS + thread])
        norm[0] = _fma(value, value, norm[0])
    for i in T.unroll(5):
        norm[0] += T.shfl_xor(norm[0], 1 << i)
    T.sync_threads()  # the sums of the row before have been read
    if thread % _WARP == 0:
        shared[thread // _WARP] = norm[0]
    T.sync_threads()
    norm[0] = shared[0]
    for i in T.unroll(_WARPS - 1):
        norm[0] += shared[i + 1]
    norm[0] = _sqrt(norm[0])


@kernel(axes=grid(form=forms(*_PIECES, "general")), pass_configs=_PASS_CONFIGS)
def engram_sinkhorn_step(form):
    """Write the norm of each row of x = row_scale * matrix * col_scale to row_norm, divide row_scale by norm + eps, and
    write sums over rows of the squares of x / (norm + eps) to col_sumsq_partial.

    The rows of col_sumsq_partial say how many blocks share the matrix's rows; all are written.
    """
    num_rows, num_cols, num_workers = T.dynamic("num_rows"), T.dynamic("num_cols"), T.dynamic("num_workers")
    pieces, warps = _PIECES.get(form, 0), _STEP_WARPS[form]
    threads = warps * _WARP

    @T.prim_func
    def main(
        matrix: T.Tensor((num_rows, num_cols), "float32"),
        row_scale: T.Tensor((num_rows,), "float32"),
        col_scale: T.Tensor((num_cols,), "float32"),
        row_norm: T.Tensor((num_rows,), "float32"),
        col_sumsq_partial: T.Tensor((num_workers, num_cols), "float32"),
        eps: T.float32,
    ):
        T.assume(num_cols % 256 == 0)
        if form != "general":
            T.assume(num_cols <= pieces * _PIECE)
        with T.Kernel(num_workers, threads=threads) as block:
            norm = T.alloc_local((1,), "float32")
            inverse = T.alloc_var("float32")
            scaled = T.alloc_var("float32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            share = T.alloc_var("int32")
            thread = T.get_thread_binding()
            lane = thread % _WARP
            warp = thread // _WARP
            share = T.ceildiv(num_rows, num_workers)
            first = T.min(block * share, num_rows)
            end = T.min(first + share, num_rows)
            if form == "general":
                shared = T.alloc_shared((_WARPS,), "float32")
                for i in T.serial(T.truncdiv(num_cols, threads)):
                    col_sumsq_partial[block, i * threads + thread] = T.float32(0)
                while first < end:
                    scaled = row_scale[first]
                    _norm_of_row(matrix, scaled, col_scale, first, num_cols, norm, shared)
                    inverse = _div(T.float32(1), norm[0] + eps)
                    # Behind the barriers: all threads have read the old one
                    if thread == 0:
                        row_norm[first] = norm[0]
                        row_scale[first] = _mul(scaled, inverse)
                    for i in T.serial(T.truncdiv(num_cols, threads)):
                        col = i * threads + thread
                        part = _mul(_mul(_mul(scaled, matrix[first, col]), col_scale[col]), inverse)
                        col_sumsq_partial[block, col] = _fma(part, part, col_sumsq_partial[block, col])
                    first += 1
            else:
                T.annotate_min_blocks_per_sm(_STEP_BLOCKS)
                sums_of_warps = T.alloc_shared((warps, pieces * _PIECE), "float32")
                values = T.alloc_local((_IN_FLIGHT * 4,), "float32")
                row_scales = T.alloc_local((_IN_FLIGHT // pieces,), "float32")
                scales = T.alloc_local((pieces * 4,), "float32")
                sums = T.alloc_local((pieces * 4,), "float32")
                _load_columns(col_scale, scales, lane, num_cols, pieces)
                for i in T.unroll(pieces * 4):
                    sums[i] = T.float32(0)
                first += warp
                while first < end:
                    _load_rows(matrix, row_scale, values, row_scales, (first, end), lane, num_cols, pieces, warps)
                    for row in T.unroll(_IN_FLIGHT // pieces):
                        if first + row * warps < end:
                            _scale_row(values, row_scales, scales, row, norm, pieces)
                            inverse = _div(T.float32(1), norm[0] + eps)
                            if lane == 0:
                                row_norm[first + row * warps] = norm[0]
                                row_scale[first + row * warps] = _mul(row_scales[row], inverse)
                            for i in T.unroll(pieces * 4):
                                scaled = _mul(values[row * pieces * 4 + i], inverse)
                                sums[i] = _fma(scaled, scaled, sums[i])
                    first += _IN_FLIGHT // pieces * warps
                for piece in T.unroll(pieces):
                    for i in T.vectorized(4):
                        sums_of_warps[warp, (piece * _WARP + lane) * 4 + i] = sums[piece * 4 + i]
                T.sync_threads()
                for i in T.serial(T.truncdiv(num_cols, threads)):
                    scaled = sums_of_warps[0, i * threads + thread]
                    for j in T.unroll(warps - 1):
                        scaled += sums_of_warps[j + 1, i * threads + thread]
                    col_sumsq_partial[block, i * threads + thread] = scaled

    return main


@kernel(axes=grid(form=forms(*_PIECES, "general")), pass_configs=_PASS_CONFIGS)
def engram_sinkhorn_finalize(form):
    """Write x * (alpha / (norm + eps)) to out, where x = row_scale * matrix * col_scale and norm is that of its row.

    out may be matrix.
    """
    num_rows, num_cols = T.dynamic("num_rows"), T.dynamic("num_cols")
    pieces = _PIECES.get(form, 0)
    rows = 1 if form == "general" else _IN_FLIGHT // pieces * _WARPS

    @T.prim_func
    def main(
        matrix: T.Tensor((num_rows, num_cols), "float32"),
        row_scale: T.Tensor((num_rows,), "float32"),
        col_scale: T.Tensor((num_cols,), "float32"),
        out: T.Tensor((num_rows, num_cols), "float32"),
        eps: T.float32,
        alpha: T.float32,
    ):
        T.assume(num_cols % 256 == 0)
        if form != "general":
            T.assume(num_cols <= pieces * _PIECE)
        with T.Kernel(T.ceildiv(num_rows, rows), threads=_THREADS) as block:
            norm = T.alloc_local((1,), "float32")
            factor = T.alloc_var("float32")
            thread = T.get_thread_binding()
            lane = thread % _WARP
            first = block * rows + thread // _WARP
            if form == "general":
                shared = T.alloc_shared((_WARPS,), "float32")
                scaled = T.alloc_var("float32")
                scaled = row_scale[block]
                _norm_of_row(matrix, scaled, col_scale, block, num_cols, norm, shared)
                factor = _div(alpha, norm[0] + eps)
                for i in T.serial(T.truncdiv(num_cols, _THREADS)):
                    col = i * _THREADS + thread
                    out[block, col] = _mul(_mul(_mul(scaled, matrix[block, col]), col_scale[col]), factor)
            else:
                values = T.alloc_local((_IN_FLIGHT * 4,), "float32")
                row_scales = T.alloc_local((_IN_FLIGHT // pieces,), "float32")
                scales = T.alloc_local((pieces * 4,), "float32")
                _load_rows(matrix, row_scale, values, row_scales, (first, num_rows), lane, num_cols, pieces, _WARPS)
                _load_columns(col_scale, scales, lane, num_cols, pieces)
                for row in T.unroll(_IN_FLIGHT // pieces):
                    if first + row * _WARPS < num_rows:
                        _scale_row(values, row_scales, scales, row, norm, pieces)
                        factor = _div(alpha, norm[0] + eps)
                        for i in T.unroll(pieces * 4):
                            values[row * pieces * 4 + i] = _mul(values[row * pieces * 4 + i], factor)
                        for piece in T.unroll(pieces):
                            if piece * _PIECE < num_cols:
                                for i in T.vectorized(4):
                                    out[first + row * _WARPS, (piece * _WARP + lane) * 4 + i] = values[
                                        (row * pieces + piece) * 4 + i
                                    ]

    return main


@kernel(axes=grid(form=forms("aligned", "general")), pass_configs=_PASS_CONFIGS)
def engram_sinkhorn_step_reduce(form):
    """Write the sum over the rows of col_sumsq_partial to col_sumsq, in an order that their number alone decides."""
    size = 4 if form == "aligned" else 1
    num_workers, num_cols = T.dynamic("num_workers"), T.dynamic("num_cols")

    @T.prim_func
    def main(
        col_sumsq_partial: T.Tensor((num_workers, num_cols), "float32"),
        col_sumsq: T.Tensor((num_cols,), "float32"),
    ):
        T.assume(num_cols % 256 == 0)
        # A block has few columns, so that all of a narrow matrix's rows are read at the same time
        with T.Kernel(T.ceildiv(num_cols, 8 * size), threads=_THREADS) as block:
            sums_of_parts = T.alloc_shared((_THREADS // 8, 8 * size), "float32")
            sums = T.alloc_local((size,), "float32")
            rows = T.alloc_local((_IN_FLIGHT * size,), "float32")
            row = T.alloc_var("int32")
            total = T.alloc_var("float32")
            thread = T.get_thread_binding()
            chunk = block * 8 + thread % 8
            row = thread // 8
            for i in T.unroll(size):
                sums[i] = T.float32(0)
            while row < num_workers:
                for j in T.unroll(_IN_FLIGHT):
                    if row + j * (_THREADS // 8) < num_workers:
                        for i in T.vectorized(size):
                            rows[j * size + i] = col_sumsq_partial[row + j * (_THREADS // 8), chunk * size + i]
                for j in T.unroll(_IN_FLIGHT):
                    if row + j * (_THREADS // 8) < num_workers:
                        for i in T.unroll(size):
                            sums[i] += rows[j * size + i]
                row += _IN_FLIGHT * (_THREADS // 8)
            for i in T.vectorized(size):
                sums_of_parts[thread // 8, thread % 8 * size + i] = sums[i]
            T.sync_threads()
            if thread < 8 * size:
                total = sums_of_parts[0, thread]
                for j in T.unroll(_THREADS // 8 - 1):
                    total += sums_of_parts[j + 1, thread]
                col_sumsq[block * 8 * size + thread] = total

    return main
