"""A token's mixes, split into those before a layer, behind it, and between the residual streams; and their gradients.

A thread keeps to one column, so that its scale and base are loaded once. Backward, each of num_sms blocks leaves the
sums of its tokens in the workspace, and one block adds them up.
"""

import tilelang.language as T

from ..common.device import include
from ..declare import grid, kernel
from ._streams import MULTS, PASS_CONFIGS

# Tokens side by side in a block, by multiplicity: warps are full
_ROWS = {2: 16, 4: 8, 8: 2}
_BACKWARD_ROWS = {2: 64, 4: 24, 8: 8}
_IN_FLIGHT = 4  # tokens of a thread
# Into which the last block cuts the rows of the workspace, and how many of them a thread has on their way
_PARTS = {2: 32, 4: 16, 8: 6}
_ROWS_IN_FLIGHT = 8


@T.macro
def _load_constants(mhc_scale, mhc_base, column, mhc_mult, scale, base):
    scale[0] = mhc_scale[T.if_then_else(column < mhc_mult, 0, T.if_then_else(column < 2 * mhc_mult, 1, 2))]
    base[0] = mhc_base[column]


@kernel(axes=grid(mhc_mult=MULTS), pass_configs=PASS_CONFIGS)
def mhc_pre_split_mixes_fwd(mhc_mult):
    """Write sigmoid(x * scale[0] + base) + eps, sigmoid(x * scale[1] + base) * mult and x * scale[2] + base."""
    columns = mhc_mult * (mhc_mult + 2)
    rows = _ROWS[mhc_mult]
    num_tokens = T.dynamic("num_tokens")

    @T.prim_func
    def main(
        input_mixes: T.Tensor((num_tokens, columns), "float32"),
        mhc_scale: T.Tensor((3,), "float32"),
        mhc_base: T.Tensor((columns,), "float32"),
        pre_layer_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        post_layer_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        comb_res_mix: T.Tensor((num_tokens, mhc_mult * mhc_mult), "float32"),
        mhc_post_mult_value: T.float32,
        mhc_pre_eps: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows * _IN_FLIGHT), threads=rows * columns) as block:
            include("mixes.cuh")
            values = T.alloc_local((_IN_FLIGHT,), "float32")
            scale = T.alloc_local((1,), "float32")
            base = T.alloc_local((1,), "float32")
            column = T.get_thread_binding() % columns
            first = block * (rows * _IN_FLIGHT) + T.get_thread_binding() // columns
            for i in T.unroll(_IN_FLIGHT):
                if first + i * rows < num_tokens:
                    values[i] = input_mixes[first + i * rows, column]
            _load_constants(mhc_scale, mhc_base, column, mhc_mult, scale, base)
            for i in T.unroll(_IN_FLIGHT):
                token = first + i * rows
                if token < num_tokens:
                    if column < mhc_mult:
                        pre_layer_mix[token, column] = T.call_extern(
                            "float32", "tk::pre_mix", values[i], scale[0], base[0], mhc_pre_eps
                        )
                    elif column < 2 * mhc_mult:
                        post_layer_mix[token, column - mhc_mult] = T.call_extern(
                            "float32", "tk::post_mix", values[i], scale[0], base[0], mhc_post_mult_value
                        )
                    else:
                        comb_res_mix[token, column - 2 * mhc_mult] = T.call_extern(
                            "float32", "tk::scaled_mix", values[i], scale[0], base[0]
                        )

    return main


@T.macro
def _sum_rows(shared, count, rows, target, row):
    """target[row, i] = the sum of shared[r * count + i] over `rows` rows r, in their order."""
    thread = T.get_thread_binding()
    total = T.alloc_var("float32")
    T.sync_threads()
    if thread < count:
        total = shared[thread]
        for i in T.unroll(rows - 1):
            total += shared[(i + 1) * count + thread]
        target[row, thread] = total


@T.macro
def _sum_workspace(workspace, shared, num_sms, count, parts):
    """Leave the sums over the workspace's rows in shared[i]."""
    thread = T.get_thread_binding()
    total = T.alloc_var("float32")
    values = T.alloc_local((_ROWS_IN_FLIGHT,), "float32")
    total = T.float32(0)
    for step in T.serial(T.ceildiv(num_sms, parts * _ROWS_IN_FLIGHT)):
        for i in T.unroll(_ROWS_IN_FLIGHT):
            row = (step * _ROWS_IN_FLIGHT + i) * parts + T.truncdiv(thread, count)
            values[i] = T.float32(0)
            if row < num_sms:
                values[i] = workspace[row, T.truncmod(thread, count)]
        for i in T.unroll(_ROWS_IN_FLIGHT):
            total += values[i]
    shared[thread] = total
    T.sync_threads()
    if thread < count:
        for i in T.unroll(parts - 1):
            total += shared[(i + 1) * count + thread]
        shared[thread] = total
    T.sync_threads()


