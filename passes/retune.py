"""A rewritten program with other options at its sites."""

from __future__ import annotations

from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from sparsify.passes.exported import duplicate, rebuilt
from sparsify.plans import LayerPlan, Plan

__all__ = ["SITE", "follows", "is_site", "retuned", "site_of"]

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
            node.kwargs = {**node.kwargs, **_options(layers[site_of(node)])}
    return rebuilt(program, graph=graph)


def follows(program: ExportedProgram, plan: Plan) -> bool:
    """Whether the program has exactly the ops that the plan asks for, with the plan's sizes."""
    ops = [node for node in program.graph.nodes if is_site(node)]
    if [site_of(node) for node in ops] != [layer.key for layer in plan.rewritten]:
        return False
    return all(map(_is_planned, ops, plan.rewritten))


def _is_planned(node: Node, layer: LayerPlan) -> bool:
    schema = node.target._schema  # type: ignore[union-attr]
    values = {argument.name: argument.default_value for argument in schema.arguments}
    names = [argument.name for argument in schema.arguments]
    values |= {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    wanted = _options(layer)
    if layer.method == "msa":
        wanted["local"] = layer.local
    named = str(node.target) == f"sparsify.{layer.method}_attention.default"
    return named and all(values[name] == value for name, value in wanted.items())


def _options(layer: LayerPlan) -> dict[str, Any]:
    block_size, topk = layer.budget
    dense = {"min_context": layer.min_context, "decode_dense": layer.decode == "dense"}
    return {"block_size": block_size, "topk": topk, **dense}
