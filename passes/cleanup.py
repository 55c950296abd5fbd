"""What a rewrite leaves to be put right: dead masks, and outputs under other names."""

from __future__ import annotations

import copy

from torch.export.graph_signature import ConstantArgument, ExportGraphSignature
from torch.fx import Graph, Node

__all__ = ["drop_dead", "renamed"]


def drop_dead(graph: Graph) -> None:
    """Drop everything that no result depends on, such as masks and what was computed for them only;
    inputs stay, and so do checks of sizes."""
    graph.eliminate_dead_code()


def renamed(signature: ExportGraphSignature, graph: Graph) -> ExportGraphSignature:
    """The signature with the names that the outputs have in the graph: results of replaced sites
    and of inlined blocks have others than in the capture."""
    found = copy.deepcopy(signature)
    (results,) = graph.output_node().args
    for spec, result in zip(found.output_specs, results, strict=True):  # type: ignore[arg-type]
        if isinstance(result, Node) and not isinstance(spec.arg, ConstantArgument):
            spec.arg.name = result.name
    return found
