"""Values of symbolic tensor elements: numbers, truth values, and numbers by cases.

An element is a sympy expression over index symbols, sizes and uninterpreted functions of data
(`attention_mask(b, j)`), a sympy truth value, or `Cases`: numbers under exclusive conditions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from sympy.logic.boolalg import Boolean

from sparsify.passes.index_space import IndexSpace, extent

__all__ = ["Cases", "Unreadable", "Values", "is_truth"]

Expr = Any
Value = Any
MAX_CASES = 48
# Largest count that a narrow dtype holds exactly. Wider ones hold every length of a sequence.
_EXACT_UP_TO = {
    torch.bfloat16: 2**8,
    torch.float16: 2**11,
    torch.int8: 127,
    torch.uint8: 255,
    torch.int16: 32767,
}
_SWAPPED = {"lt": "gt", "le": "ge"}
_PYTHON = {
    "ge": operator.ge,
    "gt": operator.gt,
    "eq": operator.eq,
}


class Unreadable(Exception):
    """The rules cannot express this element; it becomes an uninterpreted function."""


@dataclass(frozen=True)
class Cases:
    """A number by cases: exactly one condition holds."""

    items: tuple[tuple[Any, Expr], ...]


def is_truth(value: Value) -> bool:
    """Whether the value is a truth value. sympy's symbols are both; here they are numbers."""
    return isinstance(value, Boolean) and not isinstance(value, sympy.Symbol)


