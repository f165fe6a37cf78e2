"""Transforms of attention heads."""
