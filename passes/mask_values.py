"""From the value that a mask adds to a score to whether the key is visible.

Boolean masks say it directly. A float mask counts as a mask only if it adds 0 or a value that
masks: -inf, or finite and at most -10000. Finite values above half the dtype's lowest number hide a
key only as long as the logits stay small, which is written down as an assumption; anything else is
a bias, or a fill that does not mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef

from sparsify.ir import ONLY_0_AND_1
from sparsify.passes.index_expr import Evaluator, Leaf
from sparsify.passes.index_values import Cases
from sparsify.passes.refused import Refused

__all__ = ["SOFTEST_FILL", "Visibility", "check_fill", "constants", "is_visible", "visibility"]

Expr = Any
SOFTEST_FILL = -1e4


@dataclass(frozen=True)
class Visibility:
    """When a key is visible, and what had to be assumed to say so."""

    formula: Any
    assumptions: tuple[str, ...] = ()


def visibility(value: Any, dtype: torch.dtype, evaluator: Evaluator, head: Expr) -> Visibility:
    """The visibility that a mask value of `dtype` means. `head` is the index of the query head.

    Raises:
        Refused: LOGIT_BIAS, FILL_NOT_MASKING or MASK_UNPROVED for float masks that are no masks.
    """
    values = evaluator.values
    if dtype == torch.bool:
        return Visibility(values.truth(value))
    assumptions: list[str] = []
    items = value.items if isinstance(value, Cases) else ((sympy.true, values.number(value)),)
    parts = []
    for condition, number in items:
        for extra, constant in constants(number, evaluator, head, assumptions):
            if is_visible(constant, dtype, assumptions):
                parts.append(sympy.And(condition, extra))
    return Visibility(sympy.Or(*parts), tuple(dict.fromkeys(assumptions)))


def constants(
    number: Expr, evaluator: Evaluator, head: Expr, assumptions: list[str]
) -> list[tuple[Any, Expr]]:
    """The constants that `number` can be, each with its condition.

    Raises:
        Refused: it depends on more than a padding mask.
    """
    if number.is_number:
        return [(sympy.true, number)]
    functions = number.atoms(AppliedUndef)
    leaves = [evaluator.leaves[f.func.__name__] for f in functions]
    if len(functions) != 1 or not _is_flag(leaves[0]):
        raise _no_mask(number, leaves, head)
    function = functions.pop()
    assumptions.append(f"{leaves[0].node.name} holds {ONLY_0_AND_1}")
    kept = evaluator.values.compare("ne", function, sympy.Integer(0))
    out = []
    for flag, condition in ((1, kept), (0, sympy.Not(kept))):
        constant = sympy.expand(number.subs(function, flag))
        if not constant.is_number or constant.has(sympy.nan, sympy.zoo):
            raise _no_mask(number, leaves, head)
        out.append((condition, constant))
    return out


def _is_flag(leaf: Leaf) -> bool:
    """An integer or boolean model input of two axes: a padding mask."""
    value = leaf.node.meta["val"]
    return leaf.kind == "input" and value.dim() == 2 and not value.dtype.is_floating_point


def is_visible(constant: Expr, dtype: torch.dtype, assumptions: list[str]) -> bool:
    """Whether adding `constant` to a score leaves the key visible, and does nothing else.

    Raises:
        Refused: LOGIT_BIAS or FILL_NOT_MASKING when it neither keeps the score nor hides the key.
    """
    value = float(constant)
    if value == 0:
        return True
    if value > 0:
        raise Refused(
            "LOGIT_BIAS",
            "a float mask adds to the scores instead of hiding keys",
            f"it adds {value:g} somewhere",
            "Pass a boolean mask if keys are to be hidden.",
        )
    if value > SOFTEST_FILL:
        raise Refused(
            "FILL_NOT_MASKING",
            "the fill value of the mask is too small to hide a key",
            f"it adds {value:g}; {SOFTEST_FILL:g} or less counts as hiding",
            "Fill with -inf.",
        )
    _assume(f"adding {value:g}", value, dtype, assumptions)
    return False


def check_fill(constant: Expr, dtype: torch.dtype, assumptions: list[str]) -> None:
    """Refuse a number in the place of a score that does not hide the key.

    Raises:
        Refused: FILL_NOT_MASKING.
    """
    value = float(constant)
    if value > SOFTEST_FILL:
        raise Refused(
            "FILL_NOT_MASKING",
            "the fill value of the mask is too large to hide a key",
            f"scores become {value:g}; {SOFTEST_FILL:g} or less counts as hiding",
            "Fill with -inf.",
        )
    _assume(f"filling with {value:g}", value, dtype, assumptions)


def _assume(doing: str, value: float, dtype: torch.dtype, assumptions: list[str]) -> None:
    if value > torch.finfo(dtype).min / 2:
        assumptions.append(f"{doing} hides a key: no logit comes near its size")


def _no_mask(number: Expr, leaves: list[Leaf], head: Expr) -> Refused:
    if any(leaf.trained for leaf in leaves) or not leaves or number.has(head):
        return Refused("LOGIT_BIAS", "the scores get an additive bias", f"it adds {number}")
    whole = [leaf for leaf in leaves if leaf.kind == "input"]
    if whole:
        names = ", ".join(leaf.node.name for leaf in whole)
        return Refused(
            "MASK_UNPROVED",
            f"the mask is a model input ({names}), whose values are not known",
            f"it adds {number}",
        )
    if all(leaf.kind == "state" for leaf in leaves):
        return Refused("LOGIT_BIAS", "the scores get a stored bias", f"it adds {number}")
    return Refused(
        "MASK_UNPROVED", "the values of a float mask cannot be read", f"it adds {number}"
    )
