"""Deciding what a visibility formula over (i, j) means.

A formula whose conditions compare i - j with constants is a function of u = i + sigma - j alone and
constant between its steps, so that evaluating it once in every interval decides it for all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.relational import Relational

from sparsify.ir import MaskKind
from sparsify.passes.frame import Frame
from sparsify.passes.index_space import Ranges, extent

__all__ = ["Shape", "decide"]

Expr = Any


@dataclass(frozen=True)
class Shape:
    """What a formula means: key j is visible to query i if and only if
    `0 <= i + offset - j` (causal), `0 <= i + offset - j < window` (sliding), always (full).

    `kind` is None for any other rule; `text` says it in words.
    """

    kind: MaskKind | None
    offset: Expr = None
    window: int | None = None
    text: str = ""


def decide(formula: Any, frame: Frame, ranges: Ranges) -> Shape | None:
    """The meaning of `formula`; None when it does not compare i - j with constants only."""
    formula = _without_sizes(formula, ranges, (frame.i, frame.j))
    if formula is None:
        return None
    if formula in (sympy.true, sympy.false):
        full = formula == sympy.true
        return Shape(MaskKind.FULL) if full else Shape(None, text="no key is visible")
    found = _steps(formula, frame.i, frame.j)
    if found is None:
        return None
    base, steps = found
    return _meaning(_profile(formula, steps), base)


@dataclass(frozen=True)
class _Step:
    """An atom written as relation(sign * (u + shift), 0)."""

    atom: Any
    sign: int
    shift: int


def _without_sizes(formula: Any, ranges: Ranges, indices: tuple[Expr, ...]) -> Any:
    """The formula with conditions on sizes alone decided by the captured ranges."""
    known = {}
    for atom in formula.atoms(Relational):
        if not atom.has(*(s for s in indices if s.is_Symbol)):
            truth = _by_ranges(atom, ranges)
            if truth is None:
                return None
            known[atom] = truth
    return formula.xreplace(known)


def _by_ranges(atom: Any, ranges: Ranges) -> Any:
    difference = sympy.expand(atom.lhs - atom.rhs)
    if difference.atoms(sympy.Function):
        return None
    low, high = extent(difference, ranges)
    if isinstance(atom, sympy.Ge):
        return _settled(low is not None and low >= 0, high is not None and high < 0)
    if isinstance(atom, sympy.Gt):
        return _settled(low is not None and low > 0, high is not None and high <= 0)
    if isinstance(atom, sympy.Le):
        return _settled(high is not None and high <= 0, low is not None and low > 0)
    if isinstance(atom, sympy.Lt):
        return _settled(high is not None and high < 0, low is not None and low >= 0)
    apart = (low is not None and low > 0) or (high is not None and high < 0)
    return _settled(isinstance(atom, sympy.Ne) and apart, isinstance(atom, sympy.Eq) and apart)


def _settled(true: bool, false: bool) -> Any:
    return sympy.true if true else sympy.false if false else None


def _steps(formula: Any, i: Expr, j: Expr) -> tuple[Expr, list[_Step]] | None:
    """All atoms over u = i + base - j, or None when one is of another form."""
    shifts = []
    for atom in formula.atoms(Relational):
        difference = sympy.expand(atom.lhs - atom.rhs)
        sign = _sign(difference, i, j)
        if sign is None:
            return None
        rest = sympy.expand(sign * difference - i + j)
        if rest.has(*(s for s in (i, j) if s.is_Symbol)) or not rest.is_integer:
            return None
        shifts.append((atom, sign, rest))
    base = shifts[0][2] - shifts[0][2].as_coeff_Add()[0]
    steps = []
    for atom, sign, rest in shifts:
        shift = sympy.expand(rest - base)
        if not shift.is_Integer:
            return None
        steps.append(_Step(atom, sign, int(shift)))
    return base, steps


def _sign(difference: Expr, i: Expr, j: Expr) -> int | None:
    """+1 for i - j + rest, -1 for j - i + rest. An index with one value is the number 0."""
    wanted = [(i, 1)] if i.is_Symbol else []
    wanted += [(j, -1)] if j.is_Symbol else []
    for sign in (1, -1):
        if all(difference.coeff(symbol) == sign * way for symbol, way in wanted):
            return sign
    return None


def _profile(formula: Any, steps: list[_Step]) -> list[tuple[int, bool]]:
    """Visibility at every u where it may change; constant before, between and after."""
    points = sorted({-step.shift + near for step in steps for near in (-1, 0, 1)})
    return [(u, _visible(formula, steps, u)) for u in points]


def _visible(formula: Any, steps: list[_Step], u: int) -> bool:
    truths = {}
    for step in steps:
        value = sympy.Integer(step.sign * (u + step.shift))
        truths[step.atom] = step.atom.func(value, 0)
    return bool(formula.xreplace(truths))


def _meaning(profile: list[tuple[int, bool]], base: Expr) -> Shape:
    """Reads the profile: at most one interval of visible u, open to the past or not."""
    visible = [u for u, seen in profile if seen]
    if len(visible) == len(profile):
        return Shape(MaskKind.FULL)
    if not visible:
        return Shape(None, text="no key is visible")
    first, last = visible[0], visible[-1]
    if any(not seen and first < u < last for u, seen in profile):
        return Shape(None, text="the visible keys have holes")
    if profile[0][1]:
        return Shape(None, text=f"query i sees keys from i + {base - last} on (the future)")
    offset = sympy.expand(base - first)
    if profile[-1][1]:
        return Shape(MaskKind.CAUSAL, offset)
    return Shape(MaskKind.SLIDING, offset, window=last - first + 1)
