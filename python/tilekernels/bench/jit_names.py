"""What the JIT original's benchmark rows mean in our words: its names of operators and parameters turned into ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["translate_benchmark", "translate_call"]

Words = dict[str, Any]
Translated = tuple[str, Words]  # our operator, its parameters

_SHORT_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "e4m3", "int8": "e2m1"}

# Its kernel -> our operator; then names of parameters that differ (None: ours has no such parameter).
_BENCHMARKS: dict[str, tuple[str, dict[str, str | None]]] = {
    "per_token_cast": ("quant.per_token_cast", {"in_dtype": "in"}),
    "per_token_cast_to_e5m6": ("quant.per_token_cast", {"in_dtype": "in"}),
    "per_block_cast": ("quant.per_block_cast", {"in_dtype": "in"}),
    "per_block_cast_lossless": (
        "quant.per_block_cast_lossless",
        {"in_sf_block": "x_block_size", "out_sf_block": "out_block_size"},
    ),
    "per_channel_cast": ("quant.per_channel_cast", {"dtype": "in"}),
    "per_channel_cast_fused": ("quant.per_channel_cast_fused", {"num_per_channels": None, "num_experts": None}),
    "per_channel_cast_and_transpose": (
        "quant.per_channel_cast_and_transpose",
        {"dtype": None, "num_per_channels": "num_per_tokens"},
    ),
    "cast_back": ("quant.cast_back", {"fmt": "in", "out_dtype": "fmt"}),
    "cast_back_per_token": ("quant.per_token_cast_back", {"fmt": "in", "out_dtype": "fmt"}),
    "cast_back_e5m6": ("quant.per_token_cast_back", {"out_dtype": "fmt"}),
    "swiglu_forward_and_per_token_cast": (
        "quant.swiglu_forward_and_per_token_cast",
        {"num_topk": None, "swiglu_clamp_value": "clamp_value"},
    ),
    "swiglu_backward_and_per_token_cast": (
        "quant.swiglu_backward_and_per_token_cast",
        {"num_topk": None, "swiglu_clamp_value": "clamp_value"},
    ),
    "swiglu_forward_and_per_channel_cast_and_transpose": (
        "quant.swiglu_forward_and_per_channel_cast_and_transpose",
        {"swiglu_clamp_value": "clamp"},
    ),
    "transpose": ("transpose.transpose", {"num_tokens": "num_rows", "hidden": "num_cols"}),
    "batched_transpose": (
        "transpose.batched_transpose",
        {"num_tokens": "num_rows", "hidden": "num_cols", "num_experts": "num_batches"},
    ),
    "topk_gate": ("moe.topk_gate", {}),
    "topk_sum_and_topk_group_idx": ("moe.topk_sum_and_topk_group_idx", {"num_group_sum_topk": "num_topk_sum"}),
    "top2_sum_gate": ("moe.top2_sum_gate", {"num_routed_experts": "num_experts", "num_shared_experts": None}),
    "get_fused_mapping": ("moe.get_fused_mapping", {}),
    "group_count": ("moe.group_count", {}),
    "aux_fi": ("moe.aux_fi", {"num_aux_topk": None}),
    "inplace_unique_group_indices": (
        "moe.inplace_unique_group_indices",
        {"num_experts": None, "num_groups": "num_experts"},
    ),
    "mask_indices_by_tp": ("moe.mask_indices_by_tp", {"num_experts": None, "tp_rank": None}),
    "normalize_weight": ("moe.normalize_weight", {"num_experts": None}),
    "expand_to_fused": ("moe.expand_to_fused", {}),
    "expand_to_fused_with_sf": ("moe.expand_to_fused_with_sf", {}),
    "reduce_fused": (
        "moe.reduce_fused",
        {"in_dtype": "in", "out_dtype": "out", "with_sf": None, "with_weights": None},
    ),
    "engram_gate_fwd": ("engram.engram_gate_fwd", {"hc": None}),
    "engram_gate_bwd": ("engram.engram_gate_bwd", {"hc": None}),
    "engram_hash": ("engram.engram_hash", {"layers": "num_layers", "tables": "num_tables"}),
    "fused_weight": ("engram.fused_weight", {"hc": "num_streams"}),
    "grad_w_reduce": ("engram.grad_w_reduce", {}),
    "mhc_multilayer_recompute": (
        "mhc.mhc_multilayer_recompute",
        {"seq": "num_tokens", "bs": None, "mhc_mult": None},
    ),
}
# Said by the words below, or without a counterpart
_FLAGS = ("round_sf", "use_packed_ue8m0", "use_tma_aligned_col_major_sf", "num_ep_ranks")

# What its single calls (`op`, `n`, `h`) are
_BF16_TO_E4M3: Words = {"in": "bf16", "fmt": "e4m3"}
_CALLS: dict[str, Translated] = {
    "per_token_cast_128": ("quant.per_token_cast", {**_BF16_TO_E4M3, "num_per_channels": 128, "sf": "row"}),
    "per_token_cast_128_ue8m0": ("quant.per_token_cast", {**_BF16_TO_E4M3, "num_per_channels": 128, "sf": "packed"}),
    "per_block_cast_128x128": ("quant.per_block_cast", {**_BF16_TO_E4M3, "block_size": (128, 128), "sf": "row"}),
    "per_channel_cast_128": ("quant.per_channel_cast", {"in": "bf16", "num_per_tokens": 128, "round_sf": True}),
    "per_channel_cast_and_transpose_128": ("quant.per_channel_cast_and_transpose", {"num_per_tokens": 128}),
    "engram_gate_fwd": ("engram.engram_gate_fwd", {"save": False}),
    "mhc_expand": ("mhc.expand_to_mhc_fwd", {"mhc_mult": 4}),
    "mhc_pre_apply_mix": ("mhc.mhc_pre_apply_mix_fwd", {"mult": 4}),
    "mhc_post": ("mhc.mhc_post_fwd", {"mult": 4}),
    "mhc_post_bwd": ("mhc.mhc_post_bwd", {"mult": 4}),
    "mhc_sinkhorn": ("mhc.mhc_sinkhorn_fwd", {"mult": 4}),
    "mhc_pre_split_mixes": ("mhc.mhc_pre_split_mixes_fwd", {"mult": 4}),
    "mhc_head_compute_mix": ("mhc.mhc_head_compute_mix_fwd", {"mult": 4}),
    "mhc_pre_big_fuse": ("mhc.mhc_pre_big_fuse_fwd", {"mhc_mult": 4}),
}


def translate_benchmark(kernel: str, params: Mapping[str, Any]) -> Translated | None:
    """Our operator and its parameters for a benchmark row of the original; None for one that has no counterpart."""
    if kernel not in _BENCHMARKS:
        return None
    operator, names = _BENCHMARKS[kernel]
    words: Words = {}
    for name, value in params.items():
        ours = names.get(name, name)
        if ours is not None and name not in _FLAGS:
            words[ours] = simplify(value)
    sf = _name_sf(params)
    if sf is not None:
        words["sf"] = sf
    finish = _FINISHES.get(kernel)
    if finish is not None:
        finish(words, params)
    return operator, words


def translate_call(op: str, num_tokens: int, hidden: int) -> Translated | None:
    """The same for a single call at a fixed size."""
    if op not in _CALLS:
        return None
    operator, words = _CALLS[op]
    return operator, {**words, "num_tokens": num_tokens, **({"hidden": hidden} if hidden else {})}


def simplify(value: Any) -> Any:
    """A value in the form in which both sides are compared: short names of dtypes, tuples."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return _SHORT_NAMES.get(value, value) if isinstance(value, str) else value


