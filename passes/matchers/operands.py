"""From a factor of a product back to the tensor that an operator should take.

Keys arrive transposed, queries multiplied by the scale, both perhaps with their heads flattened.
The factor is followed back by index arithmetic: every tensor on the way whose axes are exactly the
canonical ones, in any order, can be the operand. Constant factors on the way are taken out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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

__all__ = ["Tracer"]

Expr = Any
Index = tuple[Expr, ...]
MULTIPLIES = aten("mul multiply")
DIVIDES = aten("div divide true_divide")


@dataclass(frozen=True)
class Tracer:
    """Follows factors of products back.

    `dtype` is that of the values: a cast from it to a wider one is taken out of queries and keys,
    since operators compute in float32 by themselves.
    """

    space: IndexSpace
    evaluator: Evaluator
    dtype: torch.dtype

    def operand(
        self, node: Node, index: Index, wanted: Index, factors: bool = True, broadcast: int = 0
    ) -> tuple[Operand, float] | None:
        """The operand whose element `wanted`, in canonical axes, is element `index` of `node`, and
        the product of the constant factors taken out behind it.

        Of several, the first in canonical layout behind the last factor, or else the last. None
        when no tensor on the way has the canonical axes, of which the first `broadcast` may have
        one element. No factor is taken out unless `factors`.
        """
        best: Operand | None = None
        total, pending = 1.0, None
        for tensor, place, factor in self._way(node, index, factors):
            if factor is not None:
                pending = factor * (1.0 if pending is None else pending)
            order = self._order(tensor, place, wanted, broadcast)
            if order is None or not (best is None or best.permuted or pending is not None):
                continue
            best, total = Operand(tensor, order), total * (1.0 if pending is None else pending)
            pending = None
        return None if best is None else (best, total)

    def _way(
        self, node: Node, index: Index, factors: bool
    ) -> Iterator[tuple[Node, Index, float | None]]:
        """The tensors on the way back, with the factor taken out in front of each, if any."""
        yield node, index, None
        while node not in self.evaluator.frozen:  # a change in place is no step to go behind
            scaled = self._scaled(node) if factors else None
            if scaled is not None:
                node, factor = scaled
                yield node, index, factor
                continue
            step = view_source(node, index, self.space)
            if step is None or dtype_of(step[0]) != dtype_of(node):
                return
            node, index = step
            yield node, index, None

    def _order(
        self, node: Node, index: Index, wanted: Index, broadcast: int
    ) -> tuple[int, ...] | None:
        """The axes of the node in canonical order; None unless each is one of `wanted`, whole."""
        free = list(range(len(index)))
        order = []
        for position, entry in enumerate(wanted):
            axis = next((a for a in free if index[a] == entry), None)
            if axis is None and position < broadcast:
                axis = next((a for a in free if index[a] == 0), None)
            if axis is None or not self._whole(index[axis], shape_of(node)[axis]):
                return None
            free.remove(axis)
            order.append(axis)
        return None if free else tuple(order)

    def _whole(self, entry: Expr, size: Expr) -> bool:
        return bool(size == 1) if entry == 0 else self.space.covers(entry, size)

    def _scaled(self, node: Node) -> tuple[Node, float] | None:
        """What a constant factor, or a cast to a wider type, is applied to."""
        name = op_name(node)
        if name in aten("to _to_copy type_as float double"):
            source = node.args[0]
            wider = isinstance(source, Node) and dtype_of(source) == self.dtype != dtype_of(node)
            fits = wider and _eps(dtype_of(node)) < _eps(self.dtype)
            return (source, 1.0) if fits else None  # type: ignore[return-value]
        if name not in MULTIPLIES | DIVIDES or argument(node, "rounding_mode"):
            return None
        left, right = node.args[:2]
        pairs = [(left, right), (right, left)] if name in MULTIPLIES else [(left, right)]
        for source, other in pairs:
            if isinstance(source, Node) and _carries(source, node):
                number = self._constant(other)
                if number is not None and number > 0:  # a sign belongs to the operand
                    return source, number if name in MULTIPLIES else 1.0 / number
        return None

    def _constant(self, value: Any) -> float | None:
        """A number, or a constant tensor of one element, as a number; None for anything else."""
        shape = shape_of(value) if is_tensor(value) else ()
        if any(size != 1 for size in shape):
            return None
        try:
            found = self.evaluator.operand(value, tuple(sympy.Integer(0) for _ in shape))
        except Unreadable:
            return None
        number = isinstance(found, sympy.Expr) and found.is_number and found.is_finite
        return float(found) if number else None


def _carries(source: Node, node: Node) -> bool:
    """Whether the result has the shape and the type of the source."""
    if not is_tensor(source):
        return False
    return shape_of(source) == shape_of(node) and dtype_of(source) == dtype_of(node)


def _eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 1.0
