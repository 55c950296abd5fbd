"""Anchor: `aten.scaled_dot_product_attention`, in every spelling of its call."""

from __future__ import annotations

from torch.fx import Graph, Node

from sparsify.passes.graphs import argument, op_name
from sparsify.passes.matchers.call import AttentionCall, as_is

__all__ = ["calls_of", "is_anchor", "read_call"]


def is_anchor(node: Node) -> bool:
    """Whether the node is a call of scaled dot-product attention."""
    return op_name(node) == "aten.scaled_dot_product_attention"


def read_call(node: Node) -> AttentionCall:
    """The arguments of the call, wherever they stand in it."""
    return AttentionCall(
        pattern="sdpa",
        out=as_is(node),
        q=as_is(argument(node, "query")),
        k=as_is(argument(node, "key")),
        v=as_is(argument(node, "value")),
        mask=argument(node, "attn_mask"),
        dropout_p=argument(node, "dropout_p", 0.0),
        is_causal=argument(node, "is_causal", False),
        scale=argument(node, "scale"),
        enable_gqa=bool(argument(node, "enable_gqa", False)),
    )


def calls_of(graph: Graph) -> dict[Node, AttentionCall]:
    """All such calls of a graph, by their nodes."""
    return {node: read_call(node) for node in graph.nodes if is_anchor(node)}
