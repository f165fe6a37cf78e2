"""Peer of moe.topk_gate: torch.topk, which promises no order of ties."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    return {"torch.topk": functools.partial(torch.topk, kwargs["scores"], kwargs["num_topk"])}
