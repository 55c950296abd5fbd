"""A rewritten program with other options at its sites."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import Node

from sparsify.passes.exported import duplicate, rebuilt
from sparsify.plans import Plan

__all__ = ["SITE", "is_site", "retuned", "site_of"]

# Key of a new node's "custom" metadata (saved programs keep it): the site that it serves.
SITE = "sparsify_site"
_OPS = ("sparsify.moba_attention.default", "sparsify.msa_attention.default")


def is_site(node: Node) -> bool:
    """Whether the node is the op that took a site's place."""
    return node.op == "call_function" and str(node.target) in _OPS


def site_of(node: Node) -> str:
    """Key of the site that the node serves; "" for none."""
    return str((node.meta.get("custom") or {}).get(SITE, ""))


def retuned(program: ExportedProgram, plan: Plan) -> ExportedProgram:
    """The program with the sizes of the plan's layers; methods and sites stay."""
    graph, nodes = duplicate(program.graph)
    layers = plan.by_key()
    for node in nodes.values():
        if is_site(node):
            layer = layers[site_of(node)]
            block_size, topk = layer.budget
            dense = {"min_context": layer.min_context, "decode_dense": layer.decode == "dense"}
            node.kwargs = {**node.kwargs, "block_size": block_size, "topk": topk, **dense}
    return rebuilt(program, graph=graph)
