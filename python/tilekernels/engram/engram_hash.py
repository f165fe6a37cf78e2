"""Hashes of n-grams as rows of embedding tables."""

from __future__ import annotations

from typing import Any

import torch

from .._dispatch import kernel
from .._outputs import size_of
from ..testing.cases import BenchCase

_NAME = "engram.engram_hash"
_ROWS = (torch.int32, 0, size_of(3, 0), size_of(0, 0), size_of(3, 1))


def engram_hash(
    ngram_token_ids: torch.Tensor,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    image_token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of every layer's tables that the n-grams ending at each token point to.

    ngram_token_ids: (num_tokens, ngram) int32. multipliers: (num_layers, ngram) int64.
    vocab_sizes: (num_layers, ngram - 1, num_tables) int32, positive. offsets: (num_layers, (ngram - 1) * num_tables)
    int32, where each table starts. image_token_mask: (num_tokens,) bool or None. All dense.

    For layer l and order i = 1 ... ngram - 1: h = the exclusive or of ids[j] * multipliers[l, j] over j <= i, 64 bits
    wide and wrapping; column (i - 1) * num_tables + b is (h mod vocab_sizes[l, i - 1, b]) + offsets, the remainder
    never negative. Columns of tokens in the mask are -1. Returns int32 (num_layers, num_tokens, (ngram - 1) *
    num_tables).
    """
    return _engram_hash(ngram_token_ids, multipliers, vocab_sizes, offsets, image_token_mask, _ROWS)


def engram_hash_ref(
    ngram_token_ids: torch.Tensor,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    image_token_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`engram_hash` in plain torch."""
    ids = ngram_token_ids.long()
    mixed = ids[:, 0] * multipliers[:, :1]  # (num_layers, num_tokens)
    parts = []
    for order in range(1, ids.shape[1]):
        mixed = mixed ^ (ids[:, order] * multipliers[:, order : order + 1])
        parts.append(torch.remainder(mixed[:, :, None], vocab_sizes[:, None, order - 1].long()))
    empty = mixed.new_empty((*mixed.shape, 0))
    rows = torch.cat([empty, *parts], dim=2) + offsets[:, None].long()
    if image_token_mask is not None:
        rows = torch.where(image_token_mask[:, None], -1, rows)
    return rows.int()


def make_offsets(vocab_sizes: torch.Tensor) -> torch.Tensor:
    """Where each table starts if a layer's tables follow one another: int32 (num_layers, orders * num_tables)."""
    sizes = vocab_sizes.flatten(1).long()
    return (sizes.cumsum(1) - sizes).int()


def _engram_hash_cpu(
    ngram_token_ids: torch.Tensor,
    multipliers: torch.Tensor,
    vocab_sizes: torch.Tensor,
    offsets: torch.Tensor,
    image_token_mask: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    out.copy_(engram_hash_ref(ngram_token_ids, multipliers, vocab_sizes, offsets, image_token_mask))


_engram_hash = kernel(_NAME, cpu=_engram_hash_cpu)


def bench_cases() -> list[BenchCase]:
    """The published benchmark's sizes, with an image mask, and a large batch."""
    return [_case(4001), _case(8001), _case(8001, is_masked=True), _case(65536)]


def _case(
    num_tokens: int, ngram: int = 3, num_layers: int = 2, num_tables: int = 8, is_masked: bool = False
) -> BenchCase:
    num_columns = (ngram - 1) * num_tables

    def make(device: Any) -> dict[str, Any]:
        sizes = torch.randint(100_000, 1_000_000, (num_layers, ngram - 1, num_tables), device=device)
        return {
            "ngram_token_ids": torch.randint(100_000, (num_tokens, ngram), dtype=torch.int32, device=device),
            "multipliers": torch.randint(100_000, (num_layers, ngram), device=device),
            "vocab_sizes": sizes.int(),
            "offsets": make_offsets(sizes),
            "image_token_mask": torch.rand(num_tokens, device=device) < 0.3 if is_masked else None,
        }

    num_bytes = 4 * num_tokens * ngram + 8 * num_layers * ngram + 8 * num_layers * num_columns
    num_bytes += 4 * num_layers * num_tokens * num_columns + num_tokens * is_masked
    params = {"num_tokens": num_tokens, "ngram": ngram, "num_layers": num_layers, "num_tables": num_tables}
    return BenchCase(_NAME, {**params, "masked": is_masked}, make, num_bytes)
