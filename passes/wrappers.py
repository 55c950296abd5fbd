"""Inline the higher-order operators that only switch gradients or an inactive autocast."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Graph, GraphModule, Node

from sparsify.passes.graphs import op_name

__all__ = ["inline_wrappers", "submodules_of"]


def inline_wrappers(graph: Graph) -> tuple[Graph, bool]:
    """Put the bodies of gradient switches and of disabled autocast regions in their place."""
    modified = False
    while True:
        found = next((node for node in graph.nodes if _body(node) is not None), None)
        if found is None:
            return graph, modified
        _inline(graph, found)
        modified = True


def submodules_of(node: Node) -> list[GraphModule]:
    """The graph modules that a higher-order operator is called with."""
    owner = node.graph.owning_module
    names = [a.target for a in node.all_input_nodes if a.op == "get_attr"]
    found = [getattr(owner, str(name), None) for name in names]
    return [module for module in found if isinstance(module, GraphModule)]


def _body(node: Node) -> tuple[Node, tuple[Any, ...]] | None:
    """The body (a get_attr node) and its arguments, if the wrapper changes no number."""
    name = op_name(node)
    if name == "wrap_with_set_grad_enabled":
        body, arguments = node.args[1], node.args[2:]
    elif name == "wrap_with_autocast" and node.args[2] is False:
        body, arguments = node.args[4], node.args[5:]
    else:
        return None
    return (body, arguments) if isinstance(body, Node) and submodules_of(node) else None


def _inline(graph: Graph, node: Node) -> None:
    found = _body(node)
    assert found is not None
    body, arguments = found
    inner = submodules_of(node)[0].graph
    values: dict[Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), arguments, strict=True))
    with graph.inserting_before(node):
        for child in inner.nodes:
            if child.op not in ("placeholder", "output"):
                values[child] = graph.node_copy(child, lambda source: values[source])
    results = inner.output_node().args[0]
    for user in list(node.users):
        if user.target is operator.getitem and isinstance(results, tuple | list):
            user.replace_all_uses_with(values[results[user.args[1]]])  # type: ignore[index]
            graph.erase_node(user)
    if node.users:
        assert isinstance(results, Node)
        node.replace_all_uses_with(values[results])
    graph.erase_node(node)
    if not body.users:
        graph.erase_node(body)
