"""Rules of the symbolic evaluator for operators that put tensors together or pick from them.

Concatenation, stacking, writes into a part, indexing by tensors, running sums and differences.
"""

from __future__ import annotations

import itertools
from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.passes.graphs import argument, dtype_of, expression, shape_of
from sparsify.passes.index_expr import UNFORESEEN, Evaluator
from sparsify.passes.index_values import Unreadable
from sparsify.passes.views import broadcast_index, concat_parts

__all__ = [
    "concat",
    "cumsum",
    "diff",
    "index",
    "indexed_source",
    "select_scatter",
    "slice_scatter",
    "stack",
]

Expr = Any
Value = Any
Index = tuple[Expr, ...]


def concat(ev: Evaluator, node: Node, index: Index) -> Value:
    axis, parts = concat_parts(node)
    entry = index[axis]
    pieces = []
    for part, offset in parts:
        inside = sympy.expand(entry - offset)
        if shape_of(part)[axis] == 1:
            inside = sympy.Integer(0)
        pieces.append((ev.value(part, (*index[:axis], inside, *index[axis + 1 :])), offset))
    value = pieces[-1][0]
    for (earlier, _), (_, end) in reversed(list(itertools.pairwise(pieces))):
        value = ev.values.choose(ev.values.compare("lt", entry, end), earlier, value)
    return ev.values.cast(value, dtype_of(node))


def stack(ev: Evaluator, node: Node, index: Index) -> Value:
    tensors = argument(node, "tensors")
    dim = argument(node, "dim", 0)
    axis = dim + len(index) if dim < 0 else dim
    rest = (*index[:axis], *index[axis + 1 :])
    value = ev.value(tensors[-1], rest)
    for position in reversed(range(len(tensors) - 1)):
        here = ev.values.compare("eq", index[axis], sympy.Integer(position))
        value = ev.values.choose(here, ev.value(tensors[position], rest), value)
    return value


def indexed_source(ev: Evaluator, node: Node, index: Index) -> tuple[Node, Index] | None:
    """Where x[t0, t1, ...] reads x; None when the index tensors cannot be read."""
    try:
        return _indexed(ev, node, index)
    except (Unreadable, *UNFORESEEN):
        return None


def index(ev: Evaluator, node: Node, index: Index) -> Value:
    return ev.value(*_indexed(ev, node, index))


def _indexed(ev: Evaluator, node: Node, index: Index) -> tuple[Node, Index]:
    """x[t0, t1, ...] with integer index tensors, some of them None (a whole axis)."""
    source, indices = argument(node, "self"), list(argument(node, "indices"))
    rank = len(shape_of(source))
    indices += [None] * (rank - len(indices))
    given = [axis for axis, entry in enumerate(indices) if entry is not None]
    tensors = [indices[axis] for axis in given]
    if any(dtype_of(t) in (torch.bool, torch.uint8) for t in tensors):
        raise Unreadable("indexing by a boolean mask")
    shared = max(len(shape_of(t)) for t in tensors)
    adjacent = given == list(range(given[0], given[-1] + 1))
    begin = given[0] if adjacent else 0
    at = index[begin : begin + shared]
    others = iter(index[:begin] + index[begin + shared :])
    entries = []
    for axis in range(rank):
        if axis not in given:
            entries.append(next(others))
            continue
        entries.append(_position(ev, indices[axis], at, shape_of(source)[axis]))
    return source, tuple(entries)


def _position(ev: Evaluator, tensor: Node, at: Index, size: Expr) -> Expr:
    value = ev.value(tensor, broadcast_index(at, shape_of(tensor)))
    if not isinstance(value, sympy.Expr):
        raise Unreadable("an index by cases")
    if value.is_Integer and value.is_negative:
        value = sympy.expand(size + value)
    low = ev.space.lower(value)
    if low is None or not ev.space.is_nonnegative(low):
        raise Unreadable("an index that may be negative")
    return sympy.Integer(0) if size == 1 else value


def cumsum(ev: Evaluator, node: Node, index: Index) -> Value:
    """Running sums of a constant: c, 2c, 3c, ..."""
    source = node.args[0]
    assert isinstance(source, Node)
    dim = argument(node, "dim")
    axis = dim + len(index) if dim < 0 else dim
    symbol = ev.space.index(f"sum_{node.name}", shape_of(source)[axis])
    element = ev.values.number(ev.value(source, (*index[:axis], symbol, *index[axis + 1 :])))
    constant = isinstance(element, sympy.Expr) and not (symbol.is_Symbol and element.has(symbol))
    if not constant:
        raise Unreadable("a running sum of values that differ")
    return ev.values.cast(sympy.expand(element * (index[axis] + 1)), dtype_of(node))


def diff(ev: Evaluator, node: Node, index: Index) -> Value:
    source, order = node.args[0], argument(node, "n", 1)
    assert isinstance(source, Node)
    if order != 1 or dtype_of(source) == torch.bool or argument(node, "append") is not None:
        raise Unreadable("a difference of another order")
    dim = argument(node, "dim", -1)
    axis = dim + len(index) if dim < 0 else dim
    front = argument(node, "prepend")
    before = sympy.Integer(0) if front is None else shape_of(front)[axis]

    def element(entry: Expr) -> Value:
        at = (*index[:axis], sympy.expand(entry - before), *index[axis + 1 :])
        if front is None:
            return ev.value(source, at)
        in_front = entry if before != 1 else sympy.Integer(0)
        first = ev.value(front, (*index[:axis], in_front, *index[axis + 1 :]))
        inside = ev.values.compare("lt", entry, before)
        if inside == sympy.false:
            return ev.value(source, at)
        return ev.values.choose(inside, first, ev.value(source, at))

    entry = index[axis]
    return ev.values.apply(
        lambda a, b: sympy.expand(a - b), element(sympy.expand(entry + 1)), element(entry)
    )


def select_scatter(ev: Evaluator, node: Node, index: Index) -> Value:
    source, piece = node.args[:2]
    axis = _axis(argument(node, "dim"), len(index))
    place = _from_start(expression(argument(node, "index")), shape_of(node)[axis])
    here = ev.values.compare("eq", index[axis], place)
    inner = ev.operand(piece, (*index[:axis], *index[axis + 1 :]))
    return ev.values.choose(here, inner, ev.operand(source, index))


def slice_scatter(ev: Evaluator, node: Node, index: Index) -> Value:
    source, piece = node.args[:2]
    axis = _axis(argument(node, "dim", 0), len(index))
    size = shape_of(node)[axis]
    start = _from_start(expression(argument(node, "start") or 0), size)
    if argument(node, "step", 1) != 1 or not isinstance(piece, Node):
        raise Unreadable("a write with a step")
    end = sympy.expand(start + shape_of(piece)[axis])
    inside = sympy.And(
        ev.values.compare("ge", index[axis], start), ev.values.compare("lt", index[axis], end)
    )
    at = (*index[:axis], sympy.expand(index[axis] - start), *index[axis + 1 :])
    return ev.values.choose(inside, ev.operand(piece, at), ev.operand(source, index))


def _axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _from_start(place: Expr, size: Expr) -> Expr:
    """A position counted from the start, negative ones included."""
    if place.is_negative:
        place = sympy.expand(size + place)
    if not place.is_nonnegative:
        raise Unreadable("a position that may be outside")
    return place
