"""The version of this package; an installed wheel's metadata adds the CUDA and GPU label to it (0.1.0+cu130.sm90a)."""

__version__ = "0.1.0"
