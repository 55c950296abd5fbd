"""Rules of the symbolic evaluator: what an element of an operator's output is.

Every rule takes the evaluator, the node and the output index and returns a value, or raises
`Unreadable`. Views are not here: they are index maps (`views.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.passes import index_layout as layout
from sparsify.passes.graphs import argument, dtype_of, expression, is_tensor, op_name
from sparsify.passes.index_expr import Evaluator
from sparsify.passes.index_values import Unreadable, is_truth

__all__ = ["RULES"]

Expr = Any
Value = Any
Index = tuple[Expr, ...]
Rule = Callable[[Evaluator, Node, Index], Value]


def _arange(ev: Evaluator, node: Node, index: Index) -> Value:
    start, step = expression(argument(node, "start", 0)), expression(argument(node, "step", 1))
    return ev.values.cast(sympy.expand(start + step * index[0]), dtype_of(node))


def _filled(value: Any) -> Rule:
    def rule(ev: Evaluator, node: Node, index: Index) -> Value:
        content = argument(node, "fill_value") if value is None else value
        if is_tensor(content):
            return ev.values.cast(ev.value(content, ()), dtype_of(node))
        return ev.values.cast(expression(content), dtype_of(node))

    return rule


def _scalar_tensor(ev: Evaluator, node: Node, index: Index) -> Value:
    return ev.values.cast(expression(node.args[0]), dtype_of(node))


def _eye(ev: Evaluator, node: Node, index: Index) -> Value:
    return ev.values.cast(ev.values.compare("eq", index[0], index[1]), dtype_of(node))


def _compare(relation: str) -> Rule:
    def rule(ev: Evaluator, node: Node, index: Index) -> Value:
        left, right = (ev.operand(value, index) for value in node.args[:2])
        return ev.values.compare(relation, left, right)

    return rule


def _logic(combine: Callable[..., Any]) -> Rule:
    def rule(ev: Evaluator, node: Node, index: Index) -> Value:
        if dtype_of(node) != torch.bool:
            raise Unreadable("bitwise operation on integers")
        operands = [ev.values.truth(ev.operand(value, index)) for value in node.args]
        return combine(*operands)

    return rule


def _arithmetic(function: Callable[[Expr, Expr], Expr], scaled: bool = False) -> Rule:
    def rule(ev: Evaluator, node: Node, index: Index) -> Value:
        left, right = (ev.operand(value, index) for value in node.args[:2])
        if scaled:
            alpha = expression(argument(node, "alpha", 1))
            right = ev.values.apply(lambda x: x * alpha, right)
        result = ev.values.apply(lambda a, b: sympy.expand(function(a, b)), left, right)
        if dtype_of(node) == torch.bool:
            return ev.values.truth(result)
        return ev.values.cast(result, dtype_of(node))

    return rule


def _reversed_subtract(ev: Evaluator, node: Node, index: Index) -> Value:
    if argument(node, "alpha", 1) != 1:
        raise Unreadable("a scaled subtraction")
    return _arithmetic(lambda a, b: _add(b, -a))(ev, node, index)


def _multiply(a: Expr, b: Expr) -> Expr:
    return _defined(a * b)


def _add(a: Expr, b: Expr) -> Expr:
    return _defined(a + b)


def _defined(value: Expr) -> Expr:
    if value.has(sympy.nan, sympy.zoo):
        raise Unreadable("not a number")
    return value


def _divide(ev: Evaluator, node: Node, index: Index) -> Value:
    mode = argument(node, "rounding_mode")
    if mode == "floor":
        return _floor_divide(ev, node, index)
    if mode is not None:
        raise Unreadable("truncating division")
    return _arithmetic(lambda a, b: _defined(a / b))(ev, node, index)


def _floor_divide(ev: Evaluator, node: Node, index: Index) -> Value:
    return _division(ev, node, index, 0)


def _remainder(ev: Evaluator, node: Node, index: Index) -> Value:
    return _division(ev, node, index, 1)


def _division(ev: Evaluator, node: Node, index: Index, part: int) -> Value:
    left, right = (ev.operand(value, index) for value in node.args[:2])

    def divide(a: Expr, b: Expr) -> Expr:
        if not (b.is_positive and b.is_integer and a.is_integer):
            raise Unreadable("division of other than integers by a positive integer")
        return ev.space.divmod(a, b)[part]

    return ev.values.apply(divide, left, right)


def _unary(function: Callable[[Expr], Expr]) -> Rule:
    def rule(ev: Evaluator, node: Node, index: Index) -> Value:
        return ev.values.apply(function, ev.operand(node.args[0], index))

    return rule


def _of_number(function: Callable[[float], float]) -> Callable[[Expr], Expr]:
    def apply(value: Expr) -> Expr:
        if not value.is_number:
            raise Unreadable("a function of a value that is no number")
        try:
            return expression(float(function(float(value))))
        except (ArithmeticError, TypeError, ValueError):
            raise Unreadable("not a number") from None

    return apply


def _power(ev: Evaluator, node: Node, index: Index) -> Value:
    base, exponent = (ev.operand(value, index) for value in node.args[:2])

    def power(a: Expr, b: Expr) -> Expr:
        if not b.is_number:
            raise Unreadable("a power that is no number")
        return _of_number(lambda x: x ** float(b))(a)

    return ev.values.apply(power, base, exponent)


def _log(value: float) -> float:
    return float("-inf") if value == 0 else math.log(value)


def _where(ev: Evaluator, node: Node, index: Index) -> Value:
    condition, yes, no = (ev.operand(value, index) for value in node.args[:3])
    chosen = ev.values.choose(ev.values.truth(condition), yes, no)
    return ev.values.cast(chosen, dtype_of(node))


def _masked_fill(ev: Evaluator, node: Node, index: Index) -> Value:
    source, mask, fill = (ev.operand(value, index) for value in node.args[:3])
    fill = ev.values.cast(fill, dtype_of(node))
    return ev.values.choose(ev.values.truth(mask), fill, source)


def _triangle(relation: str) -> Rule:
    def rule(ev: Evaluator, node: Node, index: Index) -> Value:
        diagonal = expression(argument(node, "diagonal", 0))
        kept = ev.values.compare(relation, sympy.expand(index[-1] - index[-2]), diagonal)
        value = ev.operand(node.args[0], index)
        zero = sympy.false if is_truth(value) else sympy.Integer(0)
        return ev.values.choose(kept, value, zero)

    return rule


def _to(ev: Evaluator, node: Node, index: Index) -> Value:
    return ev.values.cast(ev.operand(node.args[0], index), dtype_of(node))


def _clamp(ev: Evaluator, node: Node, index: Index) -> Value:
    low, high = argument(node, "min"), argument(node, "max")
    value = ev.operand(node.args[0], index)

    def clamp(number: Expr) -> Expr:
        if not number.is_number:
            if high is None and _is_lowest(low, dtype_of(node)):
                return number  # no finite number of this type is lower
            raise Unreadable("a clamp of a value that is no number")
        if low is not None:
            number = max(number, expression(low), key=float)
        return number if high is None else min(number, expression(high), key=float)

    return ev.values.apply(clamp, value)


def _is_lowest(value: Any, dtype: torch.dtype) -> bool:
    number = isinstance(value, int | float)
    return number and dtype.is_floating_point and value <= torch.finfo(dtype).min


def _extreme(pick: Callable[..., Any]) -> Rule:
    def rule(ev: Evaluator, node: Node, index: Index) -> Value:
        def choose(a: Expr, b: Expr) -> Expr:
            if a.is_number and b.is_number:
                return pick(a, b, key=float)
            for one, other in ((a, b), (b, a)):
                if pick is max and one.is_number and _is_lowest(float(one), dtype_of(node)):
                    return other  # no finite number of this type is lower
            raise Unreadable(op_name(node))

        if len(node.args) != 2 or not is_tensor(node.args[1]):
            raise Unreadable(op_name(node))  # the largest of an axis
        left, right = (ev.operand(value, index) for value in node.args)
        return ev.values.apply(choose, left, right)

    return rule


def _filled_in(ev: Evaluator, node: Node, index: Index) -> Value:
    """fill and copy: the second argument, in the type of the first."""
    return ev.values.cast(ev.operand(node.args[1], index), dtype_of(node))


def _named(rule: Rule, *names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names}


RULES: dict[str, Rule] = {
    **_named(_arange, "arange"),
    **_named(_filled(0), "zeros", "zeros_like", "new_zeros"),
    **_named(_filled(1), "ones", "ones_like", "new_ones"),
    **_named(_filled(None), "full", "full_like", "new_full"),
    **_named(_scalar_tensor, "scalar_tensor"),
    **_named(_eye, "eye"),
    **_named(_compare("ge"), "ge", "greater_equal"),
    **_named(_compare("gt"), "gt", "greater"),
    **_named(_compare("le"), "le", "less_equal"),
    **_named(_compare("lt"), "lt", "less"),
    **_named(_compare("eq"), "eq"),
    **_named(_compare("ne"), "ne", "not_equal"),
    **_named(_logic(sympy.And), "__and__", "bitwise_and", "logical_and"),
    **_named(_logic(sympy.Or), "__or__", "bitwise_or", "logical_or"),
    **_named(_logic(sympy.Xor), "__xor__", "bitwise_xor", "logical_xor"),
    **_named(_logic(sympy.Not), "bitwise_not", "logical_not"),
    **_named(_arithmetic(_add, scaled=True), "add"),
    **_named(_arithmetic(lambda a, b: _add(a, -b), scaled=True), "sub", "subtract"),
    **_named(_reversed_subtract, "rsub"),
    **_named(_arithmetic(_multiply), "mul", "multiply"),
    **_named(_divide, "div", "true_divide", "divide"),
    **_named(_floor_divide, "floor_divide"),
    **_named(_remainder, "remainder"),
    **_named(_unary(lambda a: -a), "neg", "negative"),
    **_named(_unary(sympy.Abs), "abs"),
    **_named(_unary(_of_number(_log)), "log"),
    **_named(_unary(_of_number(math.exp)), "exp"),
    **_named(_unary(_of_number(math.sqrt)), "sqrt"),
    **_named(_unary(_of_number(lambda x: x**-0.5)), "rsqrt"),
    **_named(_unary(_of_number(lambda x: 1 / x)), "reciprocal"),
    **_named(_power, "pow"),
    **_named(_where, "where"),
    **_named(_masked_fill, "masked_fill"),
    **_named(_triangle("le"), "tril"),
    **_named(_triangle("ge"), "triu"),
    **_named(_filled_in, "fill", "copy"),
    **_named(_filled(0), "zero"),
    **_named(layout.select_scatter, "select_scatter"),
    **_named(layout.slice_scatter, "slice_scatter"),
    **_named(_to, "to", "_to_copy", "type_as", "float", "bool", "int", "long", "half"),
    **_named(layout.concat, "cat", "concat"),
    **_named(layout.stack, "stack"),
    **_named(layout.index, "index"),
    **_named(layout.cumsum, "cumsum"),
    **_named(layout.diff, "diff"),
    **_named(_clamp, "clamp", "clamp_min", "clamp_max"),
    **_named(_extreme(max), "maximum", "max"),
    **_named(_extreme(min), "minimum", "min"),
}
