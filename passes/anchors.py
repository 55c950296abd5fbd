"""All attention calls of a graph, in execution order, with their names.

The matchers are asked one after the other; a node belongs to the first that knows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Node

from sparsify.passes.aliases import changed_in_place
from sparsify.passes.capture import Captured
from sparsify.passes.dominators import Dataflow
from sparsify.passes.graphs import module_path
from sparsify.passes.index_expr import Evaluator
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.matchers import fused, sdpa, softmax
from sparsify.passes.matchers.call import AttentionCall
from sparsify.passes.refused import Refused

__all__ = ["Anchor", "Anchors", "find_anchors"]


@dataclass(frozen=True)
class Anchor:
    """One attention. `node` holds its result, or is where it was found; `call` says how it is
    written, `reason` is set instead when its form alone refuses it."""

    node: Node
    fqn: str
    ordinal: int
    call: AttentionCall | None = None
    reason: Refused | None = None


@dataclass(frozen=True)
class Anchors:
    """Attention calls, and what only looks like attention (reason NOT_ATTENTION)."""

    attention: tuple[Anchor, ...]
    lookalikes: tuple[Anchor, ...]

    @property
    def calls(self) -> dict[Node, AttentionCall]:
        """The calls that could be read, by the node of their result."""
        return {a.call.node: a.call for a in self.attention if a.call is not None}


def find_anchors(captured: Captured) -> Anchors:
    """Find all attention of a normalised graph. Ordinals count attention only."""
    attention: list[Anchor] = []
    lookalikes: list[Anchor] = []
    counts: dict[str, int] = {}
    for node, found in _matches(captured):
        fqn = module_path(node)
        if isinstance(found, Refused) and found.code == "NOT_ATTENTION":
            lookalikes.append(Anchor(node, fqn, len(lookalikes), reason=found))
            continue
        ordinal = counts.get(fqn, 0)
        counts[fqn] = ordinal + 1
        if isinstance(found, Refused):
            attention.append(Anchor(node, fqn, ordinal, reason=found))
        else:
            attention.append(Anchor(node, fqn, ordinal, call=found))
    return Anchors(tuple(attention), tuple(lookalikes))


def _matches(captured: Captured) -> Iterator[tuple[Node, AttentionCall | Refused]]:
    """Every attention: where it is, and how it is written or why that is not read."""
    flow = Dataflow(captured.graph, captured.inputs)
    space = IndexSpace(captured.ranges)
    evaluator = Evaluator(captured, space, changed_in_place(captured.graph))
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        if sdpa.is_anchor(node):
            yield node, flow.calls[node]
        elif softmax.is_anchor(node):
            place = softmax.place_of(node, flow)
            try:
                yield place, softmax.read_call(node, flow, evaluator)
            except Refused as reason:
                yield place, reason
        elif fused.is_anchor(node):
            yield node, fused.judge(node)
