"""Blanking of the unused bytes of packed scales."""

from ...testing.quant import clear_unused_sf as clear_unused_sf
