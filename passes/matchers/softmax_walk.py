"""What stands around a softmax: the product behind its scores, and what becomes of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from sparsify.passes.dominators import VIEWS, Dataflow
from sparsify.passes.graphs import (
    aten,
    behind,
    holds_data,
    is_shape_only,
    is_tensor,
    op_name,
    shape_of,
)
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.matchers.call import Operand
from sparsify.passes.matchers.products import PRODUCTS, factors_of
from sparsify.passes.pointwise import is_pointwise
from sparsify.passes.refused import Refused
from sparsify.passes.views import broadcast_index, view_source

__all__ = ["Surroundings", "scores_index", "softmax_index", "surroundings"]

Expr = Any
Index = tuple[Expr, ...]
JOINING = aten("cat concat amax")


@dataclass(frozen=True)
class Surroundings:
    """A softmax with the products before it and behind it.

    `scores` are products of two tensors of the input's data; `chain` the steps from them to the
    softmax; `weights` the softmax and its views; `values` the products with the weights, `between`
    what changes the weights before these, `others` who else reads the weights; `live` is what the
    model needs.
    """

    softmax: Node
    scores: tuple[Node, ...]
    chain: frozenset[Node]
    weights: frozenset[Node]
    values: tuple[Node, ...]
    between: tuple[Node, ...]
    others: tuple[Node, ...]
    live: frozenset[Node]

    @property
    def spine(self) -> frozenset[Node]:
        """Everything whose value depends on the scores, up to the softmax."""
        return self.chain | set(self.scores)

    def readers_of_scores(self) -> Iterator[tuple[Node, Node]]:
        """Who reads the scores besides the softmax, with what is read."""
        inside = self.spine | {self.softmax}
        for node in (*self.scores, *self.chain):
            for user in self.live.intersection(node.users) - inside:
                if _reads(user):
                    yield node, user


def surroundings(softmax: Node, flow: Dataflow) -> Surroundings:
    """What stands around the softmax, by the names of the operators."""
    chain, scores = _scores(softmax, flow)
    values: list[Node] = []
    between: list[Node] = []
    others: list[Node] = []
    for user, changed in _uses(softmax, flow.live):
        if op_name(user) in PRODUCTS:
            values.append(user)
            between += changed
        else:
            others.append(user)
    return Surroundings(
        softmax=softmax,
        scores=tuple(scores),
        chain=frozenset(chain),
        weights=frozenset(_views_of(softmax)),
        values=tuple(dict.fromkeys(values)),
        between=tuple(between),
        others=tuple(others),
        live=flow.live,
    )


def softmax_index(weights: Operand, softmax: Node, index: Index, space: IndexSpace) -> Index | None:
    """Element of the softmax that is element `index` of the weights; None if it cannot be read."""
    node, own = weights.node, weights.at(broadcast_index(index, weights.shape))
    while node is not softmax:
        step = view_source(node, own, space)
        if step is None:
            return None
        node, own = step
    return own


def scores_index(around: Surroundings, index: Index, space: IndexSpace) -> Index:
    """Element of the scores' product that element `index` of the softmax is made of.

    Raises:
        Refused: SCORES_MODIFIED when there is not exactly one.
    """
    spine, (product,) = around.spine, around.scores
    found: set[Index] = set()
    todo = [(around.softmax.args[0], index)]
    while todo:
        node, at = todo.pop()
        assert isinstance(node, Node)
        if node is product:
            found.add(at)
            continue
        view = view_source(node, at, space)
        if view is None and not is_pointwise(node):
            raise Refused("SCORES_MODIFIED", f"the scores pass through {op_name(node)}", node.name)
        inner = [source for source in node.all_input_nodes if source in spine]
        todo += [view] if view else [(s, broadcast_index(at, shape_of(s))) for s in inner]
    if len(found) != 1:
        message = "one weight is made of several scores"
        raise Refused("SCORES_MODIFIED", message, f"{product.name} at {sorted(found, key=str)}")
    return found.pop()


def _scores(softmax: Node, flow: Dataflow) -> tuple[list[Node], list[Node]]:
    """Elementwise steps before the softmax, and the products of two data tensors behind them."""
    chain: list[Node] = []
    scores: list[Node] = []
    seen, todo = set(), [softmax.args[0]]
    while todo:
        node = todo.pop()
        if not isinstance(node, Node) or node in seen or not is_tensor(node):
            continue
        seen.add(node)
        if op_name(node) in PRODUCTS:
            if _is_query_key(node, flow):
                scores.append(node)
        elif _passes(node):
            chain.append(node)
            todo += node.all_input_nodes
    return [n for n in chain if not set(scores).isdisjoint(behind(n, _stepped_over))], scores


def _is_query_key(product: Node, flow: Dataflow) -> bool:
    """Both factors depend on the model's inputs: a Parameter as keys is a memory or a gate."""
    return all(flow.inputs_of(factor) for factor in factors_of(product))


def _stepped_over(node: Node) -> list[Node]:
    """What a step before the softmax is made of."""
    return node.all_input_nodes if _passes(node) else []


def _passes(node: Node) -> bool:
    name = op_name(node)
    return name in VIEWS or name in JOINING or is_pointwise(node)


def _reads(user: Node) -> bool:
    """Whether the user reads values, not only a shape."""
    return user.op == "output" or (holds_data(user) and not is_shape_only(user))


def _uses(
    node: Node, live: frozenset[Node], changed: tuple[Node, ...] = ()
) -> Iterator[tuple[Node, tuple[Node, ...]]]:
    """Where the weights go: a product with values, or anything else; with what changes them."""
    for user in node.users:
        name = op_name(user)
        if user not in live:
            continue
        if name in VIEWS or name == "getitem":
            yield from _uses(user, live, changed)
        elif is_pointwise(user) and _reaches_product(user):
            yield from _uses(user, live, (*changed, user))
        elif _reads(user):
            yield user, changed


def _views_of(node: Node) -> Iterator[Node]:
    yield node
    for user in node.users:
        if op_name(user) in VIEWS:
            yield from _views_of(user)


def _reaches_product(node: Node) -> bool:
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if op_name(current) in PRODUCTS:
            return True
        if op_name(current) in VIEWS or is_pointwise(current):
            todo += current.users
    return False
