"""Anchors of attention in forms that are recognised by name and not rewritten.

FlexAttention, the fused transformer layer, attention inside control flow, and any custom operator
that calls itself attention: all of it is reported, so that sites plus refusals are all attention.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx import GraphModule, Node

from sparsify.passes.graphs import op_name
from sparsify.passes.matchers import sdpa, softmax
from sparsify.passes.refused import Refused
from sparsify.passes.wrappers import submodules_of

__all__ = ["is_anchor", "judge"]

ATTENTION = re.compile(r"attention|attn|_transformer_encoder_layer_fwd|scaled_dot_product")


def is_anchor(node: Node) -> bool:
    """Whether the node is attention of a form that no other matcher reads."""
    name = op_name(node)
    if not name or name == "getitem" or sdpa.is_anchor(node):
        return False
    return bool(ATTENTION.search(name)) or any(True for _ in _inside(node))


def judge(node: Node) -> Refused:
    """The refusal of such a node."""
    name = op_name(node)
    found = ", ".join(op_name(inner) for inner in _inside(node))
    if found and not ATTENTION.search(name):
        return Refused("FORM_UNSUPPORTED", f"attention inside {name}", found)
    return Refused(
        "FORM_UNSUPPORTED",
        f"attention as {name}; not rewritten yet",
        node.name,
        "Use torch.nn.functional.scaled_dot_product_attention.",
    )


def _inside(node: Node) -> Iterator[Node]:
    """Attention in the bodies of a higher-order operator."""
    todo: list[GraphModule] = submodules_of(node)
    while todo:
        for inner in todo.pop().graph.nodes:
            if (
                sdpa.is_anchor(inner)
                or softmax.is_anchor(inner)
                or ATTENTION.search(op_name(inner))
            ):
                yield inner
            if inner.op == "call_function":
                todo += submodules_of(inner)
