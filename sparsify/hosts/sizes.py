"""Arithmetic on sizes, written as text: guards of a program, and the lengths of its inputs.

The texts stand in saved programs, so they are read by this small evaluator and not by Python's.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Unknown", "evaluate", "holds"]

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Div: operator.truediv,
    ast.BitAnd: lambda a, b: bool(a) and bool(b),
    ast.BitOr: lambda a, b: bool(a) or bool(b),
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.not_,
    ast.Not: operator.not_,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Eq": operator.eq,
    "Ne": operator.ne,
    "Min": min,
    "Max": max,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "CeilDiv": lambda a, b: -(-a // b),
    "floor": math.floor,
    "ceiling": math.ceil,
    "Abs": abs,
}


class Unknown(ValueError):
    """The text is no arithmetic on the given sizes."""


class Undefined(Unknown):
    """The text divides by zero at the given sizes."""


def evaluate(text: str, sizes: Mapping[str, int]) -> Any:
    """The number or truth value of a text such as `s0 + 4 <= s1`.

    Raises:
        Unknown: a name without a size, or anything but arithmetic.
    """
    try:
        return _value(_parsed(text), sizes)
    except (SyntaxError, KeyError, ZeroDivisionError, TypeError, RecursionError) as error:
        kind = Undefined if isinstance(error, ZeroDivisionError) else Unknown
        raise kind(f"{text!r} cannot be evaluated ({type(error).__name__})") from None


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Whether a condition holds for the sizes; one that divides by zero does not.

    Raises:
        Unknown: as `evaluate`.
    """
    try:
        return bool(evaluate(condition, sizes))
    except Undefined:
        return False


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> ast.expr:
    """Guards are asked at every call of a program; they are read once."""
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return {"True": True, "False": False, **sizes}[node.id]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, sizes))
    if isinstance(node, ast.Compare):
        return _compared(node, sizes)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _FUNCTIONS[node.func.id](*(_value(entry, sizes) for entry in node.args))
    raise Unknown(f"{type(node).__name__} is no arithmetic on sizes")


def _compared(node: ast.Compare, sizes: Mapping[str, int]) -> bool:
    values = [_value(entry, sizes) for entry in (node.left, *node.comparators)]
    pairs = zip(node.ops, values, values[1:], strict=False)
    return all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs)
