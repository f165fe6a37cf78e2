"""The scoring functions of the expert gates, by number and by name."""

from __future__ import annotations

from enum import IntEnum

from ..testing.cases import BenchCase


class ScoringFunc(IntEnum):
    """How logits become scores. `str()` is the lower-case name, which the gates take."""

    SIGMOID = 0
    SQRTSOFTPLUS = 1
    SOFTMAX = 2
    IDENTITY = 3

    @classmethod
    def from_str(cls, label: str) -> ScoringFunc:
        """The function of that name, in any case of letters; ValueError for other names."""
        for member in cls:
            if member.name.lower() == str(label).lower():
                return member
        names = ", ".join(str(member) for member in cls)
        raise ValueError(f"moe.ScoringFunc: label must be one of {names}, got {label!r}")

    def __str__(self) -> str:
        return self.name.lower()


def bench_cases() -> list[BenchCase]:
    """None: names only, no operator."""
    return []
