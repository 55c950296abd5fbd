"""From a factor of a product back to the tensor that an operator should take.

Keys arrive transposed, queries multiplied by the scale: what only permutes axes becomes the
operand's order, and constant factors are taken out, so that the operand is the tensor behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.passes.graphs import argument, aten, dtype_of, is_tensor, op_name, shape_of
from sparsify.passes.index_expr import Evaluator
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.index_values import Unreadable
from sparsify.passes.matchers.call import Operand
from sparsify.passes.views import view_source

__all__ = ["constant", "peeled", "unpermuted"]

Order = tuple[int, ...]
Step = tuple[Node, Order, float | None]  # the source, its order, and the factor taken out, if any

PERMUTES = aten("transpose swapaxes swapdims t mT permute movedim moveaxis numpy_T")
COPIES = aten("contiguous clone alias detach")
CASTS = aten("to _to_copy type_as float double")
MULTIPLIES = aten("mul multiply")
DIVIDES = aten("div divide true_divide")


def unpermuted(operand: Operand, evaluator: Evaluator) -> Operand:
    """The tensor behind permutations, as far as they are needed for the canonical layout."""
    return _peeled(operand, evaluator, [_permuted])[0]


def peeled(operand: Operand, evaluator: Evaluator, dtype: torch.dtype) -> tuple[Operand, float]:
    """The tensor behind permutations and constant factors, and the product of these factors.

    Permutations beyond the last factor are kept in the graph where that leaves the operand in
    canonical layout. A cast from `dtype`, that of the values, to a wider one is taken out too:
    operators compute in float32 by themselves.
    """

    def scaled(node: Node, order: Order) -> Step | None:
        return _scaled(node, order, evaluator)

    def narrower(node: Node, order: Order) -> Step | None:
        return _narrower(node, order, dtype)

    return _peeled(operand, evaluator, [_permuted, scaled, narrower])


def _peeled(
    operand: Operand, evaluator: Evaluator, rules: list[Callable[[Node, Order], Step | None]]
) -> tuple[Operand, float]:
    node, order, factor = operand.node, operand.order, 1.0
    best = operand
    while node not in evaluator.frozen:  # what is changed in place is not what it was made of
        step = next((found for rule in rules if (found := rule(node, order))), None)
        if step is None:
            break
        node, order, own = step
        if own is not None or best.permuted:
            best, factor = Operand(node, order), factor * (1.0 if own is None else own)
    return best, factor


def _permuted(node: Node, order: Order) -> Step | None:
    name = op_name(node)
    if name in COPIES:
        source = node.args[0]
        return (source, order, None) if isinstance(source, Node) else None
    if name not in PERMUTES:
        return None
    places = tuple(sympy.Symbol(f"axis{n}") for n in range(len(order)))
    found = view_source(node, places, IndexSpace())
    if found is None or len(found[1]) != len(order):
        return None
    source, index = found
    where = {place: axis for axis, place in enumerate(index)}
    return source, tuple(where[places[axis]] for axis in order), None


def _scaled(node: Node, order: Order, evaluator: Evaluator) -> Step | None:
    name = op_name(node)
    if name not in MULTIPLIES | DIVIDES or argument(node, "rounding_mode"):
        return None
    left, right = node.args[:2]
    pairs = [(left, right), (right, left)] if name in MULTIPLIES else [(left, right)]
    for source, other in pairs:
        if isinstance(source, Node) and _carries(source, node):
            number = constant(other, evaluator)
            if number is not None and number > 0:  # a sign belongs to the operand
                return source, order, number if name in MULTIPLIES else 1.0 / number
    return None


def _narrower(node: Node, order: Order, dtype: torch.dtype) -> Step | None:
    if op_name(node) not in CASTS:
        return None
    source = node.args[0]
    if not isinstance(source, Node) or dtype_of(source) != dtype or not dtype.is_floating_point:
        return None
    wider = torch.finfo(dtype_of(node)).eps < torch.finfo(dtype).eps
    return (source, order, 1.0) if wider else None


def _carries(source: Node, node: Node) -> bool:
    """Whether the result has the shape and the type of the source."""
    if not is_tensor(source):
        return False
    return shape_of(source) == shape_of(node) and dtype_of(source) == dtype_of(node)


def constant(value: Any, evaluator: Evaluator) -> float | None:
    """A number, or a constant tensor of one element, as a number; None for anything else."""
    if is_tensor(value) and any(size != 1 for size in shape_of(value)):
        return None
    index = tuple(sympy.Integer(0) for _ in shape_of(value)) if is_tensor(value) else ()
    try:
        found = evaluator.operand(value, index)
    except Unreadable:
        return None
    number = isinstance(found, sympy.Expr) and found.is_number and found.is_finite
    return float(found) if number else None
