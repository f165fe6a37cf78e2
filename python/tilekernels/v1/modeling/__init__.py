"""Autograd functions over the operators."""

from . import mhc as mhc
