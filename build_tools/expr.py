"""The expression language of launch.json: shapes, strides, grids and guards as text that is valid Python.

Trace prints TIR into it, codegen turns it into C++, tests evaluate it. Integers are int64; names are symbols, scalar
parameters and, in the three calls about tensors, tensors. `names`, `evaluate` and `to_cpp` accept what `parse` accepts.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from typing import Any

from .errors import ExpressionError

# Calls on integers: number of arguments and meaning. Shifts and floor division are those of Python.
_CALLS: dict[str, tuple[int, Callable[..., int]]] = {
    "floordiv": (2, lambda a, b: a // b),
    "floormod": (2, lambda a, b: a % b),
    "min": (2, min),
    "max": (2, max),
    "select": (3, lambda condition, a, b: a if condition else b),
    "and_": (2, lambda a, b: bool(a) and bool(b)),
    "or_": (2, lambda a, b: bool(a) or bool(b)),
    "not_": (1, lambda a: not a),
    "shr": (2, lambda a, b: a >> b),
    "shl": (2, lambda a, b: a << b),
}
# Calls that ask something of a tensor: its name, then this many further arguments.
TENSOR_CALLS = {"aligned": 1, "is_null": 0, "is_dtype": 1}

# Names that no symbol, scalar or tensor may have
RESERVED_NAMES = frozenset((*_CALLS, *TENSOR_CALLS))

_BINARY: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", lambda a, b: a + b),
    ast.Sub: ("-", lambda a, b: a - b),
    ast.Mult: ("*", lambda a, b: a * b),
}
_COMPARE: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", lambda a, b: a == b),
    ast.NotEq: ("!=", lambda a, b: a != b),
    ast.Lt: ("<", lambda a, b: a < b),
    ast.LtE: ("<=", lambda a, b: a <= b),
    ast.Gt: (">", lambda a, b: a > b),
    ast.GtE: (">=", lambda a, b: a >= b),
}
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1

TensorCall = Callable[[str, str, Any], Any]


@functools.cache
def parse(text: str) -> ast.expr:
    """The checked syntax tree of `text`; ExpressionError names what is not in the language."""
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ExpressionError(f"expression {text!r} is not valid: {error.msg}") from None
    _check(tree, text)
    return tree


def names(text: str) -> set[str]:
    """The symbols and scalars in `text`; tensors of aligned, is_null and is_dtype are not among them."""
    return _names(parse(text))


def tensors(text: str) -> set[str]:
    """The tensors that aligned, is_null and is_dtype ask about in `text`."""
    calls = (node for node in ast.walk(parse(text)) if isinstance(node, ast.Call))
    return {_tensor(call) for call in calls if _function(call) in TENSOR_CALLS}


def evaluate(text: str, env: Mapping[str, int | float], tensor_call: TensorCall | None = None) -> int:
    """The value of `text`. `tensor_call(function, tensor, argument or None)` answers aligned, is_null and is_dtype."""
    value: int = _evaluate(parse(text), env, tensor_call, text)
    return value


def to_cpp(text: str, name_of: Callable[[str], str], tensor_call: TensorCall | None = None) -> str:
    """`text` as a C++ expression; `name_of(name)` must be an int64_t expression that binds tighter than `*`.

    `tensor_call(function, tensor, argument or None)` gives the C++ of aligned, is_null and is_dtype. The helpers
    (floordiv, min, select ...) are expected in namespace tk.
    """
    return _cpp(parse(text), name_of, tensor_call, text)


# ---- checking ------------------------------------------------------------------------------------------------------


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Constant(value=int(value)) if -_INT64_MAX - 1 <= value <= _INT64_MAX:
            return
        case ast.Name():
            return
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            _check(operand, text)
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
            _check(left, text)
            _check(right, text)
        case ast.Compare(left=left, ops=[operator], comparators=[right]) if type(operator) in _COMPARE:
            _check(left, text)
            _check(right, text)
        case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]) if function in _CALLS:
            if len(arguments) != _CALLS[function][0]:
                raise ExpressionError(
                    f"{function} takes {_CALLS[function][0]} arguments, got {len(arguments)} in {text!r}"
                )
            for argument in arguments:
                _check(argument, text)
        case ast.Call(func=ast.Name(id=function), args=[ast.Name(), *rest], keywords=[]) if function in TENSOR_CALLS:
            if len(rest) != TENSOR_CALLS[function]:
                raise ExpressionError(f"{function} takes a tensor and {TENSOR_CALLS[function]} arguments in {text!r}")
            _tensor_argument(node, text)
        case _:
            raise ExpressionError(f"{ast.unparse(node)!r} is not in the expression language, in {text!r}")


def _tensor_argument(call: ast.Call, text: str) -> int | str | None:
    """The bytes of aligned, the dtype of is_dtype, None for is_null."""
    match _function(call), call.args[1:]:
        case "aligned", [ast.Constant(value=int(bytes_))] if bytes_ > 0:
            return bytes_
        case "is_dtype", [ast.Name(id=dtype)]:
            return dtype
        case "is_null", []:
            return None
    raise ExpressionError(
        f"{ast.unparse(call)!r} must be aligned(tensor, bytes), is_null(tensor) or is_dtype(tensor, dtype), in {text!r}"
    )


def _function(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Name)
    return call.func.id


def _tensor(call: ast.Call) -> str:
    assert isinstance(call.args[0], ast.Name)
    return call.args[0].id


# ---- reading -------------------------------------------------------------------------------------------------------


def _names(node: ast.expr) -> set[str]:
    match node:
        case ast.Name(id=name):
            return {name}
        case ast.Call() if _function(node) in TENSOR_CALLS:
            return set()
        case ast.Call(args=arguments):
            return set().union(*map(_names, arguments))
        case ast.UnaryOp(operand=operand):
            return _names(operand)
        case ast.BinOp(left=left, right=right) | ast.Compare(left=left, comparators=[right]):
            return _names(left) | _names(right)
    return set()


def _evaluate(node: ast.expr, env: Mapping[str, Any], tensor_call: TensorCall | None, text: str) -> Any:
    def value(child: ast.expr) -> Any:
        return _evaluate(child, env, tensor_call, text)

    match node:
        case ast.Constant(value=constant):
            return constant
        case ast.Name(id=name):
            if name not in env:
                raise ExpressionError(f"{name} has no value, in {text!r}")
            return env[name]
        case ast.UnaryOp(operand=operand):
            return -value(operand)
        case ast.BinOp(left=left, op=operator, right=right):
            return _BINARY[type(operator)][1](value(left), value(right))
        case ast.Compare(left=left, ops=[comparison], comparators=[right]):
            return _COMPARE[type(comparison)][1](value(left), value(right))
        case ast.Call() if _function(node) in TENSOR_CALLS:
            if tensor_call is None:
                raise ExpressionError(f"{ast.unparse(node)} cannot be answered without a tensor, in {text!r}")
            return tensor_call(_function(node), _tensor(node), _tensor_argument(node, text))
        case ast.Call(args=arguments):
            return _CALLS[_function(node)][1](*map(value, arguments))
    raise ExpressionError(f"{ast.unparse(node)!r} is not in the expression language, in {text!r}")


# ---- C++ -----------------------------------------------------------------------------------------------------------


def _cpp(node: ast.expr, name_of: Callable[[str], str], tensor_call: TensorCall | None, text: str) -> str:
    def cpp(child: ast.expr) -> str:
        return _cpp(child, name_of, tensor_call, text)

    def operand(child: ast.expr) -> str:
        """`child` in parentheses where it is an operation itself."""
        return (
            f"({cpp(child)})" if isinstance(child, ast.BinOp | ast.Compare) and not _is_constant(child) else cpp(child)
        )

    match node:
        # Folded here: C++ would compute literals in int
        case _ if _is_constant(node):
            return _cpp_literal(_evaluate(node, {}, None, text))
        case ast.Name(id=name):
            return name_of(name)
        case ast.UnaryOp(operand=inner):
            return f"-({cpp(inner)})"
        case ast.BinOp(left=left, op=operator, right=right):
            return f"{operand(left)} {_BINARY[type(operator)][0]} {operand(right)}"
        case ast.Compare(left=left, ops=[comparison], comparators=[right]):
            return f"{operand(left)} {_COMPARE[type(comparison)][0]} {operand(right)}"
        case ast.Call() if _function(node) in TENSOR_CALLS:
            if tensor_call is None:
                raise ExpressionError(f"{ast.unparse(node)} asks about a tensor where none may stand, in {text!r}")
            return str(tensor_call(_function(node), _tensor(node), _tensor_argument(node, text)))
        case ast.Call(func=ast.Name(id="and_" | "or_" as function), args=[left, right]):
            return f"({cpp(left)} {'&&' if function == 'and_' else '||'} {cpp(right)})"
        case ast.Call(func=ast.Name(id="not_"), args=[inner]):
            return f"!({cpp(inner)})"
        case ast.Call(args=arguments):
            return f"tk::{_function(node)}({', '.join(map(cpp, arguments))})"
    raise ExpressionError(f"{ast.unparse(node)!r} is not in the expression language, in {text!r}")


def _is_constant(node: ast.expr) -> bool:
    return not any(
        isinstance(child, ast.Call) and _function(child) in TENSOR_CALLS for child in ast.walk(node)
    ) and not _names(node)


def _cpp_literal(value: int) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if -_INT32_MAX <= value <= _INT32_MAX else f"INT64_C({value})"
