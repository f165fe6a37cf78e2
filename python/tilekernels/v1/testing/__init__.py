"""Comparison, input generation and reports of generation 1's tests."""

from .quant import clear_unused_sf as clear_unused_sf
