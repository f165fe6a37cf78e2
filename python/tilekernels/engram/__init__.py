"""Engram: n-gram hashes, the gate between them and the residual streams, and the optimiser of its tables."""

from .engram_gate import engram_gate_bwd as engram_gate_bwd
from .engram_gate import engram_gate_fwd as engram_gate_fwd
from .engram_hash import engram_hash as engram_hash
from .engram_sinkhorn import engram_sinkhorn_finalize as engram_sinkhorn_finalize
from .engram_sinkhorn import engram_sinkhorn_momentum_update as engram_sinkhorn_momentum_update
from .engram_sinkhorn import engram_sinkhorn_step as engram_sinkhorn_step
from .engram_sinkhorn import engram_sinkhorn_step_reduce as engram_sinkhorn_step_reduce
from .fused_weight import fused_weight as fused_weight
from .grad_w_reduce import grad_w_reduce as grad_w_reduce
