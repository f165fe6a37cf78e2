"""Mixture of experts: routing."""