def _name_sf(params: Mapping[str, Any]) -> str | None:
    if "use_packed_ue8m0" not in params:
        return None
    if params["use_packed_ue8m0"]:
        return "packed"
    return "col" if params["use_tma_aligned_col_major_sf"] else "row"


def _finish_e5m6(words: Words, params: Mapping[str, Any]) -> None:
    words["fmt"] = "e5m6"


def _finish_lossless(words: Words, params: Mapping[str, Any]) -> None:
    for side in ("in", "out"):
        for flag in _FLAGS[:3]:
            words.pop(f"{side}_{flag}", None)
    words["sf"] = "packed" if params["out_use_packed_ue8m0"] else "row"


def _finish_channels(words: Words, params: Mapping[str, Any]) -> None:
    words["round_sf"] = params["round_sf"]


def _finish_channels_fused(words: Words, params: Mapping[str, Any]) -> None:
    words["in"] = "e4m3" if words.pop("is_fused_cast_back") else "bf16"
    words["round_sf"] = params["round_sf"]


def _finish_cast_back(words: Words, params: Mapping[str, Any]) -> None:
    words["x_block_size"] = (words.pop("num_per_tokens", 1), words.pop("num_per_channels"))
    words.setdefault("in", "e5m6")
    words.setdefault("sf", "row")


def _finish_swiglu_forward(words: Words, params: Mapping[str, Any]) -> None:
    words.pop("with_weights")
    if not words.pop("enable_pos_to_expert"):
        words.pop("num_experts")
    words.update({"in": "bf16", "out": "e4m3"})


def _finish_swiglu_backward(words: Words, params: Mapping[str, Any]) -> None:
    words.update({"in": "e4m3", "out": "e4m3", "sf": "row"})


def _finish_swiglu_channels(words: Words, params: Mapping[str, Any]) -> None:
    words["transposed"] = not words.pop("without_transpose")


def _finish_batched_transpose(words: Words, params: Mapping[str, Any]) -> None:
    if words["dtype"] == "fp32":
        words["dtype"] = "bf16"  # what its rows of fp32 timed: the same microseconds, twice the card's bandwidth


def _finish_mask(words: Words, params: Mapping[str, Any]) -> None:
    words["num_experts"] = params["num_experts"] * params["num_ep_ranks"]


def _finish_top2(words: Words, params: Mapping[str, Any]) -> None:
    words["num_tokens"] = 36  # not in its rows


def _finish_grad_w(words: Words, params: Mapping[str, Any]) -> None:
    words.update(num_parts=132, num_streams=4)  # one part for each SM


_FINISHES: dict[str, Callable[[Words, Mapping[str, Any]], None]] = {
    "per_token_cast_to_e5m6": _finish_e5m6,
    "per_block_cast_lossless": _finish_lossless,
    "per_channel_cast": _finish_channels,
    "per_channel_cast_fused": _finish_channels_fused,
    "cast_back": _finish_cast_back,
    "cast_back_per_token": _finish_cast_back,
    "cast_back_e5m6": _finish_cast_back,
    "swiglu_forward_and_per_token_cast": _finish_swiglu_forward,
    "swiglu_backward_and_per_token_cast": _finish_swiglu_backward,
    "swiglu_forward_and_per_channel_cast_and_transpose": _finish_swiglu_channels,
    "batched_transpose": _finish_batched_transpose,
    "mask_indices_by_tp": _finish_mask,
    "top2_sum_gate": _finish_top2,
    "grad_w_reduce": _finish_grad_w,
}
