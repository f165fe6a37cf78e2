"""How a function of this package, or a thin older form over it, becomes one of generation 1.

Generation 1 checks arguments by `assert`, and callers catch AssertionErrors. `asserting` is the one place that
translates; everything else that v1 exports is the function of the main package itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from ..errors import ArgumentError, ArgumentTypeError

_Function = TypeVar("_Function", bound=Callable[..., object])


class AssertedArgumentError(ArgumentError, AssertionError):
    """`ArgumentError` for callers that catch AssertionErrors."""


class AssertedArgumentTypeError(ArgumentTypeError, AssertionError):
    """`ArgumentTypeError` for callers that catch AssertionErrors."""


def asserting(operator: _Function) -> _Function:
    """The same function with the same signature; the argument errors that it raises are AssertionErrors too."""

    @functools.wraps(operator)
    def form(*args: object, **kwargs: object) -> object:
        try:
            return operator(*args, **kwargs)
        except ArgumentError as error:
            raise AssertedArgumentError(*error.args).with_traceback(error.__traceback__) from None
        except ArgumentTypeError as error:
            raise AssertedArgumentTypeError(*error.args).with_traceback(error.__traceback__) from None

    return form  # type: ignore[return-value]
