"""The optimiser of the embedding tables: a momentum step, then norms of a large matrix's rows and columns in turns.

Only two vectors of scales are kept, so that each step reads the matrix once. A team, one warp or four, takes whole
rows, several at a time where they are short, and keeps the scales (and the sums) of its columns in registers. Forms
differ in the columns that a team holds; the last one takes any width and address, and reads rows twice.
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
_IN_FLIGHT = 8  # accesses of 16 bytes of a thread


class _Team:
    """The threads of a row, and the accesses of 16 bytes that each needs for it; teams of a block."""

    def __init__(self, warps: int, pieces: int, block_warps: int) -> None:
        self.warps, self.threads, self.pieces = warps, warps * _WARP, pieces
        self.width = self.threads * 4  # columns of a piece
        self.columns = pieces * self.width
        self.rows = _IN_FLIGHT // pieces
        self.teams = max(block_warps // warps, 1)


# Form -> warps of a team, pieces of a row
_TEAMS = {"c256": (1, 2), "c512": (1, 4), "c1024": (1, 8), "c2048": (4, 4), "c4096": (4, 8)}
# Callers ask for three times as many blocks of engram_sinkhorn_step as there are multiprocessors, and all are to run at
# a time. Four warps each leave registers for the rows that come next.
_STEP_BLOCKS, _STEP_WARPS = 3, 4


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
def _load_columns(col_scale, scales, lane, num_cols, team):
    for piece in T.unroll(team.pieces):
        if (piece * team.threads + lane) * 4 < num_cols:
            for i in T.vectorized(4):
                scales[piece * 4 + i] = col_scale[(piece * team.threads + lane) * 4 + i]
        else:
            for i in T.vectorized(4):
                scales[piece * 4 + i] = T.float32(0)


@T.macro
def _load_rows(matrix, row_scale, values, row_scales, bounds, lane, num_cols, team):
    """A team's rows first, first + teams, ... below end, zeros beyond; bounds: (first, end), in a tuple, because a
    macro renames the variables that it is given by themselves."""
    for row in T.unroll(team.rows):
        row_scales[row] = T.float32(0)
        if bounds[0] + row * team.teams < bounds[1]:
            row_scales[row] = row_scale[bounds[0] + row * team.teams]
        for piece in T.unroll(team.pieces):
            if bounds[0] + row * team.teams < bounds[1] and (piece * team.threads + lane) * 4 < num_cols:
                for i in T.vectorized(4):
                    values[(row * team.pieces + piece) * 4 + i] = matrix[
                        bounds[0] + row * team.teams, (piece * team.threads + lane) * 4 + i
                    ]
            else:
                for i in T.vectorized(4):
                    values[(row * team.pieces + piece) * 4 + i] = T.float32(0)


@T.macro
def _scale_rows(values, row_scales, scales, norms, shared, turn, team):
    """values = row_scale * values * col_scale, norms = the roots of the rows' sums of squares. Rows take their steps
    together, so that none waits for its own. shared: two sets of sums that a team of several warps uses in turns."""
    for row in T.unroll(team.rows):
        norms[row] = T.float32(0)
    for row in T.unroll(team.rows):
        for i in T.unroll(team.pieces * 4):
            at = row * team.pieces * 4 + i
            values[at] = _mul(_mul(row_scales[row], values[at]), scales[i])
            norms[row] = _fma(values[at], values[at], norms[row])
    for i in T.unroll(5):
        for row in T.unroll(team.rows):
            norms[row] += T.shfl_xor(norms[row], 1 << i)
    if team.warps > 1:
        thread = T.get_thread_binding()
        if thread % _WARP == 0:
            for row in T.unroll(team.rows):
                shared[turn % 2, row, thread // _WARP] = norms[row]
        T.sync_threads()
        for row in T.unroll(team.rows):
            norms[row] = shared[turn % 2, row, 0]
            for i in T.unroll(team.warps - 1):
                norms[row] += shared[turn % 2, row, i + 1]
    for row in T.unroll(team.rows):
        norms[row] = _sqrt(norms[row])


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


@kernel(axes=grid(form=forms(*_TEAMS, "general")), pass_configs=_PASS_CONFIGS)
def engram_sinkhorn_step(form):
    """Write the norm of each row of x = row_scale * matrix * col_scale to row_norm, divide row_scale by norm + eps, and
    write sums over rows of the squares of x / (norm + eps) to col_sumsq_partial.

    The rows of col_sumsq_partial say how many blocks share the matrix's rows; all are written.
    """
    num_rows, num_cols, num_workers = T.dynamic("num_rows"), T.dynamic("num_cols"), T.dynamic("num_workers")
    team = None if form == "general" else _Team(*_TEAMS[form], _STEP_WARPS)
    threads = _THREADS if form == "general" else _STEP_WARPS * _WARP

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
            T.assume(num_cols <= team.columns)
        with T.Kernel(num_workers, threads=threads) as block:
            inverse = T.alloc_var("float32")
            scaled = T.alloc_var("float32")
            first = T.alloc_var("int32")
            end = T.alloc_var("int32")
            share = T.alloc_var("int32")
            thread = T.get_thread_binding()
            share = T.ceildiv(num_rows, num_workers)
            first = T.min(block * share, num_rows)
            end = T.min(first + share, num_rows)
            if form == "general":
                norm = T.alloc_local((1,), "float32")
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
                values = T.alloc_local((_IN_FLIGHT * 4,), "float32")
                next_values = T.alloc_local((_IN_FLIGHT * 4,), "float32")
                row_scales = T.alloc_local((team.rows,), "float32")
                next_row_scales = T.alloc_local((team.rows,), "float32")
                norms = T.alloc_local((team.rows,), "float32")
                scales = T.alloc_local((team.pieces * 4,), "float32")
                sums = T.alloc_local((team.pieces * 4,), "float32")
                shared = T.alloc_shared((2, team.rows, team.warps), "float32")
                turn = T.alloc_var("int32")
                lane = thread % team.threads
                first += thread // team.threads
                turn = 0
                _load_rows(matrix, row_scale, next_values, next_row_scales, (first, end), lane, num_cols, team)
                _load_columns(col_scale, scales, lane, num_cols, team)
                for i in T.unroll(team.pieces * 4):
                    sums[i] = T.float32(0)
                while first < end:
                    for i in T.unroll(_IN_FLIGHT * 4):
                        values[i] = next_values[i]
                    for row in T.unroll(team.rows):
                        row_scales[row] = next_row_scales[row]
                    _load_rows(
                        matrix, row_scale, next_values, next_row_scales, (first + team.rows * team.teams, end), lane,
                        num_cols, team,
                    )  # fmt: skip
                    _scale_rows(values, row_scales, scales, norms, shared, turn, team)
                    for row in T.unroll(team.rows):
                        inverse = T.float32(0)
                        if first + row * team.teams < end:
                            inverse = _div(T.float32(1), norms[row] + eps)
                            if lane == 0:
                                row_norm[first + row * team.teams] = norms[row]
                                row_scale[first + row * team.teams] = _mul(row_scales[row], inverse)
                        for i in T.unroll(team.pieces * 4):
                            scaled = _mul(values[row * team.pieces * 4 + i], inverse)
                            sums[i] = _fma(scaled, scaled, sums[i])
                    first += team.rows * team.teams
                    turn += 1
                if team.warps == 1:
                    sums_of_teams = T.alloc_shared((team.teams, team.columns), "float32")
                    for piece in T.unroll(team.pieces):
                        for i in T.vectorized(4):
                            sums_of_teams[thread // _WARP, (piece * _WARP + lane) * 4 + i] = sums[piece * 4 + i]
                    T.sync_threads()
                    for i in T.serial(T.truncdiv(num_cols, threads)):
                        scaled = sums_of_teams[0, i * threads + thread]
                        for j in T.unroll(team.teams - 1):
                            scaled += sums_of_teams[j + 1, i * threads + thread]
                        col_sumsq_partial[block, i * threads + thread] = scaled
                else:
                    for piece in T.unroll(team.pieces):
                        if (piece * team.threads + lane) * 4 < num_cols:
                            for i in T.vectorized(4):
                                col_sumsq_partial[block, (piece * team.threads + lane) * 4 + i] = sums[piece * 4 + i]

    return main


@kernel(axes=grid(form=forms(*_TEAMS, "general")), pass_configs=_PASS_CONFIGS)
def engram_sinkhorn_finalize(form):
    """Write x * (alpha / (norm + eps)) to out, where x = row_scale * matrix * col_scale and norm is that of its row.

    out may be matrix.
    """
    num_rows, num_cols = T.dynamic("num_rows"), T.dynamic("num_cols")
    team = None if form == "general" else _Team(*_TEAMS[form], _WARPS if _TEAMS[form][0] == 1 else 1)
    rows, threads = (1, _THREADS) if form == "general" else (team.rows * team.teams, team.threads * team.teams)

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
            T.assume(num_cols <= team.columns)
        with T.Kernel(T.ceildiv(num_rows, rows), threads=threads) as block:
            factor = T.alloc_var("float32")
            thread = T.get_thread_binding()
            if form == "general":
                norm = T.alloc_local((1,), "float32")
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
                row_scales = T.alloc_local((team.rows,), "float32")
                norms = T.alloc_local((team.rows,), "float32")
                scales = T.alloc_local((team.pieces * 4,), "float32")
                shared = T.alloc_shared((2, team.rows, team.warps), "float32")
                lane = thread % team.threads
                first = block * rows + thread // team.threads
                _load_rows(matrix, row_scale, values, row_scales, (first, num_rows), lane, num_cols, team)
                _load_columns(col_scale, scales, lane, num_cols, team)
                _scale_rows(values, row_scales, scales, norms, shared, 0, team)
                for row in T.unroll(team.rows):
                    if first + row * team.teams < num_rows:
                        factor = _div(alpha, norms[row] + eps)
                        for i in T.unroll(team.pieces * 4):
                            values[row * team.pieces * 4 + i] = _mul(values[row * team.pieces * 4 + i], factor)
                        for piece in T.unroll(team.pieces):
                            if (piece * team.threads + lane) * 4 < num_cols:
                                for i in T.vectorized(4):
                                    out[first + row * team.teams, (piece * team.threads + lane) * 4 + i] = values[
                                        (row * team.pieces + piece) * 4 + i
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
