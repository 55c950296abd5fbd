"""The shape of any captured model, for the cost model: its attention and its products with weights.

Every attention that was found costs time, whether proved or refused. A product belongs to the
attention that it feeds (projections), to the one whose result it takes first (output), or to the
one that it stands behind; its weights tell FLOPs and bytes. Nothing is run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch.fx import Node

from sparsify.cost_model.model_shape import Experts, LayerShape, ModelShape
from sparsify.cost_model.workload import AttentionShape
from sparsify.errors import NothingToDoError
from sparsify.graph_products import Measure, Product, embeddings_of, first_products, products_of
from sparsify.ir import AttentionSite, Refusal, site_key, site_name
from sparsify.passes.capture import Captured
from sparsify.passes.detect import attention_calls, attention_nodes
from sparsify.passes.graphs import number
from sparsify.passes.matchers.call import AttentionCall

__all__ = ["graph_shape"]

_WINDOW = re.compile(r"last (\d+) keys")
# Refused for what it sees: its pairs are not those of causal attention.
_OTHER_PAIRS = ("NOT_CAUSAL", "CROSS_ATTENTION", "NOT_SELF_ATTENTION", "MASK_UNSUPPORTED")


@dataclass
class _Layer:
    """One attention and the products that belong to it."""

    fqn: str
    ordinal: int
    shape: AttentionShape
    window: int | None
    proved: bool
    call: AttentionCall
    products: dict[str, list[Product]] = field(
        default_factory=lambda: {"qkv": [], "output": [], "mlp": []}
    )

    @property
    def container(self) -> str:
        """Path of the module around the attention, with a dot; "" when there is none."""
        parent, dot, _ = self.fqn.rpartition(".")
        return parent + dot


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
    layers = _layers(captured, sites, refusals, assumptions)
    if not layers:
        raise NothingToDoError(f"No attention of known size was found in {name}.")
    graph, parameters = layers[0].call.node.graph, _parameters(captured)
    products = products_of(captured, graph, _tokens(layers[0]), _measures(captured, layers[0]))
    embeddings = embeddings_of(captured, graph)
    head = _head(layers, products, embeddings)
    _assign(layers, [p for p in products if p is not head and p.per_token])
    shapes = _with_rest(
        layers, [_shape(layer) for layer in layers], parameters, products, embeddings
    )
    if head is not None:
        assumptions.setdefault("The last product is taken for the head that computes logits.")
    embedding = _embedding(embeddings, head)
    tied = head is not None and head.state in embeddings
    counted = embedding + sum(shape.params_total for shape in shapes)
    counted += head.weights if head is not None and not tied else 0
    total = sum(parameter.numel() for parameter in parameters.values())
    return ModelShape(
        name=name,
        hidden_size=_hidden(layers, products),
        layers=tuple(shapes),
        embedding_params=embedding,
        head_params=head.weights if head is not None else 0,
        tied=tied,
        other_params=max(total - counted, 0),
        weight_bytes_per_param=_bytes_per_param(parameters.values()),
        assumptions=tuple(assumptions),
    )


def _layers(
    captured: Captured,
    sites: Sequence[AttentionSite],
    refusals: Sequence[Refusal],
    assumptions: dict[str, None],
) -> list[_Layer]:
    """All attention whose sizes are known, in execution order."""
    proved = {site_key(site.fqn, site.ordinal): site for site in sites}
    refused = {site_key(r.fqn, r.ordinal): r for r in refusals}
    calls = attention_calls(captured)
    layers = []
    for fqn, ordinal in attention_nodes(captured):
        key, call = site_key(fqn, ordinal), calls.get((fqn, ordinal))
        site, refusal = proved.get(key), refused.get(key)
        heads = _proved_heads(site) if site is not None else _read_heads(call)
        if heads is None or call is None:
            assumptions.setdefault(
                f"The attention {site_name(fqn, ordinal)} has no sizes that are read; "
                "it is not counted."
            )
            continue
        window = _window(refusal)
        if refusal is not None and refusal.code in _OTHER_PAIRS:
            assumptions.setdefault(
                f"{site_name(fqn, ordinal)} is counted as if it were causal self-attention."
            )
        layers.append(_Layer(fqn, ordinal, heads, window, site is not None, call))
    return layers


def _proved_heads(site: AttentionSite) -> AttentionShape:
    heads = site.heads
    return AttentionShape(heads.q_heads, heads.kv_heads, heads.head_dim, heads.value_dim)


def _read_heads(call: AttentionCall | None) -> AttentionShape | None:
    """Heads of a refused attention as its operands show them."""
    if call is None or call.rank < 4:
        return None
    sizes = (call.q.shape[-3], call.k.shape[-3], call.q.shape[-1], call.v.shape[-1])
    q_heads, kv_heads, head_dim, value_dim = (number(size) for size in sizes)
    if q_heads is None or kv_heads is None or head_dim is None or value_dim is None:
        return None
    return (
        AttentionShape(q_heads, kv_heads, head_dim, value_dim) if q_heads % kv_heads == 0 else None
    )


def _window(refusal: Refusal | None) -> int | None:
    if refusal is None or refusal.code != "SLIDING_WINDOW":
        return None
    found = _WINDOW.search(refusal.message)
    return int(found[1]) if found else None


def _tokens(layer: _Layer) -> Any:
    """Tokens of a call: rows of the queries over their heads."""
    rows = sympy.Integer(1)
    for size in layer.call.q.shape[:-1]:
        rows *= size
    return rows / layer.shape.q_heads


def _measures(captured: Captured, layer: _Layer) -> tuple[Measure, Measure]:
    lengths: set[Any] = getattr(layer.call.q_len, "free_symbols", set())

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
    layers: Sequence[_Layer], products: Sequence[Product], embeddings: dict[str, int]
) -> Product | None:
    """The last product, when it turns a row into scores of what the embedding holds."""
    if not products or not embeddings:
        return None
    last = products[-1]
    inside = any(layer.container and last.path.startswith(layer.container) for layer in layers)
    return None if inside or last.weights not in embeddings.values() else last


def _embedding(embeddings: Mapping[str, int], head: Product | None) -> int:
    """Numbers in the table of tokens; other tables, of positions, are smaller than most."""
    if head is not None:
        return head.weights  # `_head` saw a table of that size
    return max(embeddings.values(), default=0)


def _assign(layers: Sequence[_Layer], products: Sequence[Product]) -> None:
    """Every product to its layer: by what it feeds, what it takes, or where it stands."""
    by_node = {product.node: product for product in products}
    left = dict(by_node)
    for layer in layers:
        operands = (layer.call.q.node, layer.call.k.node, layer.call.v.node)
        before = first_products(operands, lambda node: node.all_input_nodes, set(by_node))
        if not layer.proved:
            layer.shape = _with_own_keys(layer, by_node)
        after = first_products([layer.call.out.node], lambda node: node.users, set(by_node))
        for role, nodes in (("qkv", before), ("output", after)):
            found = [left.pop(node) for node in nodes if node in left]
            layer.products[role] += found
    order = {node: place for place, node in enumerate(layers[0].call.node.graph.nodes)}
    places = [order[layer.call.node] for layer in layers]
    for node, product in left.items():
        before_it = sum(place < order[node] for place in places)
        layers[max(before_it - 1, 0)].products["mlp"].append(product)


def _with_own_keys(layer: _Layer, by_node: dict[Node, Product]) -> AttentionShape:
    """Heads with as many KV heads as the keys' own projection makes; its operand may hold each of
    them several times, once for every query head of its group."""
    shape = layer.shape
    queries, keys = (
        first_products([operand.node], lambda node: node.all_input_nodes, set(by_node))
        for operand in (layer.call.q, layer.call.k)
    )
    if len(keys) != 1 or keys[0] in queries:
        return shape
    kv_heads, rest = divmod(by_node[keys[0]].outputs, shape.head_dim)
    if rest or not kv_heads or shape.kv_heads % kv_heads or shape.q_heads % kv_heads:
        return shape
    return replace(shape, kv_heads=kv_heads)


def _shape(layer: _Layer) -> LayerShape:
    routed = [p for group in layer.products.values() for p in group if p.experts > 1]
    window = layer.window
    return LayerShape(
        name=site_name(layer.fqn, layer.ordinal),
        kind="attention" if window is None else "sliding",
        attention=layer.shape,
        window=window,
        qkv_params=_weights(layer.products["qkv"]),
        output_params=_weights(layer.products["output"]),
        mlp_params=_weights(layer.products["mlp"]),
        experts=_experts(routed),
        fixed=not layer.proved and window is None,
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


def _with_rest(
    layers: Sequence[_Layer],
    shapes: Sequence[LayerShape],
    parameters: Mapping[str, torch.Tensor],
    products: Sequence[Product],
    embeddings: dict[str, int],
) -> list[LayerShape]:
    """Parameters that are in no product, such as norms and biases, go to the layer around them."""
    used = {product.state for product in products} | set(embeddings)
    rest = {name: p.numel() for name, p in parameters.items() if name not in used}
    found = []
    for layer, shape in zip(layers, shapes, strict=True):
        mine = [name for name in rest if layer.container and name.startswith(layer.container)]
        found.append(replace(shape, other_params=sum(rest.pop(name) for name in mine)))
    return found


def _hidden(layers: Sequence[_Layer], products: Sequence[Product]) -> int:
    """Width of the rows that the first projection takes."""
    first = layers[0].products["qkv"] or list(products)
    return first[0].inputs if first else layers[0].shape.q_heads * layers[0].shape.head_dim


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
