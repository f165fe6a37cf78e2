"""TIR expressions of host-side integers, printed in the language of expr.py.

Nodes are told apart by the names of their classes, so that only trace.py imports TileLang.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterable
from typing import Any

from .errors import TraceError
from .expr import RESERVED_NAMES

_SUM, _PRODUCT, _ATOM = 1, 2, 3  # how tightly a printed text binds; 0 is a comparison

_INFIX = {"Add": ("+", _SUM), "Sub": ("-", _SUM), "Mul": ("*", _PRODUCT)}
_COMPARE = {"EQ": "==", "NE": "!=", "LT": "<", "LE": "<=", "GT": ">", "GE": ">="}
# Sizes are not negative, so TIR's truncating division is floor division
_CALL = {
    "FloorDiv": "floordiv", "Div": "floordiv", "FloorMod": "floormod", "Mod": "floormod",
    "Min": "min", "Max": "max", "And": "and_", "Or": "or_",
}  # fmt: skip
_INTRINSIC = {
    "tirx.if_then_else": "select", "tirx.shift_right": "shr", "tirx.shift_left": "shl",
}  # fmt: skip
_TRANSPARENT = ("tirx.likely", "tirx.annotate")


Walk = Callable[[Any], list[Any]]  # all nodes of a statement or expression, children first


def operator_of(node: Any) -> str:
    """The name of a call's operator, such as tirx.isnullptr; empty for other nodes."""
    return str(getattr(node.op, "name", "")) if type(node).__name__ == "Call" else ""


class VarNames:
    """Names by TIR variable, compared as objects: different variables may share a name."""

    def __init__(self, named: Iterable[tuple[Any, str]] = ()) -> None:
        self._names: dict[int, tuple[Any, str]] = {}
        for var, name in named:
            self.add(var, name)

    def add(self, var: Any, name: str) -> None:
        self._names[hash(var)] = (var, name)  # keeps the variable alive, so that its hash stays its own

    def find(self, var: Any) -> str | None:
        found = self._names.get(hash(var))
        return found[1] if found else None

    def all_of(self, variables: Iterable[Any]) -> bool:
        """Whether every one of `variables` has a name."""
        return all(self.find(var) is not None for var in variables)


class Printer:
    """Prints expressions over named variables. `simplify` is TVM's: it folds `n + 64 - 1`."""

    def __init__(self, names: VarNames, simplify: Callable[[Any], Any]) -> None:
        self.names = names
        self.simplify = simplify

    def text(self, expression: Any, what: str) -> str:
        """The text of `expression`; `what` says in errors what it is."""
        if isinstance(expression, int):
            return str(expression)
        try:
            return self._print(self.simplify(expression))[0]
        except _Unprintable as problem:
            raise TraceError(f"{what} is {expression}, in which {problem}") from None

    def number(self, expression: Any, what: str) -> int:
        """The value of an expression that must be constant."""
        text = self.text(expression, what)
        try:
            return int(text)
        except ValueError:
            raise TraceError(f"{what} must be a constant, got {text}") from None

    def _print(self, node: Any) -> tuple[str, int]:
        kind = type(node).__name__
        if kind == "IntImm":
            text = str(bool(node.value)) if str(node.dtype) == "bool" else str(node.value)
            return text, _ATOM if node.value >= 0 else _SUM
        if kind in ("Var", "SizeVar"):
            name = self.names.find(node)
            if name is None:
                raise _Unprintable(f"{node} is neither a scalar parameter nor a size or stride of a tensor")
            return name, _ATOM
        if kind in _INFIX:
            symbol, level = _INFIX[kind]
            return f"{self._operand(node.a, level)} {symbol} {self._operand(node.b, level + (kind != 'Mul'))}", level
        if kind in _COMPARE:
            return f"{self._operand(node.a, _SUM)} {_COMPARE[kind]} {self._operand(node.b, _SUM)}", 0
        if kind in _CALL:
            return self._call(_CALL[kind], node.a, node.b), _ATOM
        if kind == "Not":
            return self._call("not_", node.a), _ATOM
        if kind == "Select":
            return self._call("select", node.condition, node.true_value, node.false_value), _ATOM
        if kind == "Cast" and _is_integer(node.dtype) and _is_integer(node.value.dtype):
            return self._print(node.value)  # all arithmetic is int64 here
        if kind == "Call":
            return self._intrinsic(node)
        raise _Unprintable(f"{node} ({kind} {getattr(node, 'dtype', '')}) has no counterpart in launch expressions")

    def _operand(self, node: Any, at_least: int) -> str:
        text, level = self._print(node)
        return text if level >= at_least else f"({text})"

    def _call(self, function: str, *arguments: Any) -> str:
        return f"{function}({', '.join(self._print(argument)[0] for argument in arguments)})"

    def _intrinsic(self, node: Any) -> tuple[str, int]:
        name = operator_of(node)
        if name in _TRANSPARENT:
            return self._print(node.args[0])
        if name in _INTRINSIC:
            return self._call(_INTRINSIC[name], *node.args), _ATOM
        # x & (2**k - 1): what TVM makes of a modulus
        if name == "tirx.bitwise_and" and type(node.args[1]).__name__ == "IntImm" and _is_mask(node.args[1].value):
            return f"floormod({self._print(node.args[0])[0]}, {node.args[1].value + 1})", _ATOM
        raise _Unprintable(f"{name or node.op} has no counterpart in launch expressions")


class _Unprintable(Exception):
    """Why a node cannot be printed."""


def check_name(name: str, what: str) -> None:
    """Raise TraceError for a name that cannot stand in an expression."""
    if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED_NAMES:
        raise TraceError(f"{what} is named {name!r}, which means something else in launch expressions: rename it")


def _is_integer(dtype: Any) -> bool:
    return str(dtype).startswith(("int", "uint", "bool"))


def _is_mask(value: int) -> bool:
    return value > 0 and value & (value + 1) == 0
