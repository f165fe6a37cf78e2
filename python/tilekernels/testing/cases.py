"""What an operator says about itself in `bench_cases()`: one call with its inputs and the bytes it has to move.

Read by the generic tests over all operators and by the benchmarks, so that neither holds a list of operators.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BenchCase"]


@dataclass(frozen=True)
class BenchCase:
    """One call of a public operator."""

    operator: str  # "moe.topk_gate"; the public function is tilekernels.moe.topk_gate
    params: dict[str, Any]  # what tells this case from the others: printed, and the benchmark's key
    make: Callable[[Any], dict[str, Any]] = field(repr=False)  # device -> keyword arguments of the call, freshly made
    bytes: int  # read once plus written once: what a perfect kernel moves
    max_diff: float = 0.0  # by calc_diff, of a GPU's floating-point results from the reference's; 0: the same bytes

    @property
    def id(self) -> str:
        """A readable test id: `moe.topk_gate[num_tokens=8-num_experts=64]`."""
        return f"{self.operator}[{'-'.join(f'{name}={value}' for name, value in self.params.items())}]"
