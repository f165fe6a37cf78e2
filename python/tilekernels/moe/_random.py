"""Random routing in plain torch: Philox4x32-10 with curand's streams, and distinct experts drawn from it.

All arithmetic is on int64 tensors that hold unsigned 32-bit words, since torch has none of those.
"""

from __future__ import annotations

import torch

WARP = 32
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: list[torch.Tensor], key: tuple[int, int]) -> list[torch.Tensor]:
    """Philox4x32-10 of four counter words, elementwise."""
    for _ in range(10):
        even_high, even_low = _multiply(counter[0], _MULTIPLIERS[0])
        odd_high, odd_low = _multiply(counter[2], _MULTIPLIERS[1])
        counter = [odd_high ^ counter[1] ^ key[0], odd_low, even_high ^ counter[3] ^ key[1], even_low]
        key = ((key[0] + _KEY_STEPS[0]) & _WORD, (key[1] + _KEY_STEPS[1]) & _WORD)
    return counter


def draw_two(seed: int, subsequence: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first two words of the streams (seed, subsequence) at offset 0."""
    zero = torch.zeros_like(subsequence)
    words = philox([zero, zero, subsequence & _WORD, subsequence >> 32], (seed & _WORD, (seed >> 32) & _WORD))
    return words[0], words[1]


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Words as fp32 numbers in (0, 1], as curand_uniform makes them."""
    return words.float() * 2.0**-32 + 2.0**-33


def draw_experts(
    num_tokens: int,
    num_slots: int,
    num_logical: int,
    logical_count: torch.Tensor | None,
    ep_rank: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(distinct physical experts, weights), (num_tokens, num_slots) each.

    Slot l of a token draws a number below total - l from stream token * 32 + l. The smallest of a row is fixed,
    lowest slot first; the later slots that are left step over it; and so on. Slots beyond the number of physical
    experts get -1.
    """
    slot = torch.arange(num_slots, device=device)
    subsequence = torch.arange(num_tokens, device=device)[:, None] * WARP + slot
    first, second = draw_two(ep_rank, subsequence)
    total = torch.full((), num_logical, device=device) if logical_count is None else logical_count.long().sum()
    is_open = (slot < total).expand(num_tokens, num_slots)
    drawn = second % (total - slot).clamp(min=1)
    experts = torch.full_like(drawn, -1)
    for _ in range(num_slots):
        # Ordered by number, then by slot
        order = torch.where(is_open, drawn * WARP + slot, torch.iinfo(torch.int64).max)
        at = order.argmin(dim=1, keepdim=True)
        is_fixed = is_open & (slot == at)
        experts = torch.where(is_fixed, drawn, experts)
        is_open = is_open & ~is_fixed
        drawn = drawn + (is_open & (slot > at))
    return experts, uniform(first)


def _multiply(x: torch.Tensor, y: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of the product of two unsigned words, without leaving int64."""
    low_part = (x & 0xFFFF) * y
    high_part = (x >> 16) * y + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)
