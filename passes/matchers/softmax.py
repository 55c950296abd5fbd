"""Anchor: a softmax between two matrix products, attention spelt out by hand.

A softmax that is no attention (a router's, a classifier's, a memory lookup's) is told apart by its
scores: they are no product of queries and keys. How the axes of both products belong together is
read by index arithmetic: row i and key j of the weights are followed back to the scores.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from sparsify.passes.dominators import Dataflow
from sparsify.passes.graphs import argument, aten, dtype_of, op_name, shape_of
from sparsify.passes.index_expr import Evaluator
from sparsify.passes.index_space import IndexSpace, Ranges
from sparsify.passes.matchers.call import AttentionCall, Operand, Scores, turned
from sparsify.passes.matchers.operands import Tracer
from sparsify.passes.matchers.products import Product, added, read_product
from sparsify.passes.matchers.softmax_checks import check
from sparsify.passes.matchers.softmax_walk import (
    Surroundings,
    scores_index,
    softmax_index,
    surroundings,
)
from sparsify.passes.refused import Refused
from sparsify.passes.views import broadcast_index

__all__ = ["is_anchor", "place_of", "read_call"]

Expr = Any
Index = tuple[Expr, ...]
SOFTMAXES = aten("softmax _softmax _safe_softmax")
HINT = "Use torch.nn.functional.scaled_dot_product_attention."


def is_anchor(node: Node) -> bool:
    """Whether the node is a softmax."""
    return op_name(node) in SOFTMAXES


def place_of(node: Node, flow: Dataflow) -> Node:
    """The node by which the attention around a softmax is named: the product with the values."""
    return next(iter(surroundings(node, flow).values), node)


def read_call(node: Node, flow: Dataflow, evaluator: Evaluator) -> AttentionCall:
    """The attention around a softmax.

    Args:
        node: the softmax.
        flow: which inputs a value depends on.
        evaluator: reads constant factors.

    Raises:
        Refused: NOT_ATTENTION, or why the form cannot be replaced.
    """
    around = surroundings(node, flow)
    check(around, flow)
    return _Form(around, evaluator.space.ranges).call(evaluator)


class _Form:
    """Both products of a written-out attention, and how their axes belong together."""

    def __init__(self, around: Surroundings, ranges: Ranges) -> None:
        self.around, self.space = around, IndexSpace(ranges)
        self.scores, self.values = _product(around.scores[0]), self._values()
        out, weights = self.values.out, self.values.left
        self.lead = tuple(self.space.index(f"n{a}", s) for a, s in enumerate(out.shape[:-2]))
        self.i = self.space.index("i", out.shape[-2])
        self.j = self.space.index("j", weights.shape[-1])

    def call(self, evaluator: Evaluator) -> AttentionCall:
        """The attention, its operands in front of permutations and constant factors."""
        entries = self._at_scores()
        scores, lead = self._turned(entries)
        tracer = Tracer(self.space, evaluator, dtype_of(self.values.right.node))
        q, q_factor = self._operand(tracer, "q", scores.left, lead)
        k, k_factor = self._operand(tracer, "k", scores.right, lead)
        v, _ = self._operand(tracer, "v", turned(self.values.right), self.lead)
        places, softmax = (*self.lead, self.i, self.j), self.around.softmax
        return AttentionCall(
            pattern=self._pattern(),
            out=self.values.out,
            q=q,
            k=k,
            v=v,
            mask=None,
            dropout_p=0.0,
            is_causal=False,
            scale=q_factor * k_factor,
            enable_gqa=False,
            scores=Scores(scores.out.node, entries, places, softmax, self.values.left),
        )

    def _operand(
        self, tracer: Tracer, name: str, factor: Operand, lead: Index
    ) -> tuple[Operand, float]:
        """The operand of a factor that is read at these leading entries; its length may have a
        symbol of its own."""
        own = tuple(
            self.space.index(f"{axis}_of_{name}", size)
            for axis, size in zip(("row", "feature"), factor.shape[-2:], strict=True)
        )
        index = factor.at(broadcast_index((*lead, *own), factor.shape))
        found = tracer.operand(
            factor.node,
            index,
            (*self.lead, *own),
            factors=name != "v",
            broadcast=len(self.lead) if name != "q" and len(self.lead) > 1 else 0,
        )
        if found is None:
            raise _unsupported("batch and heads of the scores lie otherwise", factor.node)
        return found

    def _values(self) -> Product:
        """The product with the values, seen with the weights on the left."""
        product = _product(self.around.values[0])
        addend = added(product.out.node)
        if addend is not None and addend[1:] != (0, 1):
            raise _unsupported("the product with the values adds a tensor", product.out.node)
        sides = [p for p in (product, product.swapped()) if p.left.node in self.around.weights]
        if len(sides) != 1:
            raise _unsupported("the weights are multiplied by themselves", product.out.node)
        return sides[0]

    def _at_scores(self) -> Index:
        """The scores' own element for row i and key j."""
        softmax, weights = self.around.softmax, self.values.left
        index = softmax_index(weights, softmax, (*self.lead, self.i, self.j), self.space)
        if index is None:
            raise _unsupported("the weights are rearranged", weights.node)
        dim = argument(softmax, "dim", -1) % len(index)
        if index[dim] != self.j:
            raise Refused("SOFTMAX_AXIS", "the softmax does not run over the keys", f"dim={dim}")
        if shape_of(softmax)[dim] != weights.shape[-1]:
            evidence = f"{weights.shape[-1]} of {shape_of(softmax)[dim]} columns"
            raise Refused("WEIGHTS_MODIFIED", "a part of the attention weights is used", evidence)
        return scores_index(self.around, index, self.space)

    def _turned(self, entries: Index) -> tuple[Product, Index]:
        """The scores' product with the queries on the left, and the leading entries it is read
        at."""
        node = self.scores.out.node
        for product in (self.scores, self.scores.swapped()):
            index = tuple(entries[axis] for axis in product.out.order)
            if index[-2:] == (self.i, self.j):
                if product.out.shape[-2:] == (
                    self.values.out.shape[-2],
                    self.values.left.shape[-1],
                ):
                    return product, index[:-2]
                evidence = f"{node.name} has the shape {product.out.shape}"
                raise Refused("SCORES_MODIFIED", "a part of the scores is used", evidence)
        evidence = f"row i and key j read element {entries} of {node.name}"
        raise Refused("SCORES_MODIFIED", "the scores are rearranged", evidence)

    def _pattern(self) -> str:
        names = {op_name(p.out.node) for p in (self.scores, self.values)}
        if "aten.einsum" in names:
            return "einsum"
        return "baddbmm" if op_name(self.scores.out.node) == "aten.baddbmm" else "softmax"


def _product(node: Node) -> Product:
    product = read_product(node)
    if product is None:
        raise _unsupported("a product of other axes", node)
    return product


def _unsupported(what: str, node: Node) -> Refused:
    return Refused(
        "FORM_UNSUPPORTED",
        f"attention written out in a form that is not read: {what}",
        f"{node.name} of shape {tuple(shape_of(node))}",
        HINT,
    )
