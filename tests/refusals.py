"""Invalid calls as data: what is passed and what the error has to say, for tests that try many of them.

A refused call must raise one of the argument errors, name operator, argument, requirement and value, and leave every
tensor that it was given as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilekernels.errors import ArgumentError, ArgumentTypeError


@dataclass(frozen=True)
class Refusal:
    """One invalid call: `make(device)` builds the keyword arguments; `text` is a regular expression that the whole
    message has to match after `<operator>: `."""

    id: str
    make: Callable[[str], dict[str, Any]]
    text: str

    def check(self, name: str, operator: Callable[..., Any], device: str) -> None:
        kwargs = self.make(device)
        before = [(tensor, _bytes_of(tensor).clone()) for tensor in _tensors_in(kwargs.values())]
        try:
            operator(**kwargs)
        except (ArgumentError, ArgumentTypeError) as error:
            message = str(error)
        else:
            raise AssertionError(f"{name} took an invalid call")
        assert re.fullmatch(f"{re.escape(name)}: {self.text}", message, re.DOTALL), message
        for tensor, content in before:
            assert torch.equal(_bytes_of(tensor), content), "a refused call changed a tensor"


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided:
                yield value
        elif isinstance(value, tuple | list):
            yield from _tensors_in(value)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage, so that bytes beside a view count too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
