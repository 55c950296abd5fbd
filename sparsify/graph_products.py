"""Products with weights in a captured graph: which weight, how large, how often per token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from sparsify.passes.capture import Captured
from sparsify.passes.graphs import aten, is_tensor, module_path, number, op_name, shape_of

__all__ = ["Measure", "Product", "embeddings_of", "first_products", "products_of"]

_PRODUCTS = aten("linear mm addmm matmul bmm baddbmm einsum _grouped_mm conv1d") | {
    "transformers.grouped_mm_fallback"
}
# What changes how a weight lies in memory, or its type, but not which numbers it holds.
_CARRIERS = aten(
    "t transpose permute view reshape unsqueeze squeeze to _to_copy contiguous clone expand "
    "slice select split chunk split_with_sizes unbind numpy_T mT alias detach"
) | {"getitem"}
_CHOICES = aten("index index_select gather")
_GROUPED = frozenset({"aten._grouped_mm", "transformers.grouped_mm_fallback"})

Measure = Callable[[Any], float]


@dataclass(frozen=True)
class Product:
    """One product: the node, its weight by name, and sizes.

    `weights` is the number of weights that the operand holds, all experts included; each token is
    multiplied with `uses` times `weights / experts` of them. `inputs` and `outputs` are the sizes
    of a row. `per_token` is False for what runs once per sequence, whatever its length.
    """

    node: Node
    state: str
    weights: int
    experts: int
    uses: float
    inputs: int
    outputs: int
    per_token: bool

    @property
    def path(self) -> str:
        """Path of the module it belongs to."""
        return module_path(self.node)


def products_of(
    captured: Captured, graph: Graph, tokens: Any, measures: tuple[Measure, Measure]
) -> list[Product]:
    """All products with parameters, in order.

    Args:
        tokens: expression of the number of tokens of a call.
        measures: what turn an expression into a number, for the example's length and for twice
            that length.
    """
    found = []
    for node in graph.nodes:
        if op_name(node) in _PRODUCTS and is_tensor(node):
            product = _product(captured, node, tokens, measures)
            if product is not None:
                found.append(product)
    return found


def embeddings_of(captured: Captured, graph: Graph) -> dict[str, int]:
    """Parameters that rows are looked up in, with how many numbers they hold."""
    found = {}
    for node in graph.nodes:
        if op_name(node) == "aten.embedding":
            weight = _weight(captured, node.all_input_nodes[0])
            if weight is not None:
                found[weight.state] = weight.count
    return found


def first_products(
    starts: Iterable[Node], steps: Callable[[Node], Iterable[Node]], known: set[Node]
) -> list[Node]:
    """The first products on every way from `starts` along `steps`."""
    todo, seen, hits = list(starts), set(starts), []
    while todo:
        node = todo.pop()
        if node in known:
            hits.append(node)
            continue
        new = [other for other in steps(node) if other not in seen]
        seen.update(new)
        todo += new
    return hits


@dataclass(frozen=True)
class _Weight:
    """A parameter as an operand: `chosen` when rows of a stack were taken of it."""

    state: str
    count: int
    shape: tuple[int, ...]
    chosen: bool


def _weight(captured: Captured, node: Node) -> _Weight | None:
    """The parameter that an operand is, if it is one; chosen rows of a stack count as all of it."""
    chosen = False
    shape: tuple[Any, ...] | None = None
    while node.name not in captured.parameters:
        name = op_name(node)
        if name in _CHOICES and is_tensor(node):
            chosen, shape = True, None
        elif name in _CARRIERS:
            if shape is None and not chosen and is_tensor(node):
                shape = shape_of(node)
        else:
            return None
        sources = node.all_input_nodes
        if not sources:
            return None
        node = sources[0]
    sizes = shape_of(node) if shape is None or chosen else shape
    if not all(getattr(size, "is_Integer", False) for size in sizes):
        return None
    numbers = tuple(int(size) for size in sizes)
    return _Weight(captured.parameters[node.name], math.prod(numbers), numbers, chosen)


def _operands(captured: Captured, node: Node) -> Iterator[tuple[Node, _Weight]]:
    """Operands that are weights: not biases, which have one axis."""
    for source in node.all_input_nodes:
        weight = _weight(captured, source)
        if weight is not None and len(weight.shape) > 1 and weight.count:
            yield source, weight


def _product(
    captured: Captured, node: Node, tokens: Any, measures: tuple[Measure, Measure]
) -> Product | None:
    found = next(_operands(captured, node), None)
    if found is None:
        return None
    source, weight = found
    is_stack = len(weight.shape) == 3 and (weight.chosen or op_name(node) in _GROUPED)
    experts = weight.shape[0] if is_stack else 1
    contracted = _contracted(node, source, weight)
    if contracted is None:
        return None
    produced = math.prod(shape_of(node))
    one = weight.count / experts
    short, long = (measure(produced) * contracted / one / measure(tokens) for measure in measures)
    return Product(
        node,
        weight.state,
        weight.count,
        experts,
        short,
        contracted,
        round(one / contracted),
        long > 0.75 * short,
    )


def _contracted(node: Node, source: Node, weight: _Weight) -> int | None:
    """Size of the axis that is summed over."""
    name = op_name(node)
    sizes = [number(size) for size in shape_of(source)]
    if name == "aten.linear":
        return weight.shape[-1]
    if name == "aten.conv1d":
        return weight.shape[-1] * weight.shape[-2]
    if name == "aten.einsum":
        others = [other for other in node.all_input_nodes if other is not source]
        return number(shape_of(others[0])[-1]) if others and is_tensor(others[0]) else None
    first = _first_factor(node)
    # The last axis of the factor in front, the last but one of the factor behind.
    return sizes[-1] if source is first else sizes[-2] if len(sizes) > 1 else None


def _first_factor(node: Node) -> Any:
    return node.args[1 if op_name(node) in ("aten.addmm", "aten.baddbmm") else 0]
