"""The inputs of many layers and the residual streams behind them, computed anew in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._dispatch import kernel
from ..errors import argument_error, argument_type_error
from ..testing.cases import BenchCase
from ._checks import check_mult, check_tensor, count, flatten
from .post import mhc_post_fwd_ref
from .pre_apply_mix import mhc_pre_apply_mix_fwd_ref

_NAME = "mhc.mhc_multilayer_recompute"

_MAX_LAYERS = 10  # of a launch; the kernel has parameters for as many

_Tensors = Sequence[torch.Tensor]


def mhc_multilayer_recompute(
    initial_residual: torch.Tensor,
    pre_mix_list: _Tensors,
    layer_output_list: _Tensors,
    post_mix_list: _Tensors,
    comb_mix_list: _Tensors,
    layer_input_list: _Tensors,
    residual_list: _Tensors,
) -> None:
    """Replays layers: writes each one's input to layer_input_list and the streams behind it to residual_list.

    initial_residual: (..., m, hidden) bf16, m 2, 4 or 8. One tensor for each of L >= 1 layers: pre_mix_list (..., m, 1)
    or (..., m) fp32, layer_input_list (..., hidden) bf16. One for each of L or L - 1 layers: layer_output_list
    (..., hidden) bf16, post_mix_list like a pre mix, comb_mix_list (..., m, m) fp32, residual_list (..., m, hidden)
    bf16. All dense. layer_input_list[l] is what `mhc_pre_apply_mix_fwd` gives for the streams before layer l, and
    residual_list[l] what `mhc_post_fwd` gives, bit for bit. Streams stay in registers through ten layers at a time.
    """
    lists = (pre_mix_list, layer_output_list, post_mix_list, comb_mix_list, layer_input_list, residual_list)
    streams, layers = _flatten(initial_residual, lists)
    mult = int(streams.shape[1])
    calls = []
    for first in range(0, len(layers), _MAX_LAYERS):
        some = layers[first : first + _MAX_LAYERS]
        absent = [(None,) * len(lists)] * (_MAX_LAYERS - len(some))
        calls.append((streams, *(tensor for layer in (*some, *absent) for tensor in layer), mult))
        if some[-1][-1] is not None:
            streams = some[-1][-1]
    if len(calls) > 1:  # none runs unless all can
        for call in calls:
            _mhc_multilayer_recompute.check(*call)
    for call in calls:
        _mhc_multilayer_recompute(*call)


def mhc_multilayer_recompute_ref(
    initial_residual: torch.Tensor,
    pre_mix_list: _Tensors,
    layer_output_list: _Tensors,
    post_mix_list: _Tensors,
    comb_mix_list: _Tensors,
    layer_input_list: _Tensors,
    residual_list: _Tensors,
) -> None:
    """`mhc_multilayer_recompute` in plain torch."""
    lists = (pre_mix_list, layer_output_list, post_mix_list, comb_mix_list, layer_input_list, residual_list)
    streams, layers = _flatten(initial_residual, lists)
    _recompute(streams, layers)


def _recompute(streams: torch.Tensor, layers: Sequence[Sequence[torch.Tensor | None]]) -> None:
    for pre_mix, layer_output, post_mix, comb_mix, layer_input, residual in layers:
        if pre_mix is not None and layer_input is not None:
            mhc_pre_apply_mix_fwd_ref(streams, pre_mix, layer_input)
        if layer_output is None or post_mix is None or comb_mix is None or residual is None:
            continue
        mhc_post_fwd_ref(layer_output, streams, post_mix.unsqueeze(-1), comb_mix, residual)
        streams = residual


_LIST_NAMES = (
    "pre_mix_list",
    "layer_output_list",
    "post_mix_list",
    "comb_mix_list",
    "layer_input_list",
    "residual_list",
)


def _flatten(
    initial_residual: torch.Tensor, lists: Sequence[_Tensors]
) -> tuple[torch.Tensor, list[tuple[torch.Tensor | None, ...]]]:
    """The streams as (num_tokens, m, hidden), and each layer's six tensors, four of them None without an output."""
    check_tensor(_NAME, "initial_residual", initial_residual, torch.bfloat16)
    if initial_residual.ndim < 2:
        check_tensor(_NAME, "initial_residual", initial_residual, torch.bfloat16, 3)
    for name, tensors in zip(_LIST_NAMES, lists, strict=True):
        if not isinstance(tensors, list | tuple):
            raise argument_type_error(_NAME, name, "be a list of tensors", type(tensors).__name__)
    num_layers, num_outputs = len(lists[0]), len(lists[1])
    if num_layers < 1:
        raise argument_error(_NAME, "pre_mix_list", "hold at least 1 tensor", num_layers)
    if num_outputs not in (num_layers - 1, num_layers):
        requirement = f"hold {num_layers - 1} or {num_layers} tensors, as many as layers or one less"
        raise argument_error(_NAME, "layer_output_list", requirement, num_outputs)
    *leading, mult, hidden = initial_residual.shape
    check_mult(_NAME, "initial_residual", mult)
    sizes = ((mult,), (hidden,), (mult,), (mult, mult), (hidden,), (mult, hidden))
    columns = []
    for name, tensors, shape in zip(_LIST_NAMES, lists, sizes, strict=True):
        expected = num_layers if name in ("pre_mix_list", "layer_input_list") else num_outputs
        if len(tensors) != expected:
            raise argument_error(_NAME, name, f"hold {expected} tensors", len(tensors))
        columns.append([_flatten_one(f"{name}[{at}]", each, leading, shape) for at, each in enumerate(tensors)])
        columns[-1] += [None] * (num_layers - expected)
    streams = flatten(_NAME, "initial_residual", initial_residual, torch.bfloat16, leading, (mult, hidden))
    return streams, list(zip(*columns, strict=True))


