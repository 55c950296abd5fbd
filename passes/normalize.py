"""Spell every attention the same way: inline wrappers, drop what does nothing, leave no writes.

Nothing here changes a number or an alias that anyone can see, so that a normalised graph computes
bit for bit what the captured one did. Copies and layout changes (`clone`, `contiguous`) stay: a
view behind them may need them.
"""

from __future__ import annotations

import sympy
import torch
from torch.fx import Graph, Node

from sparsify.passes.capture import Captured
from sparsify.passes.graphs import argument, is_tensor, op_name, shape_of
from sparsify.passes.inplace import make_functional
from sparsify.passes.invariants import run_passes
from sparsify.passes.wrappers import inline_wrappers

__all__ = ["PASSES", "drop_checks", "drop_noise", "normalize"]


def normalize(captured: Captured) -> Captured:
    """Normalise the captured graph in place, once; returns the same object.

    Raises:
        CaptureError: a pass failed; the message names it.
    """
    if "normalized" not in captured.cache:
        run_passes(captured.graph_module, PASSES, captured.name)
        captured.cache["normalized"] = True
    return captured


def drop_checks(graph: Graph) -> tuple[Graph, bool]:
    """Drop assertions on tensor metadata: they keep dead masks alive."""
    found = [n for n in graph.nodes if op_name(n) == "aten._assert_tensor_metadata"]
    for node in found:
        graph.erase_node(node)
    return graph, bool(found)


def drop_noise(graph: Graph) -> tuple[Graph, bool]:
    """Drop operators that return their input: full slices, casts to the same type, dropout that
    is off, alias and detach."""
    modified = False
    results = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if node in results or not _does_nothing(node):
            continue  # a result keeps its name: the program's signature holds it
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
        modified = True
    return graph, modified


def _does_nothing(node: Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not is_tensor(source):
        return False
    name = op_name(node)
    if name in ("aten.alias", "aten.detach"):
        return True
    if name == "aten.slice":
        return _is_full_slice(node, source)
    if name in ("aten.to", "aten.type_as"):
        return _is_same(node, source) and not _copies(node)
    if name == "aten.dropout":
        return argument(node, "train") is False or argument(node, "p") == 0
    return False


def _is_full_slice(node: Node, source: Node) -> bool:
    start, step = argument(node, "start", 0), argument(node, "step", 1)
    whole = start in (0, None) and step == 1
    return whole and _equal_shapes(node, source)


def _equal_shapes(a: Node, b: Node) -> bool:
    pairs = zip(shape_of(a), shape_of(b), strict=True)
    return all(sympy.expand(x - y) == 0 for x, y in pairs)


def _is_same(node: Node, source: Node) -> bool:
    a, b = node.meta["val"], source.meta["val"]
    return bool(a.dtype == b.dtype and a.device == b.device and a.layout == b.layout)


def _copies(node: Node) -> bool:
    layout = argument(node, "memory_format")
    return bool(argument(node, "copy", False)) or layout not in (None, torch.preserve_format)


PASSES = (inline_wrappers, drop_checks, drop_noise, make_functional)
