"""Small pieces of generated text: names, expressions in C++ and in the words of a message, shapes of a parameter."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import expr
from .codegen_model import Kernel, Param

SCALAR_FIELDS = {"float32": "f32", "float64": "f64", "int32": "i32", "int64": "i64", "bool": "b"}

# words of C, C++ and this generator that a parameter may be called
_RESERVED = frozenset((
    "alignas", "alignof", "and", "asm", "auto", "bool", "break", "case", "catch", "char", "class", "compl",
    "concept", "const", "constexpr", "continue", "decltype", "default", "delete", "do", "double", "else",
    "enum", "explicit", "export", "extern", "false", "float", "for", "friend", "goto", "if", "inline", "int",
    "long", "mutable", "namespace", "new", "noexcept", "not", "nullptr", "operator", "or", "private",
    "protected", "public", "register", "requires", "restrict", "return", "short", "signed", "size", "sizeof",
    "static", "struct", "switch", "template", "this", "throw", "true", "try", "typedef", "typeid", "typename",
    "union", "unsigned", "using", "virtual", "void", "volatile", "while", "xor",
))  # fmt: skip


def identifier(name: str) -> str:
    """`name` as a field or enumerator of C and C++: `size_` where the plain name has a meaning."""
    return f"{name}_" if name in _RESERVED else name


def tensor(name: str) -> str:
    return f"Tensor::{identifier(name)}"


def scalar(name: str) -> str:
    return f"Scalar::{identifier(name)}"


def symbol(name: str) -> str:
    return f"Symbol::{identifier(name)}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=True)


def cpp_bool(value: bool) -> str:
    return "true" if value else "false"


def cpp_dtype(name: str | None) -> str:
    """The enumerator of DType in registry.h."""
    return {None: "none", "bool": "bool_"}.get(name) or str(name)


def tuple_of(items: Iterable[str]) -> str:
    """`(a, b)`, `(a,)`: as Python prints a shape."""
    words = list(items)
    return f"({', '.join(words)}{',' if len(words) == 1 else ''})"


# ---- expressions ---------------------------------------------------------------------------------------------------


def cpp(kernel: Kernel, text: str) -> str:
    """`text` in C++, over the Frame `frame` of the function that it stands in."""

    def name_of(name: str) -> str:
        if name in kernel.derived:
            return f"int64_t{{{cpp(kernel, kernel.derived[name])}}}"
        if name in kernel.symbols:
            return f"frame.symbols[{symbol(name)}]"
        return scalar_value(kernel.param(name))

    def tensor_call(function: str, name: str, argument: Any) -> str:
        view = f"frame.tensors[{tensor(name)}]"
        match function:
            case "aligned":
                return f"aligned({view}, {argument})"
            case "is_dtype":
                return f"is_dtype({view}, DType::{cpp_dtype(argument)})"
        return f"is_null({view})"

    return expr.to_cpp(text, name_of, tensor_call)


def scalar_value(param: Param) -> str:
    """A scalar parameter in an expression."""
    field = f"frame.scalars[{scalar(param.name)}].{SCALAR_FIELDS[param.dtypes[0]]}"
    return {"int32": f"int64_t{{{field}}}", "bool": f"int64_t{{{field} != 0}}"}.get(param.dtypes[0], field)


def readable(text: str) -> str:
    """`text` for a person: `hidden // 2`, `alignment of x to 16 bytes`."""
    return _readable(expr.parse(text))


def _readable(node: ast.expr) -> str:
    def operand(child: ast.expr) -> str:
        words = _readable(child)
        is_call = isinstance(child, ast.Call) and words.startswith(("min(", "max(", "select("))
        return words if is_call or isinstance(child, ast.Name | ast.Constant) else f"({words})"

    match node:
        case ast.Call(func=ast.Name(id="floordiv" | "floormod" | "shl" | "shr" as function), args=[left, right]):
            sign = {"floordiv": "//", "floormod": "%", "shl": "<<", "shr": ">>"}[function]
            return f"{operand(left)} {sign} {operand(right)}"
        case ast.Call(func=ast.Name(id="and_" | "or_" as function), args=[left, right]):
            return f"{_readable(left)} {function[:-1]} {_readable(right)}"
        case ast.Call(func=ast.Name(id="not_"), args=[inner]):
            return f"not ({_readable(inner)})"
        case ast.Call(func=ast.Name(id="aligned"), args=[ast.Name(id=name), bytes_]):
            return f"alignment of {name} to {_readable(bytes_)} bytes"
        case ast.Call(func=ast.Name(id="is_null"), args=[ast.Name(id=name)]):
            return f"{name} is None"
        case ast.Call(func=ast.Name(id="is_dtype"), args=[ast.Name(id=name), ast.Name(id=dtype)]):
            return f"{name} is {dtype}"
        case ast.Call(func=ast.Name(id=function), args=arguments):
            return f"{function}({', '.join(map(_readable, arguments))})"
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return f"{operand(left)} * {operand(right)}"
        case ast.BinOp(left=left, op=operator, right=right):
            return f"{_readable(left)} {'+' if isinstance(operator, ast.Add) else '-'} {operand(right)}"
        case ast.Compare(left=left, ops=[comparison], comparators=[right]):
            sign = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}[
                type(comparison)
            ]
            return f"{_readable(left)} {sign} {_readable(right)}"
    return ast.unparse(node)


def symbols_in(text: str, kernel: Kernel) -> list[str]:
    """The symbols that `text` reads, those behind derived scalars included."""
    names = expr.names(text)
    found = {name for name in names if name in kernel.symbols}
    for name in names & kernel.derived.keys():
        found |= set(symbols_in(kernel.derived[name], kernel))
    return sorted(found, key=kernel.symbols.index)


def outputs_asked(text: str, kernel: Kernel) -> list[str]:
    """Written tensors whose dtype or presence `text` asks for; not alignment, since an absent tensor is aligned."""
    found: set[str] = set()
    for node in ast.walk(expr.parse(text)):
        match node:
            case ast.Call(func=ast.Name(id="is_null" | "is_dtype"), args=[ast.Name(id=name), *_]):
                found.add(name)
    for name in expr.names(text) & kernel.derived.keys():
        found |= set(outputs_asked(kernel.derived[name], kernel))
    return [param.name for param in kernel.tensors if param.written and param.name in found]


# ---- shapes --------------------------------------------------------------------------------------------------------


def extents(entry: Mapping[str, Any], part: str) -> tuple[str, ...]:
    """The expressions of a tensor's shape or strides in one variant; strides left out are those of a dense tensor."""
    shape = tuple(entry["shape"])
    if part == "shape":
        return shape
    strides = entry["strides"] or [""] * len(shape)
    return tuple(text or _dense(shape[axis + 1 :]) for axis, text in enumerate(strides))


def _dense(inner: Sequence[str]) -> str:
    if len(inner) == 1:
        return inner[0]
    return " * ".join(text if text.isidentifier() or text.isdigit() else f"({text})" for text in inner) or "1"
