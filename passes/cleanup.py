"""What a rewrite leaves to be put right: dead masks, and outputs under other names."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch.export.graph_signature import ExportGraphSignature, TensorArgument
from torch.fx import Graph

__all__ = ["drop_dead", "renamed"]


def drop_dead(graph: Graph) -> None:
    """Drop everything that no result depends on, such as masks and what was computed for them only;
    inputs stay, and so do checks of sizes."""
    graph.eliminate_dead_code()


def renamed(signature: ExportGraphSignature, names: Mapping[str, str]) -> ExportGraphSignature:
    """The signature with outputs that are results of replaced sites under their new names, which
    `names` gives by the old ones."""
    found = copy.deepcopy(signature)
    for spec in found.output_specs:
        if isinstance(spec.arg, TensorArgument) and spec.arg.name in names:
            spec.arg.name = names[spec.arg.name]
    return found
