"""The scoring functions of the expert gates."""

from ...moe.scoring import ScoringFunc as ScoringFunc
