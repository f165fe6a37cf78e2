"""Transposes of matrices as raw elements."""
