"""The shape of any captured model, for the cost model: its attention and its products with weights.

Every attention that was found costs time, whether proved or refused. A product belongs to the
attention that it feeds (projections), to the one whose result it takes first (output), or to the
one that it stands behind; its weights tell FLOPs and bytes. Nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.cost_model.model_shape import Experts, LayerShape, ModelShape
from sparsify.errors import NothingToDoError
from sparsify.graph_attention import Place, Sizes, found_attention
from sparsify.graph_products import Measure, Product, embeddings_of, first_products, products_of
from sparsify.ir import AttentionSite, Refusal, site_name
from sparsify.passes.capture import Captured

__all__ = ["graph_shape"]


@dataclass
class _Layer:
    """One attention and the products that belong to it."""

    place: Place
    qkv: list[Product] = field(default_factory=list)
    output: list[Product] = field(default_factory=list)
    mlp: list[Product] = field(default_factory=list)


def graph_shape(
    captured: Captured,
    sites: Sequence[AttentionSite],
    refusals: Sequence[Refusal],
    *,
    name: str,
) -> ModelShape:
    """The shape of the model that `captured` was captured of, without a cache.

    Args:
        sites, refusals: what was proved of its attention, and what was refused.

    Raises:
        NothingToDoError: the graph holds no attention whose sizes are fixed numbers.
    """
    assumptions: dict[str, None] = {}
    places = found_attention(captured, sites, refusals, assumptions.setdefault)
    if not places:
        raise NothingToDoError(f"No attention of known size was found in {name}.")
    first, parameters = places[0], _parameters(captured)
    graph = first.sizes.out.graph
    products = products_of(captured, graph, first.sizes.tokens, _measures(captured, first))
    embeddings = embeddings_of(captured, graph)
    head = _head(places, products, embeddings)
    layers = _assigned(places, [p for p in products if p is not head and p.per_token])
    used = {product.state for product in products} | set(embeddings)
    rest = {name: p.numel() for name, p in parameters.items() if name not in used}
    shapes = [_shape(layer, rest) for layer in layers]
    if head is not None:
        assumptions.setdefault("The last product is taken for the head that computes logits.")
    total = sum(parameter.numel() for parameter in parameters.values())
    in_layers = sum(shape.params_total for shape in shapes)
    return ModelShape(
        name=name,
        hidden_size=_hidden(layers, products),
        layers=tuple(shapes),
        **_beside_layers(embeddings, head, total - in_layers),
        weight_bytes_per_param=_bytes_per_param(parameters.values()),
        assumptions=tuple(assumptions),
    )


def _beside_layers(
    embeddings: Mapping[str, int], head: Product | None, rest: int
) -> dict[str, Any]:
    """Weights beside those of the layers, `rest` in all, as `ModelShape` takes them."""
    embedding = _embedding(embeddings, head)
    tied = head is not None and head.state in embeddings
    head_params = head.weights if head is not None else 0
    return {
        "embedding_params": embedding,
        "head_params": head_params,
        "tied": tied,
        # Less than nothing where weights are used several times.
        "other_params": rest - embedding - (0 if tied else head_params),
    }


def _measures(captured: Captured, place: Place) -> tuple[Measure, Measure]:
    """What turns an expression into a number: at the example's sizes, and at twice its length."""
    lengths = place.sizes.length_symbols

    def measure(factor: int) -> Measure:
        def value(expression: Any) -> float:
            free: set[Any] = getattr(expression, "free_symbols", set())
            sizes = {
                symbol: captured.examples.get(str(symbol), 2) * (factor if symbol in lengths else 1)
                for symbol in free
            }
            return float(sympy.sympify(expression).subs(sizes))

        return value

    return measure(1), measure(2)


def _head(
    places: Sequence[Place], products: Sequence[Product], embeddings: dict[str, int]
) -> Product | None:
    """The last product, when it turns a row into scores of what the embedding holds."""
    if not products or not embeddings:
        return None
    last = products[-1]
    inside = any(place.container and last.path.startswith(place.container) for place in places)
    return None if inside or last.weights not in embeddings.values() else last


def _embedding(embeddings: Mapping[str, int], head: Product | None) -> int:
    """Numbers in the table of tokens; other tables, of positions, are smaller than most."""
    if head is not None:
        return head.weights  # `_head` saw a table of that size
    return max(embeddings.values(), default=0)


