"""Generation 1's public names: which `tilekernels.v1` has, with the arguments that callers pass by name or place.

surface.json holds them: module -> name -> parameters as they were written, null for what is no plain function. Left out
are kernel factories, their modules and internal helpers; the operators of two such modules stand under `quant`.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SURFACE: dict[str, dict[str, str | None]] = json.loads((Path(__file__).parent / "surface.json").read_text())
NAMES = [(module, name) for module, names in SURFACE.items() for name in names]

# Not there yet, module by module; "*" is all of one. This list only ever shrinks: what exists must not stand here.
MISSING: dict[str, tuple[str, ...]] = {}


def find_module(module: str) -> ModuleType | None:
    try:
        return importlib.import_module("tilekernels.v1" + (f".{module}" if module else ""))
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("tilekernels.v1."):
            return None
        raise


def is_missing(module: str, name: str) -> bool:
    listed = MISSING.get(module, ())
    return "*" in listed or name in listed


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda part: part or "v1")
def test_name_is_there_or_listed_as_missing(module: str, name: str) -> None:
    found = find_module(module)
    exists = found is not None and hasattr(found, name)
    if is_missing(module, name):
        assert not exists, f"v1.{module}.{name} exists: take it off MISSING"
    else:
        assert exists, f"v1.{module}.{name} is missing"
        check_parameters(getattr(found, name), SURFACE[module][name])


def test_missing_names_are_known() -> None:
    assert set(MISSING) <= set(SURFACE)
    for module, names in MISSING.items():
        assert set(names) - {"*"} <= set(SURFACE[module])


def check_parameters(function: Any, written: str | None) -> None:
    """The same parameters in the same order, with the same defaults; more may follow if they have a default."""
    if written is None:
        return
    expected = list(inspect.signature(eval(f"lambda {written}: None", {"torch": torch})).parameters.values())
    actual = list(inspect.signature(function).parameters.values())
    assert list(map(describe, actual[: len(expected)])) == list(map(describe, expected))
    assert all(each.default is not inspect.Parameter.empty for each in actual[len(expected) :])


def describe(parameter: inspect.Parameter) -> tuple[Any, ...]:
    return parameter.name, parameter.kind, parameter.default