def _flatten_one(name: str, tensor: Any, leading: Sequence[int], sizes: Sequence[int]) -> torch.Tensor | None:
    """One tensor of a list; mixes may end in a dimension of 1."""
    dtype = torch.float32 if "mix" in name else torch.bfloat16
    if name.startswith(("pre", "post")) and isinstance(tensor, torch.Tensor) and tensor.ndim == len(leading) + 2:
        return flatten(_NAME, name, tensor, dtype, leading, (*sizes, 1)).view(count(leading), *sizes)
    return flatten(_NAME, name, tensor, dtype, leading, sizes)


def _cpu(initial_residual: torch.Tensor, *tensors_and_mult: Any) -> None:
    tensors = tensors_and_mult[:-1]
    size = len(_LIST_NAMES)
    _recompute(initial_residual, [tensors[at : at + size] for at in range(0, len(tensors), size)])


_mhc_multilayer_recompute = kernel(_NAME, cpu=_cpu)


def bench_cases() -> list[BenchCase]:
    """Few tokens through more layers than a launch takes, then the published benchmark's sizes."""
    cases = [_case(5, 13, 12, 256), _case(7, 1, 0, 256), _case(33, 2, 2, 1280)]
    for hidden in (2560, 4096, 7168, 8192):
        cases += [_case(8192, 10, 9, hidden), _case(8192, 10, 10, hidden)]
    return [*cases, _case(4096, 10, 10, 7168), _case(4096, 10, 10, 2560)]


_MULT = 4


def _case(num_tokens: int, num_layers: int, num_post: int, hidden: int) -> BenchCase:
    def make(device: Any) -> dict[str, Any]:
        def activations(count: int, *sizes: int) -> list[torch.Tensor]:
            return [torch.randn((1, num_tokens, *sizes), device=device).bfloat16() for _ in range(count)]

        def mixes(count: int, *sizes: int) -> list[torch.Tensor]:
            # Near a doubly stochastic matrix, so that many layers neither vanish nor overflow
            return [torch.rand((1, num_tokens, _MULT, *sizes), device=device) / 2 for _ in range(count)]

        return {
            "initial_residual": activations(1, _MULT, hidden)[0],
            "pre_mix_list": mixes(num_layers, 1),
            "layer_output_list": activations(num_post, hidden),
            "post_mix_list": mixes(num_post, 1),
            "comb_mix_list": mixes(num_post, _MULT),
            "layer_input_list": activations(num_layers, hidden),
            "residual_list": activations(num_post, _MULT, hidden),
        }

    row = 2 * hidden
    per_token = _MULT * row + num_layers * (4 * _MULT + row)
    per_token += num_post * (row + 4 * _MULT + 4 * _MULT * _MULT + _MULT * row)
    params = {"num_tokens": num_tokens, "num_layers": num_layers, "num_post": num_post, "hidden": hidden}
    return BenchCase(_NAME, params, make, num_tokens * per_token)
