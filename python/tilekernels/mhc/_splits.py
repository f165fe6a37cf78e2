"""How the channels of pre-norm's product are cut into parts: where, and into how many."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch

# Tokens of a block and channels of a step of the kernel
_ROWS = 128
_DEPTH = 128
_DEPTH_OF_MANY, _MANY_MIXES = 64, 80
_ALIGNMENT = 8  # other numbers of channels go to the general form, which cuts anywhere

_NUM_SMS = 132  # of an H200; results should not depend on the machine
_NUM_BLOCKS = 2 * _NUM_SMS
_MAX_SPLITS = 64
_MIN_STEPS = 2  # a block should have some: it starts with an empty ring
# What another part costs, as a share of all: writing sums, and reading them again
_COST_OF_SPLIT = 0.004


# The same of the backward kernel: blocks that an SM holds, their channels, and the tokens of a step
_BACKWARD_BLOCKS = 3 * _NUM_SMS
_BACKWARD_CHANNELS = 256
_BACKWARD_STEP = 8
# Of a part, as a share of all for one token: fn's gradient, written and read in fp32; and of blocks that start
_COST_OF_PART, _COST_OF_WAVE = 32.0, 21.0
# The share of its places that keeps the memory as busy as all of them
_ENOUGH_BLOCKS = 0.85


def choose_num_splits(num_tokens: int, num_channels: int) -> int:
    """The number of parts that keeps an H200 busy: each block takes one part of 128 tokens, each SM two blocks."""
    return _remembered(_choose_num_splits, num_tokens, num_channels)


def choose_num_parts(num_tokens: int, num_channels: int) -> int:
    """The same for the tokens, over which the gradient of fn is summed up."""
    return _remembered(_choose_num_parts, num_tokens, num_channels)


_chosen: dict[tuple[Callable[[int, int], int], int, int], int] = {}
_MAX_CHOSEN = 4096


def _remembered(choose: Callable[[int, int], int], num_tokens: int, num_channels: int) -> int:
    """What `choose` said before: asking takes it as long as several launches. While tracing it is asked anew."""
    if type(num_tokens) is not int or torch.compiler.is_compiling():
        return choose(num_tokens, num_channels)
    key = choose, num_tokens, num_channels
    chosen = _chosen.get(key)
    if chosen is None:
        if len(_chosen) >= _MAX_CHOSEN:
            _chosen.clear()
        chosen = _chosen[key] = choose(num_tokens, num_channels)
    return chosen


def _choose_num_splits(num_tokens: int, num_channels: int) -> int:
    num_tiles = max(-(-num_tokens // _ROWS), 1)
    most = max(1, min(_MAX_SPLITS, num_channels // (_DEPTH * _MIN_STEPS)))
    return _find_fastest(num_tiles, most, _NUM_BLOCKS, 1.0, _COST_OF_SPLIT, 0.0)


def _choose_num_parts(num_tokens: int, num_channels: int) -> int:
    num_tiles = max(-(-num_channels // _BACKWARD_CHANNELS), 1)
    most = max(1, min(_MAX_SPLITS, num_tokens // (_BACKWARD_STEP * _MIN_STEPS)))
    costs = _COST_OF_PART / max(num_tokens, 1), _COST_OF_WAVE / max(num_tokens, 1)
    return _find_fastest(num_tiles, most, _BACKWARD_BLOCKS, _ENOUGH_BLOCKS, *costs)


def _find_fastest(
    num_tiles: int, most: int, num_blocks: int, enough: float, cost_of_split: float, cost_of_wave: float
) -> int:
    # A loop, because torch.compile does not follow `min` with a key.
    fastest, least = 1, math.inf
    for splits in range(1, most + 1):
        waves = -(-num_tiles * splits // num_blocks)
        busy = max(waves * enough, num_tiles * splits / num_blocks)
        relative_time = busy / splits * (1 + cost_of_split * splits) + cost_of_wave * waves
        if relative_time < least:
            fastest, least = splits, relative_time
    return fastest


def split_bounds(num_channels: int, num_splits: int, num_mixes: int) -> list[tuple[int, int]]:
    """First and last + 1 channel of each part, as the kernel cuts them."""
    depth = _DEPTH_OF_MANY if num_mixes >= _MANY_MIXES else _DEPTH
    unit = depth if num_channels % _ALIGNMENT == 0 else 1
    num_units = -(-num_channels // unit)
    cuts = [min(num_units * split // num_splits * unit, num_channels) for split in range(num_splits + 1)]
    return list(itertools.pairwise(cuts))
