"""Casts to FP8, FP4 and e5m6 with scale factors."""
