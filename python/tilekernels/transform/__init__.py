"""Transforms of attention heads."""

from .apply_rotary import apply_rotary as apply_rotary
