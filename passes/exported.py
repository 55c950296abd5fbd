"""Exported programs with a part exchanged; torch offers the constructor, and nothing shorter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

__all__ = ["duplicate", "moved", "rebuilt"]


def duplicate(source: Graph) -> tuple[Graph, dict[Node, Node]]:
    """A copy of a graph that can be edited, and its nodes by those of the original."""
    graph = Graph()
    nodes: dict[Node, Node] = {}
    graph.output(graph.graph_copy(source, nodes))
    graph.output_node().meta.update(source.output_node().meta)
    return graph, nodes


def rebuilt(
    program: ExportedProgram,
    *,
    graph: Graph | None = None,
    signature: ExportGraphSignature | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    constants: Mapping[str, Any] | None = None,
    calls: list[Any] | None = None,
) -> ExportedProgram:
    """The program with another graph, signature, state or form of its call. Example inputs are not
    kept."""
    module = program.graph_module
    if graph is not None:
        module = GraphModule(program.graph_module, graph)
        module.meta.update(program.graph_module.meta)
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=signature or program.graph_signature,
        state_dict=dict(program.state_dict if state_dict is None else state_dict),
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph if calls is None else calls,
        constants=dict(program.constants if constants is None else constants),
        verifiers=[program.verifier],
    )


def moved(program: ExportedProgram, device: torch.device) -> ExportedProgram:
    """The program with every device that its graph names replaced, and its
    constants moved; parameters and saved buffers stay where they are."""
    graph, nodes = duplicate(program.graph)

    def there(value: Any) -> Any:
        if isinstance(value, torch.device):
            return device
        return value.to(device) if isinstance(value, torch.Tensor) else value

    for node in nodes.values():
        node.args, node.kwargs = pytree.tree_map(there, (node.args, node.kwargs))
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map(there, node.meta["val"])
    constants = {name: there(value) for name, value in program.constants.items()}
    return rebuilt(program, graph=graph, constants=constants)
