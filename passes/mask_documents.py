"""Documents packed into a row: a mask that asks whether query and key carry the same number.

`doc(b, i) = doc(b, j)` keeps documents apart if doc is one table of whole numbers, read at the
query and at the key. The table is a model input, or a running count of document borders computed in
the graph, as transformers computes it from position ids. Inside a document the rest of the formula
must be the ordinary one of positions and padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from sympy.core.function import AppliedUndef
from torch.fx import Node

from sparsify.passes.frame import Frame
from sparsify.passes.graphs import argument, dtype_of, op_name, shape_of
from sparsify.passes.index_expr import Evaluator, Leaf
from sparsify.passes.index_values import Cases, is_truth
from sparsify.passes.number_types import compared_in

__all__ = ["Documents", "within_document"]

Expr = Any
COUNTS = (torch.int32, torch.int64)
_TOGETHER = "equal numbers in {} stand next to each other in their row"


@dataclass(frozen=True)
class Documents:
    """Documents of a formula.

    `table` holds the number of every token's document, [batch or 1, length]; `inside` is the
    formula for a query and a key of one document.
    """

    table: Node
    inside: Any
    assumptions: tuple[str, ...]


def within_document(formula: Any, evaluator: Evaluator, frame: Frame) -> Documents | None:
    """The documents that a visibility formula keeps apart; None when it is not shown to do so."""
    for atom in sorted(formula.atoms(sympy.Eq, sympy.Ne), key=str):
        reads = _reads(atom, frame)
        if reads is None:
            continue
        leaf = evaluator.leaves.get(reads[0].func.__name__)
        if leaf is None or not _is_table(leaf, reads[0], evaluator, frame):
            continue
        if _where_equal(formula, reads, False) != sympy.false:
            continue  # keys of other documents may be seen
        inside = _where_equal(formula, reads, True).subs(reads[0], reads[1])
        if leaf.kind == "input":
            return Documents(leaf.node, inside, (_TOGETHER.format(leaf.node.name),))
        count = _Count(leaf.node, reads[0].args[0], evaluator, frame.call.node)
        if count.of_borders():
            return Documents(leaf.node, count.stepped(inside, frame), ())
    return None


def _reads(atom: Any, frame: Frame) -> tuple[Expr, Expr] | None:
    """The two reads of an atom that compares one function at the query and at the key."""
    difference = sympy.expand(atom.lhs - atom.rhs)
    calls = difference.atoms(AppliedUndef)
    at_query = [call for call in calls if call.args[-1] == frame.i]
    if len(calls) != 2 or len(at_query) != 1:
        return None
    query = at_query[0]
    key = query.func(*query.args[:-1], frame.j)
    both = {sympy.expand(query - key), sympy.expand(key - query)}
    return (query, key) if difference in both else None


def _is_table(leaf: Leaf, read: Expr, evaluator: Evaluator, frame: Frame) -> bool:
    """Whole numbers [batch or 1, length] that no parameter is behind, read in the query's row."""
    shape = shape_of(leaf.node)
    if leaf.trained or leaf.kind == "state" or leaf.node in evaluator.frozen or len(shape) != 2:
        return False
    own = dtype_of(leaf.node)
    if own.is_floating_point or own.is_complex or own == torch.bool:
        return False
    if not compared_in(leaf.node, frame.call.node, {own, torch.int64}):
        return False
    one_row = shape[0] == 1 or read.args[0] == frame.b
    length = shape[1].subs(frame.tie)
    return bool(one_row and length == frame.q_len == frame.kv_len)


def _where_equal(formula: Any, reads: tuple[Expr, Expr], equal: bool) -> Any:
    """The formula where the two reads are equal, or where they differ."""
    difference = sympy.expand(reads[0] - reads[1])
    known = {}
    for atom in formula.atoms(sympy.Eq, sympy.Ne):
        if sympy.expand(atom.lhs - atom.rhs) in (difference, sympy.expand(-difference)):
            known[atom] = sympy.true if equal == isinstance(atom, sympy.Eq) else sympy.false
    return formula.xreplace(known)


class _Count:
    """A running sum, taken for a count of document borders; `row` is the row that is read by the
    attention `reader`."""

    def __init__(self, node: Node, row: Expr, evaluator: Evaluator, reader: Node) -> None:
        self.node, self.row, self.evaluator, self.reader = node, row, evaluator, reader

    def of_borders(self) -> bool:
        """Whether zeros and ones are summed over the row: the sum never falls, so that the tokens
        of a document stand next to each other."""
        if op_name(self.node) != "aten.cumsum" or argument(self.node, "dim") not in (1, -1):
            return False
        if dtype_of(self.node) not in COUNTS:
            return False
        border = self._border(0)
        if isinstance(border, Cases):
            return all(number in (0, 1) for _, number in border.items)
        return is_truth(border)

    def stepped(self, inside: Any, frame: Frame) -> Any:
        """`inside` with the positions in it written as places in the row, where they are as good.

        A border stands wherever a position is not the one before plus one, so two tokens of one
        document are as far apart in their positions as they are in the row.
        """
        for query in sorted(inside.atoms(AppliedUndef), key=str):
            if query.args[-1] == frame.i and self._rises_by_one(query):
                key = query.func(*query.args[:-1], frame.j)
                inside = inside.subs(query, key + frame.i - frame.j)
        return inside

    def _border(self, first: int) -> Any:
        """What is summed at token `first` + t, for t >= 0."""
        source = self.node.args[0]
        assert isinstance(source, Node)
        return self.evaluator.value(source, (self.row, self._token(first) + first))

    def _token(self, first: int) -> Expr:
        length = sympy.expand(shape_of(self.node)[1] - first)
        return self.evaluator.space.index(f"token_{first}_{self.node.name}", length)

    def _rises_by_one(self, read: Expr) -> bool:
        leaf = self.evaluator.leaves.get(read.func.__name__)
        if leaf is None or leaf.node in self.evaluator.frozen or dtype_of(leaf.node) not in COUNTS:
            return False
        if not compared_in(leaf.node, self.reader, {*COUNTS, torch.float32, torch.float64}):
            return False
        before = self._token(1)
        now_there = read.func(*read.args[:-1], before + 1)
        step = now_there - read.func(*read.args[:-1], before)
        values = self.evaluator.values
        jumps = values.compare("ne", step, sympy.Integer(1))
        return bool(values.truth(self._border(1)) == jumps)
