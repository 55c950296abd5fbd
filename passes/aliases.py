"""Who shares memory with whom, and what is changed in place.

Captured graphs are not functional: `masked_fill_`, `add_` and writes through views occur.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch.fx import Graph, Node

from sparsify.passes.graphs import aten, is_tensor, op_name

__all__ = [
    "aliases_of",
    "base_of",
    "changed_in_place",
    "is_certain_view",
    "mutations_of",
    "written",
]


def written(node: Node) -> Node | None:
    """The tensor that the operator writes to, or None."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    if target is torch.ops.aten.detach_.default:  # changes what autograd knows, not the numbers
        return None
    for position, entry in enumerate(target._schema.arguments):
        if entry.alias_info is not None and entry.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else None
            value = node.kwargs.get(entry.name, value)
            return value if isinstance(value, Node) else None
    return None


def base_of(node: Node) -> Node:
    """The node whose memory `node` is (a view of), as far as operators declare it."""
    while True:
        source = _aliased(node)
        if source is None:
            return node
        node = source


def _aliased(node: Node) -> Node | None:
    """The first tensor argument that the output may share memory with."""
    target = node.target
    if node.op != "call_function":
        return None
    if not isinstance(target, torch._ops.OpOverload):
        is_piece = getattr(target, "__name__", "") == "getitem"
        return node.all_input_nodes[0] if is_piece and node.all_input_nodes else None
    schema = target._schema
    shares = any(entry.alias_info is not None for entry in schema.returns)
    # composite operators (reshape, contiguous, to) declare no alias and may still return one
    composite = torch.Tag.maybe_aliasing_or_mutating in target.tags
    if not (shares or composite or op_name(node) in _MAYBE_VIEWS):
        return None
    return next((source for source in node.all_input_nodes if is_tensor(source)), None)


_MAYBE_VIEWS = aten(
    "reshape contiguous to flatten type_as reshape_as expand_as view_as movedim unflatten "
    "chunk narrow dropout float half ravel swapaxes broadcast_to"
)


def is_certain_view(node: Node) -> bool:
    """Whether the operator always returns a view of its first argument (reshape may copy)."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if op_name(node) in _MAYBE_VIEWS or torch.Tag.maybe_aliasing_or_mutating in target.tags:
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None and written(node) is None


def aliases_of(graph: Graph, base: Node) -> list[Node]:
    """All nodes that may share memory with `base`, itself included, in order."""
    return [node for node in graph.nodes if base_of(node) is base]


def mutations_of(nodes: Collection[Node], before: Node) -> Iterator[Node]:
    """In-place operators, earlier than `before`, that write to memory of `nodes`."""
    bases = {base_of(node) for node in nodes if is_tensor(node)}
    for node in before.graph.nodes:
        if node is before:
            return
        target = written(node)
        if target is not None and base_of(target) in bases:
            yield node


def changed_in_place(graph: Graph) -> frozenset[Node]:
    """All nodes whose memory some in-place operator of the graph writes to."""
    changes = [target for node in graph.nodes if (target := written(node)) is not None]
    bases = {base_of(node) for node in changes}
    if not bases:
        return frozenset()
    return frozenset(node for node in graph.nodes if is_tensor(node) and base_of(node) in bases)
