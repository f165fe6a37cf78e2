"""Manifold hyper-connections: streams of residuals, their mixes and their norms."""
