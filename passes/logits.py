"""What a softmax takes, as a function of the scores: the scale in force, and which keys are hidden.

Between the product of queries and keys and the softmax stand a scale and a mask, in any order and
spelling. Evaluated at row i and key j with the score left open, they come down to a few cases:
the score times a constant where the key is visible; that plus a fill, or a fill in its place, where
it is hidden. Anything else is no plain attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from torch.fx import Node

from sparsify.passes.frame import Frame
from sparsify.passes.graphs import behind, data_sources, dtype_of, is_shape_only
from sparsify.passes.index_expr import Evaluator
from sparsify.passes.index_values import Cases
from sparsify.passes.mask_values import Visibility, check_fill, constants, is_visible
from sparsify.passes.matchers.call import Scores
from sparsify.passes.matchers.products import added
from sparsify.passes.matchers.softmax_walk import softmax_index
from sparsify.passes.refused import Refused

__all__ = ["Logits", "read_logits"]

Expr = Any


@dataclass(frozen=True)
class Logits:
    """What stands between the scores and the softmax: `factor` times the score where the key is
    visible. `evaluator` knows the data that the visibility depends on."""

    factor: float
    visibility: Visibility
    evaluator: Evaluator


def read_logits(frame: Frame, evaluator: Evaluator) -> Logits:
    """Read the scale and the mask of a written-out attention.

    Raises:
        Refused: SCORES_MODIFIED, SCALE_NOT_CONSTANT, or what `mask_values` says of a float mask.
    """
    scores = frame.call.scores
    assert scores is not None
    here = (*frame.lead, frame.i, frame.j)
    index = softmax_index(scores.weights, scores.softmax, here, frame.space)
    assert index is not None  # the matcher has followed it
    score = _open(scores, evaluator)(*scores.at(here, frame.space))
    value = evaluator.value(scores.logits, index)
    return _Reading(scores, evaluator, frame.h, score).logits(value)


def _open(scores: Scores, evaluator: Evaluator) -> Callable[..., Expr]:
    """Leave the product of queries and keys open: a function of its index."""
    node = scores.product
    score: Callable[..., Expr] = sympy.Function(f"{node.name}.score", real=True)

    def rule(index: tuple[Expr, ...]) -> Expr:
        addend = added(node)
        if addend is None:
            return score(*index)
        tensor, beta, alpha = addend
        weighted = evaluator.values.apply(lambda x: x * sympy.sympify(alpha), score(*index))
        if beta == 0:
            return weighted
        other = evaluator.operand(tensor, index)
        return evaluator.values.apply(lambda x, y: x + sympy.sympify(beta) * y, weighted, other)

    evaluator.given[node] = rule
    return score


class _Reading:
    """The cases of one value, as visibility and scale."""

    def __init__(self, scores: Scores, evaluator: Evaluator, head: Expr, score: Expr) -> None:
        self.scores, self.evaluator, self.head, self.score = scores, evaluator, head, score
        self.dtype = dtype_of(scores.logits)
        self.assumptions: list[str] = []
        self.factors: set[Expr] = set()

    def logits(self, value: Any) -> Logits:
        items = value.items if isinstance(value, Cases) else ((sympy.true, value),)
        visible = sympy.Or(*(part for item in items for part in self._visible(*item)))
        if visible.has(self.score.func):
            raise _modified("which keys are visible depends on the scores")
        if len(self.factors) > 1:
            message = "the scores are scaled by different numbers"
            raise Refused("SCALE_NOT_CONSTANT", message, str(sorted(self.factors)))
        # no key is visible at all: the mask's proof says so
        factor = float(self.factors.pop()) if self.factors else 1.0
        seen = Visibility(visible, tuple(dict.fromkeys(self.assumptions)))
        return Logits(factor, seen, self.evaluator)

    def _visible(self, condition: Any, number: Expr) -> list[Any]:
        """When the key of this case is visible: conditions, none if it is hidden."""
        self._check_readable(number)
        factor = number.coeff(self.score)
        rest = sympy.expand(number - factor * self.score)
        if rest.has(self.score):
            raise _modified(f"the softmax takes {number}")
        out = []
        for extra, constant in constants(rest, self.evaluator, self.head, self.assumptions):
            if factor == 0:
                check_fill(constant, self.dtype, self.assumptions)
            elif is_visible(constant, self.dtype, self.assumptions):
                out.append(sympy.And(condition, extra))
        if out:
            self.factors.add(self._constant(factor))
        return out

    def _constant(self, factor: Expr) -> Expr:
        if not factor.is_number:
            message = "the scores are scaled by what is not a number"
            raise Refused("SCALE_NOT_CONSTANT", message, f"the softmax takes {factor} * scores")
        if not factor.is_positive:
            raise _modified(f"the softmax takes {factor} * scores")
        return factor

    def _check_readable(self, value: Any) -> None:
        """Nothing in the value may depend on the scores in a way that cannot be read."""
        for function in value.atoms(AppliedUndef) - {self.score}:
            if function.func == self.score.func:
                raise _modified(f"row i and key j read the score {function}")
            leaf = self.evaluator.leaves.get(function.func.__name__)
            if leaf is not None and self.scores.product in behind(leaf.node, _values_of):
                raise _modified(f"the scores pass through {leaf.node.name}")


def _values_of(node: Node) -> list[Node]:
    """The inputs whose values count."""
    return [] if is_shape_only(node) else data_sources(node)


def _modified(evidence: str) -> Refused:
    return Refused("SCORES_MODIFIED", "the scores are changed before the softmax", evidence)