class Values:
    """Arithmetic and logic on values, simplified by the ranges of the index symbols."""

    def __init__(self, space: IndexSpace) -> None:
        self.space = space

    def number(self, value: Value) -> Value:
        """A truth value as 1 or 0; numbers as they are."""
        if not is_truth(value):
            return value
        if value in (sympy.true, sympy.false):
            return sympy.Integer(int(bool(value)))
        return Cases(((value, sympy.Integer(1)), (sympy.Not(value), sympy.Integer(0))))

    def truth(self, value: Value) -> Any:
        """A number as "is not 0"; truth values as they are."""
        return value if is_truth(value) else self.compare("ne", value, sympy.Integer(0))

    def choose(self, condition: Any, yes: Value, no: Value) -> Value:
        """`yes` where the condition holds, else `no`."""
        if condition == sympy.true:
            return yes
        if condition == sympy.false:
            return no
        if is_truth(yes) and is_truth(no):
            return sympy.Or(sympy.And(condition, yes), sympy.And(sympy.Not(condition), no))
        items = [(sympy.And(condition, c), v) for c, v in self._items(self.number(yes))]
        other = sympy.Not(condition)
        items += [(sympy.And(other, c), v) for c, v in self._items(self.number(no))]
        return self._cases(items)

    def apply(self, function: Callable[..., Expr], *values: Value) -> Value:
        """`function` of numbers, case by case."""
        combined: list[tuple[Any, tuple[Expr, ...]]] = [(sympy.true, ())]
        for value in values:
            items = self._items(self.number(value))
            combined = [
                (both, (*numbers, number))
                for condition, numbers in combined
                for other, number in items
                if (both := sympy.And(condition, other)) != sympy.false
            ]
            if len(combined) > MAX_CASES:
                raise Unreadable("too many cases")
        return self._cases([(c, function(*numbers)) for c, numbers in combined])

    def compare(self, relation: str, left: Value, right: Value) -> Any:
        """`left relation right` (ge, gt, le, lt, eq, ne) as a truth value."""
        if relation == "ne":
            return sympy.Not(self.compare("eq", left, right))
        if relation in _SWAPPED:
            return self.compare(_SWAPPED[relation], right, left)
        if is_truth(left) and is_truth(right) and relation == "eq":
            return sympy.Not(sympy.Xor(left, right))
        parts = []
        for c1, a in self._items(self.number(left)):
            for c2, b in self._items(self.number(right)):
                both = sympy.And(c1, c2)
                if both != sympy.false:
                    parts.append(sympy.And(both, self._relation(relation, a, b)))
        if len(parts) > MAX_CASES:
            raise Unreadable("too many cases")
        return sympy.Or(*parts)

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """The value converted to `dtype`; constants are rounded as torch rounds them."""
        if dtype == torch.bool:
            return self.truth(value)
        if is_truth(value):
            return self.number(value)
        return self.apply(lambda number: self._cast(number, dtype), value)

    def _items(self, value: Value) -> tuple[tuple[Any, Expr], ...]:
        return value.items if isinstance(value, Cases) else ((sympy.true, value),)

    def _cases(self, items: list[tuple[Any, Expr]]) -> Value:
        merged: dict[Expr, list[Any]] = {}
        for condition, value in items:
            condition, value = self._refined(condition, value)
            if condition != sympy.false:
                merged.setdefault(value, []).append(condition)
        if len(merged) == 1:
            return next(iter(merged))
        if len(merged) > MAX_CASES or not merged:
            raise Unreadable("too many cases")
        return Cases(tuple((sympy.Or(*conditions), value) for value, conditions in merged.items()))

    def _refined(self, condition: Any, value: Expr) -> tuple[Any, Expr]:
        """The value with what the condition fixes put in: under k = 0, k + 1 is 1."""
        for part in sympy.And.make_args(condition):
            if not isinstance(part, sympy.Eq):
                continue
            for symbol in part.lhs.free_symbols & set(self.space.sizes):
                if part.lhs.coeff(symbol) in (1, -1) and not part.has(sympy.Mod, sympy.floor):
                    solved = sympy.solve(part.lhs, symbol)
                    value = sympy.expand(value.subs(symbol, solved[0]))
                    break
        return condition, value

    def _relation(self, relation: str, left: Expr, right: Expr) -> Any:
        if left.is_number and right.is_number:
            return sympy.true if _PYTHON[relation](float(left), float(right)) else sympy.false
        if sympy.nan in (left, right) or left.is_infinite or right.is_infinite:
            raise Unreadable("comparison with an infinite value")
        difference = sympy.expand(left - right)
        if relation == "eq":
            return self._equal(difference)
        if relation == "gt":
            if difference.is_integer:
                return self._at_least(difference - 1)
            return sympy.Gt(difference, 0)
        return self._at_least(difference)

    def _equal(self, difference: Expr) -> Any:
        low, high = self.space.lower(difference), self.space.upper(difference)
        if difference == 0:
            return sympy.true
        if (low is not None and low.is_positive) or (high is not None and high.is_negative):
            return sympy.false
        if difference.could_extract_minus_sign():
            difference = -difference
        return sympy.Eq(difference, 0)

    def _at_least(self, difference: Expr) -> Any:
        low, high = self.space.lower(difference), self.space.upper(difference)
        if low is not None and self.space.is_nonnegative(low):
            return sympy.true
        if high is not None and high.is_negative:
            return sympy.false
        if high == 0:
            return self._equal(difference)
        return sympy.Ge(difference, 0)

    def _cast(self, number: Expr, dtype: torch.dtype) -> Expr:
        if number.is_number:
            return _constant(number, dtype)
        if not (number.is_integer or dtype.is_floating_point):
            raise Unreadable("a number rounded to an integer")
        if dtype in _EXACT_UP_TO and not self._within(number, _EXACT_UP_TO[dtype]):
            raise Unreadable(f"positions that {dtype} cannot tell apart")
        return number

    def _within(self, number: Expr, limit: int) -> bool:
        """Whether an expression over positions stays within +-limit at every captured size.

        Values of data stand for themselves: rounding them does not move a position, and adding a
        constant to whole numbers of data may only make them collide if it is large beside them.
        """
        data = {call: sympy.Integer(0) for call in number.atoms(AppliedUndef)}
        positions = number.xreplace(data)
        if positions.is_number:
            steps = [abs(number.coeff(call)) for call in data if call.is_integer]
            return all(bool(abs(positions) <= limit * step) for step in steps)
        low, high = self.space.lower(positions), self.space.upper(positions)
        if low is None or high is None:
            return False
        least, most = extent(low, self.space.ranges)[0], extent(high, self.space.ranges)[1]
        return least is not None and most is not None and -limit <= least and most <= limit


def _constant(number: Expr, dtype: torch.dtype) -> Expr:
    """A constant as torch rounds it."""
    if not dtype.is_floating_point:
        return sympy.Integer(int(number))
    rounded = torch.tensor(float(number), dtype=torch.float64).to(dtype).item()
    if rounded in (float("inf"), float("-inf")):
        return sympy.oo if rounded > 0 else -sympy.oo
    if dtype in _EXACT_UP_TO:
        return sympy.nsimplify(rounded, rational=True)
    return number
