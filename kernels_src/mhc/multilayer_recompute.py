"""Many layers of mhc_pre_apply_mix_fwd and mhc_post_fwd at once, from their mixes and the layers' outputs.

A thread carries its chunk of all streams through the layers in registers, so that residuals are written but never read.
A launch takes as many layers as there are parameters for; those of layers that do not exist are null. They come by
value, so that no table of pointers is copied to the device, and the operator runs inside a CUDA graph. The arithmetic
is that of the two kernels, and so are the bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tilelang.language as T

from ..common.device import include
from ..declare import forms, grid, kernel
from ._streams import (
    BF16_CHUNK,
    MULTS,
    PASS_CONFIGS,
    load_chunk,
    load_numbers,
    load_streams,
    store_chunk,
    store_streams,
)
from .post import load_mixes, post_streams
from .pre_apply_mix import apply_mix

_MAX_LAYERS = 10  # of a launch; the operator cuts longer lists
# On an H200 87 to 88 % of a same-size copy: one read and five writes of a plain kernel get 86 %. A loop over a table in
# constant memory got 90 %, with 256 threads 81 to 89 %.
_THREADS = 64


@dataclasses.dataclass(frozen=True)
class _Layer:
    """The parameters of a layer."""

    pre_mix: Any
    layer_output: Any
    post_mix: Any
    comb_mix: Any
    layer_input: Any
    residual: Any


def _declare_layer(number, num_tokens, mhc_mult, hidden):
    """Add a layer's tensors to the parameters of the PrimFunc that is being built."""
    from tilelang.language.eager.builder import tirx

    def tensor(name, *sizes):
        dtype = "float32" if name.endswith("mix") else "bfloat16"
        return tirx.arg(f"{name}_{number}", T.Tensor((num_tokens, *sizes), dtype))

    return _Layer(
        pre_mix=tensor("pre_mix", mhc_mult),
        layer_output=tensor("layer_output", hidden),
        post_mix=tensor("post_mix", mhc_mult),
        comb_mix=tensor("comb_mix", mhc_mult, mhc_mult),
        layer_input=tensor("layer_input", hidden),
        residual=tensor("residual", mhc_mult, hidden),
    )


@T.macro
def _apply(layer, token, chunk, mhc_mult, channels, numbers, streams, mixes, result):
    """The layer's input from the streams."""
    if T.Not(T.Or(T.isnullptr(layer.pre_mix.data), T.isnullptr(layer.layer_input.data))):
        load_numbers(layer.pre_mix, token, mhc_mult, numbers, mixes)
        apply_mix(mhc_mult, channels, streams, mixes, result)
        store_chunk(result, layer.layer_input, token, chunk, channels)


def _is_absent(layer):
    output = T.Or(T.isnullptr(layer.layer_output.data), T.isnullptr(layer.residual.data))
    return T.Or(output, T.Or(T.isnullptr(layer.post_mix.data), T.isnullptr(layer.comb_mix.data)))


@T.macro
def _post(layer, token, chunk, mhc_mult, channels, numbers, streams, mixes, comb, result):
    """The streams behind the layer."""
    if T.Not(_is_absent(layer)):
        load_chunk(layer.layer_output, token, chunk, channels, result)
        load_mixes(layer.post_mix, layer.comb_mix, token, mhc_mult, numbers, mixes, comb)
        post_streams(mhc_mult, channels, result, streams, mixes, comb, streams)
        store_streams(streams, layer.residual, token, chunk, mhc_mult, channels)


def _recompute(layers, *place_and_buffers):
    """All layers one after the other."""
    *place, streams, mixes, comb, result = place_and_buffers
    for layer in layers:
        _apply(layer, *place, streams, mixes, result)
        _post(layer, *place, streams, mixes, comb, result)


@kernel(axes=grid(mhc_mult=MULTS, form=forms("aligned", "general")), pass_configs=PASS_CONFIGS)
def mhc_multilayer_recompute(mhc_mult, form):
    """Write each layer's input to layer_input_<l> and the residual streams behind it to residual_<l>.

    Of a layer whose layer_output_<l> is null only the input is written, and nothing of one whose pre_mix_<l> is null.
    """
    channels = BF16_CHUNK if form == "aligned" else 1
    numbers = min(mhc_mult, 4) if form == "aligned" else 1
    num_tokens, hidden = T.dynamic("num_tokens"), T.dynamic("hidden")

    @T.prim_func
    def main(initial_residual: T.Tensor((num_tokens, mhc_mult, hidden), "bfloat16")):
        layers = [_declare_layer(number, num_tokens, mhc_mult, hidden) for number in range(_MAX_LAYERS)]
        if form == "aligned":
            T.assume(hidden % channels == 0)
        with T.Kernel(num_tokens * T.ceildiv(hidden, _THREADS * channels), threads=_THREADS) as block:
            include("streams.cuh")
            streams = T.alloc_local((mhc_mult * channels,), "bfloat16")
            mixes = T.alloc_local((mhc_mult,), "float32")
            comb = T.alloc_local((mhc_mult * mhc_mult,), "float32")
            result = T.alloc_local((channels,), "bfloat16")
            token = T.alloc_var("int32")
            chunk = T.alloc_var("int32")
            token = T.truncdiv(block, T.ceildiv(hidden, _THREADS * channels))
            chunk = T.truncmod(block, T.ceildiv(hidden, _THREADS * channels)) * _THREADS + T.get_thread_binding()
            if chunk * channels < hidden:
                load_streams(initial_residual, token, chunk, mhc_mult, channels, streams)
                _recompute(layers, token, chunk, mhc_mult, channels, numbers, streams, mixes, comb, result)

    return main
