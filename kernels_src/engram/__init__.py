"""Engram: n-gram hashes, the gate between them and the residual streams, and the optimiser of its tables."""
