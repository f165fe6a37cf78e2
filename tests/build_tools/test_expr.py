"""The expression language: what it accepts, its values, and that the C++ text means the same as the Python value."""

import random
import subprocess
from pathlib import Path

import pytest

from build_tools import expr
from build_tools.errors import ExpressionError

ENV = {"n": 100, "m": 7, "big": 2**40, "zero": 0}

VALUES = [
    ("floordiv(n + 63, 64)", 2),
    ("n * m - 3 * (m - 2)", 685),
    ("floormod(n, 8) == 4", True),
    ("select(n > m, min(n, 50), max(n, 50))", 50),
    ("and_(n > 1, not_(m == 7))", False),
    ("or_(n < 1, m <= 7)", True),
    ("shr(n, 3) + shl(m, 2)", 40),
    ("big * 4", 2**42),
    ("2147483647 + 1 + zero", 2**31),
    ("-m", -7),
    ("n != m", True),
    ("True", True),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_value(text: str, value: int) -> None:
    assert expr.evaluate(text, ENV) == value


def test_names_and_tensors() -> None:
    text = "and_(aligned(x, 16), or_(is_null(weight), select(is_dtype(out, int32), n, m) > floordiv(k, 2)))"
    assert expr.names(text) == {"n", "m", "k"}
    assert expr.tensors(text) == {"x", "weight", "out"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("n // 2", "'n // 2' is not in the expression language"),
        ("n + ", "is not valid"),
        ("0 < n < 5", "'0 < n < 5' is not in the expression language"),
        ("1.5 * n", "'1.5' is not in the expression language"),
        ("open('x')", "is not in the expression language"),
        ("min(n)", "min takes 2 arguments, got 1"),
        ("aligned(x, n)", "must be aligned(tensor, bytes)"),
        ("aligned(x)", "aligned takes a tensor and 1 arguments"),
        ("is_dtype(x, 3)", "must be aligned(tensor, bytes), is_null(tensor) or is_dtype(tensor, dtype)"),
        ("x.shape", "'x.shape' is not in the expression language"),
        ("9223372036854775808", "is not in the expression language"),
    ],
)
def test_refused(text: str, problem: str) -> None:
    with pytest.raises(ExpressionError) as error:
        expr.parse(text)
    assert problem in str(error.value)
    assert text in str(error.value)


def test_name_without_value() -> None:
    with pytest.raises(ExpressionError, match="k has no value, in 'n \\+ k'"):
        expr.evaluate("n + k", ENV)


def test_tensor_calls_are_answered_by_the_caller() -> None:
    asked = []

    def answer(*question: object) -> bool:
        asked.append(question)
        return True

    assert expr.evaluate("and_(aligned(x, 16), is_dtype(out, int32))", {}, answer) is True
    assert asked == [("aligned", "x", 16), ("is_dtype", "out", "int32")]
    with pytest.raises(ExpressionError, match="cannot be answered without a tensor"):
        expr.evaluate("is_null(x)", {})


@pytest.mark.parametrize(
    ("text", "cpp"),
    [
        ("floordiv(n + 63, 64)", "tk::floordiv(S(n) + 63, 64)"),
        ("n * (m - 1) * 4", "(S(n) * (S(m) - 1)) * 4"),
        ("1024 * 1024 * 1024 * 4 + n", "INT64_C(4294967296) + S(n)"),
        ("and_(n == 0, not_(m > 3))", "(S(n) == 0 && !(S(m) > 3))"),
        ("or_(is_null(x), is_dtype(x, int8))", "(is_null:x:None || is_dtype:x:int8)"),
        ("select(n > 3, min(n, 4), 0)", "tk::select(S(n) > 3, tk::min(S(n), 4), 0)"),
    ],
)
def test_cpp(text: str, cpp: str) -> None:
    assert expr.to_cpp(text, "S({})".format, lambda *call: ":".join(map(str, call))) == cpp


# What codegen's helpers mean; the runtime has its own copies.
HELPERS = """
#include <cinttypes>
#include <cstdint>
#include <cstdio>
namespace tk {
int64_t floordiv(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a % b < 0) != (b < 0)); }
int64_t floormod(int64_t a, int64_t b) { return a - floordiv(a, b) * b; }
int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t select(bool c, int64_t a, int64_t b) { return c ? a : b; }
int64_t shr(int64_t a, int64_t b) { return a >> b; }
int64_t shl(int64_t a, int64_t b) { return a << b; }
}
"""


def random_expression(depth: int) -> str:
    """A random text over the names of ENV whose value stays within int64."""
    if depth == 0:
        return random.choice([*ENV, "3", "64", "2147483647", "1"])
    a, b, c = (random_expression(depth - 1) for _ in range(3))
    return random.choice(
        [f"({a}) + ({b})", f"({a}) - ({b})", f"({a}) * 5", f"floordiv({a}, 7)", f"floormod({a}, 64)", f"min({a}, {b})"]
        + [
            f"max({a}, {b})",
            f"select(({a}) > ({b}), {c}, {b})",
            f"select(and_(({a}) == 1, not_(({b}) <= 2)), {a}, {c})",
        ]
        + [f"shr({a}, 2)", f"-({a})"]
    )


def test_cpp_computes_what_python_computes(tmp_path: Path) -> None:
    random.seed(0)
    texts = [text for text, _ in VALUES] + [random_expression(depth) for depth in (1, 2, 3, 4) for _ in range(50)]
    names = "".join(f"const int64_t {name} = INT64_C({value});\n" for name, value in ENV.items())
    prints = "".join(f'std::printf("%" PRId64 "\\n", int64_t({expr.to_cpp(text, str)}));\n' for text in texts)
    source = tmp_path / "expressions.cpp"
    source.write_text(f"{HELPERS}int main() {{\n{names}{prints}}}\n")
    subprocess.run(["g++", "-std=c++20", "-w", "-o", tmp_path / "expressions", source], check=True)
    printed = subprocess.run([tmp_path / "expressions"], check=True, capture_output=True, text=True).stdout
    assert list(map(int, printed.split())) == [int(expr.evaluate(text, ENV)) for text in texts]
