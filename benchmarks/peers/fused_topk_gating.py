"""Peer of moe.fused_topk_gating: torch's linear, softmax and topk, logits in bf16 and memory between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    hidden_states, gate_weight, num_topk = (kwargs[name] for name in ("hidden_states", "gate_weight", "num_topk"))

    def gate() -> object:
        logits = torch.nn.functional.linear(hidden_states, gate_weight)
        return torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), num_topk)

    return {"torch.linear, softmax, topk": gate}
