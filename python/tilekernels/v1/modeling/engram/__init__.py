"""The engram gate with gradients, keys and values in tensors of their own."""

from .engram_gate import EngramGateFn as EngramGateFn
from .engram_gate import engram_gate as engram_gate
