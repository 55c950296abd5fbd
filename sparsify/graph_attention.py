"""The sizes of all attention in a captured graph, proved or refused, for the cost model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import Node

from sparsify.cost_model.workload import AttentionShape
from sparsify.ir import AttentionSite, Refusal, site_key, site_name
from sparsify.passes.capture import Captured
from sparsify.passes.detect import attention_calls, attention_nodes
from sparsify.passes.graphs import aten, is_tensor, number, op_name, shape_of
from sparsify.passes.matchers.call import AttentionCall

__all__ = ["Place", "Sizes", "found_attention"]

_WINDOW = re.compile(r"last (\d+) keys")
# Refused for what it sees: its pairs are not those of causal attention.
_OTHER_PAIRS = ("NOT_CAUSAL", "CROSS_ATTENTION", "NOT_SELF_ATTENTION", "MASK_UNSUPPORTED")
_PRODUCTS = aten("matmul bmm")


@dataclass(frozen=True)
class Sizes:
    """One attention in the graph: nodes of its operands and result, heads, rows of the queries."""

    q: Node
    k: Node
    v: Node
    out: Node
    shape: AttentionShape
    rows: tuple[Any, ...]

    @property
    def tokens(self) -> Any:
        """Tokens of a call, as an expression over the captured sizes."""
        return sympy.prod(self.rows) / self.shape.q_heads

    @property
    def length_symbols(self) -> set[Any]:
        """Symbols that the number of queries per sequence depends on."""
        return set(getattr(self.rows[-1], "free_symbols", ()))


@dataclass(frozen=True)
class Place:
    """An attention with its name, its window, and whether it was proved."""

    fqn: str
    ordinal: int
    sizes: Sizes
    window: int | None
    proved: bool

    @property
    def container(self) -> str:
        """Path of the module around the attention, with a dot; "" when there is none."""
        parent, dot, _ = self.fqn.rpartition(".")
        return parent + dot


def found_attention(
    captured: Captured,
    sites: Sequence[AttentionSite],
    refusals: Sequence[Refusal],
    assume: Callable[[str], Any],
) -> list[Place]:
    """All attention whose sizes are known, in execution order; `assume` is told of the rest."""
    proved = {site_key(site.fqn, site.ordinal): site for site in sites}
    refused = {site_key(r.fqn, r.ordinal): r for r in refusals}
    calls = attention_calls(captured)
    places = []
    for (fqn, ordinal), node in attention_nodes(captured).items():
        key, call = site_key(fqn, ordinal), calls.get((fqn, ordinal))
        site, refusal = proved.get(key), refused.get(key)
        sizes = _written_out(node) if call is None else _called(call, site)
        if sizes is None:
            assume(
                f"The attention {site_name(fqn, ordinal)} has no sizes that are read; "
                "it is not counted."
            )
            continue
        if refusal is not None and refusal.code in _OTHER_PAIRS:
            assume(f"{site_name(fqn, ordinal)} is counted as if it were causal self-attention.")
        if refusal is not None and refusal.code == "NATIVELY_SPARSE":
            assume("Some layers are natively sparse; dense is what they would cost without it.")
        places.append(Place(fqn, ordinal, sizes, _window(refusal), site is not None))
    return places


def _window(refusal: Refusal | None) -> int | None:
    if refusal is None or refusal.code != "SLIDING_WINDOW":
        return None
    found = _WINDOW.search(refusal.message)
    return int(found[1]) if found else None


def _called(call: AttentionCall, site: AttentionSite | None) -> Sizes | None:
    """Sizes of attention whose form is read; those of refused ones as the operands show them."""
    if site is not None:
        heads = site.heads
        shape: AttentionShape | None = AttentionShape(
            heads.q_heads, heads.kv_heads, heads.head_dim, heads.value_dim
        )
    else:
        shape = _heads(call.q.shape, call.k.shape, call.v.shape[-1])
    if shape is None:
        return None
    rows = call.q.shape[:-1]
    return Sizes(call.q.node, call.k.node, call.v.node, call.out.node, shape, rows)


def _heads(q: Sequence[Any], k: Sequence[Any], value_dim: Any) -> AttentionShape | None:
    """From layouts [..., H, L, D]; None when a size is no number."""
    if min(len(q), len(k)) < 4:
        return None
    sizes = [number(size) for size in (q[-3], k[-3], q[-1], value_dim)]
    if any(size is None for size in sizes):
        return None
    q_heads, kv_heads, head_dim, last = (int(size or 0) for size in sizes)
    if not kv_heads or q_heads % kv_heads:
        return None
    return AttentionShape(q_heads, kv_heads, head_dim, last)


def _written_out(node: Node) -> Sizes | None:
    """Sizes of attention that is written out in a form that is not read: two products around it.

    The product with the values is the nearest one from `node` on, that with the keys the nearest
    in front of its weights.
    """
    values = node if _is_product(node) else _nearest(node.users, lambda n: n.users)
    if values is None or not is_tensor(values):
        return None
    weights, v = values.all_input_nodes[:2]
    scores = weights if _is_product(weights) else _nearest([weights], _sources)
    if scores is None:
        return None
    q, k = scores.all_input_nodes[:2]
    turned = (*shape_of(k)[:-2], shape_of(k)[-1], shape_of(k)[-2])
    shape = _heads(shape_of(q), turned, shape_of(values)[-1])
    return None if shape is None else Sizes(q, k, v, values, shape, shape_of(q)[:-1])


def _sources(node: Node) -> Iterator[Node]:
    yield from (source for source in node.all_input_nodes if is_tensor(source))


def _is_product(node: Node) -> bool:
    return op_name(node) in _PRODUCTS and len(node.all_input_nodes) == 2


def _nearest(starts: Iterable[Node], steps: Callable[[Node], Iterable[Node]]) -> Node | None:
    """The first product on the shortest way from `starts`."""
    todo, seen = list(starts), set(starts)
    while todo:
        node = todo.pop(0)
        if _is_product(node):
            return node
        new = [other for other in steps(node) if other not in seen]
        seen.update(new)
        todo += new
    return None
