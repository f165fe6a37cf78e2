"""Recomputation of many layers; it runs in backward passes and has no gradient of its own."""

from ....mhc.multilayer_recompute import mhc_multilayer_recompute as mhc_multilayer_recompute
