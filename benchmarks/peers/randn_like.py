"""Peer of rand.randn_like: torch.randn_like, which draws other numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def make_peers(operator: str, kwargs: dict[str, Any]) -> dict[str, Callable[[], object]]:
    return {"torch.randn_like": functools.partial(torch.randn_like, kwargs["input"])}