def _assigned(places: Sequence[Place], products: Sequence[Product]) -> list[_Layer]:
    """Every product with its layer: by what it feeds, what it takes, or where it stands."""
    by_node = {product.node: product for product in products}
    left, known = dict(by_node), set(by_node)
    layers = []
    for place in places:
        layer, sizes = _Layer(place), place.sizes
        before = first_products((sizes.q, sizes.k, sizes.v), _sources, known)
        after = first_products([sizes.out], lambda node: node.users, known)
        if not place.proved:
            layer.place = replace(place, sizes=_with_own_keys(sizes, by_node))
        layer.qkv += [left.pop(node) for node in before if node in left]
        layer.output += [left.pop(node) for node in after if node in left]
        layers.append(layer)
    order = {node: index for index, node in enumerate(places[0].sizes.out.graph.nodes)}
    for node, product in left.items():
        before_it = sum(order[place.sizes.out] < order[node] for place in places)
        layers[max(before_it - 1, 0)].mlp.append(product)
    return layers


def _sources(node: Node) -> list[Node]:
    return node.all_input_nodes


def _with_own_keys(sizes: Sizes, by_node: Mapping[Node, Product]) -> Sizes:
    """With as many KV heads as the keys' own projection makes; the operand may hold each of them
    several times, once for every query head of its group."""
    queries, keys = (first_products([n], _sources, set(by_node)) for n in (sizes.q, sizes.k))
    if len(keys) != 1 or keys[0] in queries:
        return sizes
    shape = sizes.shape
    kv_heads, rest = divmod(by_node[keys[0]].outputs, shape.head_dim)
    if rest or not kv_heads or shape.kv_heads % kv_heads or shape.q_heads % kv_heads:
        return sizes
    return replace(sizes, shape=replace(shape, kv_heads=kv_heads))


def _shape(layer: _Layer, rest: dict[str, int]) -> LayerShape:
    """The layer; parameters in no product (norms, biases) are taken from `rest` by their path."""
    place, groups = layer.place, (layer.qkv, layer.output, layer.mlp)
    routed = [product for group in groups for product in group if product.experts > 1]
    mine = [name for name in rest if place.container and name.startswith(place.container)]
    return LayerShape(
        name=site_name(place.fqn, place.ordinal),
        kind="attention" if place.window is None else "sliding",
        attention=place.sizes.shape,
        window=place.window,
        qkv_params=_weights(layer.qkv),
        output_params=_weights(layer.output),
        mlp_params=_weights(layer.mlp),
        experts=_experts(routed),
        other_params=sum(rest.pop(name) for name in mine),
        fixed=not place.proved and place.window is None,
    )


def _weights(products: Sequence[Product]) -> int:
    """Weights that a token is multiplied with; those used several times count as often."""
    return sum(math.ceil(p.weights * max(p.uses, 1)) for p in products if p.experts == 1)


def _experts(routed: Sequence[Product]) -> Experts | None:
    """The experts of a layer as one stack."""
    if not routed:
        return None
    count = max(product.experts for product in routed)
    params = sum(product.weights // product.experts for product in routed)
    used = sum(product.uses * product.weights / product.experts for product in routed)
    return Experts(count, min(max(round(used / params), 1), count), params)


def _hidden(layers: Sequence[_Layer], products: Sequence[Product]) -> int:
    """Width of the rows that the first projection takes."""
    first = layers[0].qkv or list(products)
    shape = layers[0].place.sizes.shape
    return first[0].inputs if first else shape.q_heads * shape.head_dim


def _parameters(captured: Captured) -> dict[str, torch.Tensor]:
    """Parameters by name, those that are shared once."""
    found: dict[str, torch.Tensor] = {}
    seen = set()
    for placeholder, name in captured.parameters.items():
        value = captured.value(placeholder)
        if value is not None and id(value) not in seen:
            seen.add(id(value))
            found[name] = value
    return found


def _bytes_per_param(parameters: Iterable[torch.Tensor]) -> float:
    """Bytes of a parameter as the model holds it, on average."""
    sizes = [(p.numel(), p.element_size()) for p in parameters]
    total = sum(count for count, _ in sizes)
    return sum(count * size for count, size in sizes) / total if total else 2.0
