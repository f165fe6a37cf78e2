"""What can go wrong in a build. Each error is one sentence that a person can act on, then details indented below it."""

from __future__ import annotations


class BuildError(Exception):
    """Base of all errors that a build reports: `str(error)` is meant for the person at the terminal."""


class ExpressionError(BuildError):
    """A text outside the expression language of shapes, grids and guards."""


class PlanError(BuildError):
    """A profile or a kernel declaration from which no matrix can be made."""


class TraceError(BuildError):
    """A variant that TileLang does not lower, or that lowers to what the runtime cannot launch."""


class CodegenError(BuildError):
    """A manifest from which no C++ can be made."""


class EmbedError(BuildError):
    """A store that does not hold what its manifest says."""