@kernel(
    axes=grid(mhc_mult=MULTS),
    # barriers are set by hand
    pass_configs={**PASS_CONFIGS, "tl.disable_thread_storage_sync": True},
)
def mhc_pre_split_mixes_bwd(mhc_mult):
    """Write the gradients of mhc_pre_split_mixes_fwd; those of scale and base are sums over all tokens.

    workspace has a row for each of num_sms blocks; sums are added in another order for another number of them.
    """
    columns = mhc_mult * (mhc_mult + 2)
    rows, parts = _BACKWARD_ROWS[mhc_mult], _PARTS[mhc_mult]
    num_tokens, num_sms = T.dynamic("num_tokens"), T.dynamic("num_sms")

    @T.prim_func
    def main(
        pre_layer_mix_grad: T.Tensor((num_tokens, mhc_mult), "float32"),
        post_layer_mix_grad: T.Tensor((num_tokens, mhc_mult), "float32"),
        comb_res_mix_grad: T.Tensor((num_tokens, mhc_mult * mhc_mult), "float32"),
        input_mixes: T.Tensor((num_tokens, columns), "float32"),
        post_layer_mix: T.Tensor((num_tokens, mhc_mult), "float32"),
        mhc_scale: T.Tensor((3,), "float32"),
        mhc_base: T.Tensor((columns,), "float32"),
        workspace: T.Tensor((num_sms, 2 * columns), "float32"),
        input_mixes_grad: T.Tensor((num_tokens, columns), "float32"),
        mhc_scale_grad: T.Tensor((3,), "float32"),
        mhc_base_grad: T.Tensor((columns,), "float32"),
        mhc_post_mult_value: T.float32,
    ):
        T.assume(num_sms > 0)
        # Gradients of the mixes, and each block's sums of the rest
        with T.Kernel(num_sms, threads=rows * columns) as block:
            include("mixes.cuh")
            values = T.alloc_local((_IN_FLIGHT,), "float32")
            grads = T.alloc_local((_IN_FLIGHT,), "float32")
            posts = T.alloc_local((_IN_FLIGHT,), "float32")
            scale = T.alloc_local((1,), "float32")
            base = T.alloc_local((1,), "float32")
            shared = T.alloc_shared((rows * 2 * columns,), "float32")
            sum_of_grads = T.alloc_var("float32")
            sum_of_products = T.alloc_var("float32")
            grad = T.alloc_var("float32")
            thread = T.get_thread_binding()
            column = T.get_thread_binding() % columns
            row = T.get_thread_binding() // columns
            _load_constants(mhc_scale, mhc_base, column, mhc_mult, scale, base)
            sum_of_grads = T.float32(0)
            sum_of_products = T.float32(0)
            for step in T.serial(T.ceildiv(num_tokens, num_sms * rows * _IN_FLIGHT)):
                for i in T.unroll(_IN_FLIGHT):
                    token = ((step * _IN_FLIGHT + i) * num_sms + block) * rows + row
                    if token < num_tokens:
                        values[i] = input_mixes[token, column]
                        if column < mhc_mult:
                            grads[i] = pre_layer_mix_grad[token, column]
                        elif column < 2 * mhc_mult:
                            grads[i] = post_layer_mix_grad[token, column - mhc_mult]
                            posts[i] = post_layer_mix[token, column - mhc_mult]
                        else:
                            grads[i] = comb_res_mix_grad[token, column - 2 * mhc_mult]
                for i in T.unroll(_IN_FLIGHT):
                    token = ((step * _IN_FLIGHT + i) * num_sms + block) * rows + row
                    if token < num_tokens:
                        grad = grads[i]
                        if column < mhc_mult:
                            grad = T.call_extern("float32", "tk::sigmoid_grad", values[i], scale[0], base[0], grads[i])
                        elif column < 2 * mhc_mult:
                            grad = T.call_extern(
                                "float32", "tk::post_mix_grad", posts[i], mhc_post_mult_value, grads[i]
                            )
                        input_mixes_grad[token, column] = grad * scale[0]
                        sum_of_grads += grad
                        sum_of_products += grad * values[i]
            shared[row * 2 * columns + column] = sum_of_grads
            shared[row * 2 * columns + columns + column] = sum_of_products
            _sum_rows(shared, 2 * columns, rows, workspace, block)
        # The sums of all blocks
        with T.Kernel(1, threads=parts * 2 * columns) as _:
            totals = T.alloc_shared((parts * 2 * columns,), "float32")
            total = T.alloc_var("float32")
            thread = T.get_thread_binding()
            _sum_workspace(workspace, totals, num_sms, 2 * columns, parts)
            if thread < columns:
                mhc_base_grad[thread] = totals[thread]
            if thread < 3:
                total = T.float32(0)
                for i in T.serial(T.if_then_else(thread < 2, mhc_mult, mhc_mult * mhc_mult)):
                    total += totals[columns + thread * mhc_mult + i]
                mhc_scale_grad[thread] = total

    return main
