"""All attention calls of a graph, in execution order, with their names.

The matchers are asked one after the other; a node belongs to the first that knows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from sparsify.passes.capture import Captured
from sparsify.passes.dominators import Dataflow
from sparsify.passes.graphs import module_path
from sparsify.passes.matchers import fused, sdpa, softmax
from sparsify.passes.refused import Refused

__all__ = ["Anchor", "Anchors", "find_anchors"]


@dataclass(frozen=True)
class Anchor:
    """One call. `reason` is set when its form alone refuses it."""

    node: Node
    fqn: str
    ordinal: int
    reason: Refused | None = None


@dataclass(frozen=True)
class Anchors:
    """Attention calls, and what only looks like attention (reason NOT_ATTENTION)."""

    attention: tuple[Anchor, ...]
    lookalikes: tuple[Anchor, ...]


def find_anchors(captured: Captured) -> Anchors:
    """Find all attention of a normalised graph. Ordinals count attention only."""
    flow = Dataflow(captured.graph, captured.inputs)
    attention: list[Anchor] = []
    lookalikes: list[Anchor] = []
    counts: dict[str, int] = {}
    for node in captured.graph.nodes:
        found, reason = _match(node, flow)
        if not found:
            continue
        fqn = module_path(node)
        if reason is not None and reason.code == "NOT_ATTENTION":
            lookalikes.append(Anchor(node, fqn, len(lookalikes), reason))
            continue
        attention.append(Anchor(node, fqn, counts.get(fqn, 0), reason))
        counts[fqn] = counts.get(fqn, 0) + 1
    return Anchors(tuple(attention), tuple(lookalikes))


def _match(node: Node, flow: Dataflow) -> tuple[bool, Refused | None]:
    if node.op != "call_function":
        return False, None
    if sdpa.is_anchor(node):
        return True, None
    if softmax.is_anchor(node):
        return True, softmax.judge(node, flow)
    if fused.is_anchor(node):
        return True, fused.judge(node)
    return False, None
