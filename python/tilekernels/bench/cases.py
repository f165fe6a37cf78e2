"""The calls that operators list in bench_cases(), found by walking the installed package, and choosing among them."""

from __future__ import annotations

import fnmatch
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ArgumentError
from ..testing.cases import BenchCase

__all__ = ["Call", "Choice", "choose_calls", "find_calls"]

_NO_FAMILIES = ("bench", "cli", "modeling", "testing", "v1")

# Parameters by which --tokens, --hidden and --dtype choose; of a `shape`, the first and the last size.
_TOKENS, _HIDDEN = ("num_tokens", "num_rows", "m"), ("hidden", "num_cols", "num_columns")
_DTYPES = ("in", "out", "fmt", "dtype", "grad", "momentum")
_LONG_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "e4m3": "float8_e4m3fn"}


@dataclass(frozen=True)
class Call:
    """One case of an operator, with the operator and its plain torch version."""

    case: BenchCase
    operator: Callable[..., Any]
    reference: Callable[..., Any]


@dataclass(frozen=True)
class Choice:
    """What is asked for; an empty tuple asks for all. Operators are names or patterns such as `quant.*`."""

    operators: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    largest_only: bool = False  # of each operator


def find_calls() -> list[Call]:
    """Every call that an operator file of the installed package lists."""
    root = importlib.import_module("tilekernels")
    calls = []
    for family in pkgutil.iter_modules(root.__path__):
        if not family.ispkg or family.name in _NO_FAMILIES:
            continue
        package = importlib.import_module(f"tilekernels.{family.name}")
        for file in pkgutil.iter_modules(package.__path__):
            if not file.name.startswith("_"):
                module = importlib.import_module(f"{package.__name__}.{file.name}")
                calls += [_make_call(module, case) for case in module.bench_cases()]
    return calls


def _make_call(module: Any, case: BenchCase) -> Call:
    name = case.operator.partition(".")[2]
    return Call(case, getattr(module, name), getattr(module, f"{name}_ref"))


def choose_calls(calls: Sequence[Call], choice: Choice) -> list[Call]:
    """The calls that were asked for. Raises ArgumentError where nothing fits, with what there is."""
    names = sorted({call.case.operator for call in calls})
    for pattern in choice.operators:
        if not fnmatch.filter(names, pattern):
            raise ArgumentError(f"bench: no operator is called {pattern!r}; there are {', '.join(names)}")
    found = [call for call in calls if _is_of(call, choice.operators)]
    for what, wanted, values_of in (
        ("tokens", choice.tokens, _tokens),
        ("hidden", choice.hidden, _hidden),
        ("dtype", tuple(map(_long_name, choice.dtypes)), _dtypes),
    ):
        if wanted:
            there_is = sorted({str(value) for call in found for value in values_of(call.case.params)})
            found = [call for call in found if set(values_of(call.case.params)) & set(wanted)]
            if not found:
                raise ArgumentError(f"bench: no call has {what} {_join(wanted)}; there are {_join(there_is)}")
    return _largest(found) if choice.largest_only else found


def _is_of(call: Call, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(call.case.operator, pattern) for pattern in patterns)


def _largest(calls: Sequence[Call]) -> list[Call]:
    largest: dict[str, Call] = {}
    for call in calls:
        name = call.case.operator
        if name not in largest or call.case.bytes > largest[name].case.bytes:
            largest[name] = call
    return list(largest.values())


def _tokens(params: dict[str, Any]) -> list[int]:
    return [params[name] for name in _TOKENS if name in params] + list(params.get("shape", []))[:1]


def _hidden(params: dict[str, Any]) -> list[int]:
    return [params[name] for name in _HIDDEN if name in params] + list(params.get("shape", []))[-1:]


def _dtypes(params: dict[str, Any]) -> list[str]:
    return [_long_name(str(params[name]).removeprefix("torch.")) for name in _DTYPES if name in params]


def _long_name(dtype: str) -> str:
    return _LONG_NAMES.get(dtype, dtype)


def _join(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values)) or "none"
