"""Index arithmetic: symbols with ranges, and exact integer division of index expressions.

An index symbol runs over 0..size-1, where sizes are numbers or the capture's shape symbols. With
the ranges known, `(16*h + d) // 16` is `h` and `(16*h + d) % 16` is `d`: this is what lets a view,
a head expansion or a flattened batch be read exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy

__all__ = ["IndexSpace", "Ranges", "extent"]

Expr = Any
Ranges = Mapping[str, tuple[int, int | None]]


class IndexSpace:
    """Index symbols of one proof with their sizes.

    `sizes` maps a symbol to the number of values it takes; `bounds` maps a symbol that runs over
    earlier positions only to the index that it never passes. `ranges` are the captured limits of
    the shape symbols.
    """

    def __init__(self, ranges: Ranges | None = None) -> None:
        self.ranges = ranges or {}
        self.sizes: dict[Expr, Expr] = {}
        self.bounds: dict[Expr, Expr] = {}

    def index(self, name: str, size: Expr) -> Expr:
        """An index over 0..size-1; the number 0 when there is only one value."""
        if size == 1:
            return sympy.Integer(0)
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        self.sizes[symbol] = size
        return symbol

    def upto(self, name: str, size: Expr, bound: Expr) -> Expr:
        """An index over 0..bound, where bound is itself an index of an axis of `size`."""
        if size == 1:
            return sympy.Integer(0)
        symbol = self.index(name, size)
        self.bounds[symbol] = bound
        return symbol

    def upper(self, expr: Expr) -> Expr | None:
        """Largest value of `expr`, as an expression over sizes; None when unknown."""
        return self._bound(expr, 1)

    def lower(self, expr: Expr) -> Expr | None:
        """Smallest value of `expr`; None when unknown."""
        return self._bound(expr, -1)

    def is_nonnegative(self, size: Expr) -> bool:
        """Whether an expression over sizes is never negative, as far as the capture knows."""
        low = extent(size, self.ranges)[0]
        return bool(size.is_nonnegative) or (low is not None and low >= 0)

    def divmod(self, expr: Expr, n: Expr) -> tuple[Expr, Expr]:
        """Quotient and remainder of `expr` by `n` > 0, exact for every value of the symbols."""
        expr = self.tidy(expr)
        if n == 1:
            return expr, sympy.Integer(0)
        quotient, rest = _split(expr, n)
        if rest == 0 or self._within(rest, n):
            return self.tidy(quotient), rest
        coarse = self._coarse(rest, n)
        if coarse is not None:
            return self.tidy(quotient + coarse[0]), coarse[1]
        inner = _nested_floor(rest, n)
        floor = inner if inner is not None else sympy.floor(rest / n)
        return self.tidy(quotient + floor), sympy.Mod(rest, n)

    def tidy(self, expr: Expr) -> Expr:
        """Expanded form with `n*floor(x/n) + Mod(x, n)` written as `x`."""
        expr = sympy.expand(expr)
        for mod in expr.atoms(sympy.Mod):
            x, n = mod.args
            coefficient = expr.coeff(mod)
            whole = sympy.floor(x / n)
            if coefficient != 0 and sympy.expand(expr.coeff(whole) - coefficient * n) == 0:
                expr = sympy.expand(expr - coefficient * (mod + n * whole) + coefficient * x)
        return expr

    def replaced(self, expr: Expr, values: Mapping[Expr, Expr]) -> Expr:
        """`expr` with symbols replaced and every division done again."""
        if isinstance(expr, sympy.floor):
            numerator, n = expr.args[0].as_numer_denom()
            return self.divmod(self.replaced(numerator, values), n)[0]
        if isinstance(expr, sympy.Mod):
            return self.divmod(self.replaced(expr.args[0], values), expr.args[1])[1]
        if expr.args:
            return sympy.expand(expr.func(*(self.replaced(arg, values) for arg in expr.args)))
        return values.get(expr, expr)

    def covers(self, expr: Expr, size: Expr) -> bool:
        """Whether `expr` is a free index that runs over all of an axis of `size`."""
        return expr.is_Symbol and self.sizes.get(expr) == size and expr not in self.bounds

    def _coarse(self, expr: Expr, n: Expr) -> tuple[Expr, Expr] | None:
        """Division of g*x + r by g*m, where 0 <= r < g: x // m, and g * (x % m) + r."""
        terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(expr)]
        if not (n.is_Integer and all(c.is_Integer for c, _ in terms)):
            return None
        for g in sorted({abs(c) for c, _ in terms}, reverse=True):
            fine = sympy.Add(*(c * body for c, body in terms if c % g != 0))
            if g > 1 and n % g == 0 and self._within(fine, g):
                x = sympy.Add(*(c // g * body for c, body in terms if c % g == 0))
                quotient, rest = self.divmod(x, n // g)
                return quotient, sympy.expand(g * rest + fine)
        return None

    def _within(self, expr: Expr, n: Expr) -> bool:
        low, high = self.lower(expr), self.upper(expr)
        if low is None or high is None:
            return False
        return self.is_nonnegative(low) and self.is_nonnegative(sympy.expand(n - 1 - high))

    def _bound(self, expr: Expr, sign: int) -> Expr | None:
        if expr.is_Symbol:
            if expr not in self.sizes:
                return expr
            return self.sizes[expr] - 1 if sign > 0 else sympy.Integer(0)
        if expr.is_number:
            return expr
        if expr.is_Add:
            parts = [self._bound(term, sign) for term in expr.args]
            return None if None in parts else sympy.expand(sympy.Add(*parts))
        if expr.is_Mul:
            return self._bound_product(expr, sign)
        if isinstance(expr, sympy.Mod):
            return expr.args[1] - 1 if sign > 0 else sympy.Integer(0)
        if isinstance(expr, sympy.floor):
            return self._bound_floor(expr, sign)
        return None

    def _bound_product(self, expr: Expr, sign: int) -> Expr | None:
        constant, rest = expr.as_independent(*self.sizes, sympy.Mod, sympy.floor, as_Add=False)
        if constant.is_negative:
            inner = self._bound(rest, -sign) if rest != 1 else sympy.Integer(1)
        elif constant.is_nonnegative:
            inner = self._bound_factor(rest, sign)
        else:
            return None
        return None if inner is None else sympy.expand(constant * inner)

    def _bound_factor(self, rest: Expr, sign: int) -> Expr | None:
        if not rest.is_Mul:
            return self._bound(rest, sign)
        parts = [self._bound(factor, sign) for factor in rest.args]
        lows = [self._bound(factor, -1) for factor in rest.args]
        if None in parts or any(low is None or not low.is_nonnegative for low in lows):
            return None
        return sympy.Mul(*parts)

    def _bound_floor(self, expr: Expr, sign: int) -> Expr | None:
        numerator, n = sympy.fraction(sympy.together(expr.args[0]))
        if not n.is_positive:
            return None
        inner = self._bound(sympy.expand(numerator), sign)
        if inner is None:
            return None
        if sign > 0:
            whole = sympy.cancel((inner + 1) / n)
            if sympy.fraction(whole)[1] == 1:
                return sympy.expand(whole - 1)
        return sympy.floor(inner / n)


def _split(expr: Expr, n: Expr) -> tuple[Expr, Expr]:
    """`expr` as n * quotient + rest, taking out of every term what n divides."""
    quotient, rest = [], []
    for term in sympy.Add.make_args(expr):
        if n.is_Integer:
            coefficient, body = term.as_coeff_Mul()
            if coefficient.is_Integer:
                whole, left = divmod(int(coefficient), int(n))
                quotient.append(whole * body)
                rest.append(left * body)
                continue
        ratio = term / n
        if sympy.fraction(ratio)[1] == 1 and ratio.is_integer:
            quotient.append(ratio)
        else:
            rest.append(term)
    return sympy.Add(*quotient), sympy.Add(*rest)


def _nested_floor(expr: Expr, n: Expr) -> Expr | None:
    """floor(floor(x/a) / n) as floor(x / (a*n))."""
    if isinstance(expr, sympy.floor):
        return sympy.floor(expr.args[0] / n)
    return None


def extent(expr: Expr, ranges: Ranges) -> tuple[float | None, float | None]:
    """Smallest and largest value of a linear expression over sizes."""
    low: float | None = 0.0
    high: float | None = 0.0
    for term in sympy.Add.make_args(expr):
        coefficient, body = term.as_coeff_Mul()
        if body == 1:
            bounds: tuple[float | None, float | None] = (1, 1)
        elif body.is_Symbol and str(body) in ranges:
            bounds = ranges[str(body)]
        else:
            return None, None
        if coefficient < 0:
            bounds = (bounds[1], bounds[0])
        low = None if low is None or bounds[0] is None else low + float(coefficient) * bounds[0]
        high = None if high is None or bounds[1] is None else high + float(coefficient) * bounds[1]
    return low, high
