"""Anchor: `aten.scaled_dot_product_attention`, in every spelling of its call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from sparsify.passes.graphs import argument, dtype_of, op_name, shape_of

__all__ = ["SdpaCall", "is_anchor", "read_call"]

Expr = Any


@dataclass(frozen=True)
class SdpaCall:
    """One call of scaled dot-product attention.

    q `[..., L, D]`, k `[..., S, D]`, v `[..., S, Dv]`; `scale` is None when the call leaves it to
    the default, 1/sqrt(D); `enable_gqa` repeats KV head g for the query heads of group g.
    """

    node: Node
    q: Node
    k: Node
    v: Node
    mask: Node | None
    dropout_p: Any
    is_causal: Any
    scale: Any
    enable_gqa: bool

    @property
    def q_len(self) -> Expr:
        """Queries, as an expression over the capture's symbols."""
        return shape_of(self.q)[-2]

    @property
    def kv_len(self) -> Expr:
        """Keys, as an expression over the capture's symbols."""
        return shape_of(self.k)[-2]

    @property
    def head_dim(self) -> Expr:
        """Size of a query and a key."""
        return shape_of(self.q)[-1]

    @property
    def value_dim(self) -> Expr:
        """Size of a value."""
        return shape_of(self.v)[-1]

    @property
    def rank(self) -> int:
        """Axes of q."""
        return len(shape_of(self.q))

    @property
    def dtypes(self) -> set[Any]:
        """dtypes of q, k and v."""
        return {dtype_of(self.q), dtype_of(self.k), dtype_of(self.v)}


def is_anchor(node: Node) -> bool:
    """Whether the node is a call of scaled dot-product attention."""
    return op_name(node) == "aten.scaled_dot_product_attention"


def read_call(node: Node) -> SdpaCall:
    """The arguments of the call, wherever they stand in it."""
    return SdpaCall(
        node=node,
        q=argument(node, "query"),
        k=argument(node, "key"),
        v=argument(node, "value"),
        mask=argument(node, "attn_mask"),
        dropout_p=argument(node, "dropout_p", 0.0),
        is_causal=argument(node, "is_causal", False),
        scale=argument(node, "scale"),
        enable_gqa=bool(argument(node, "enable_gqa", False)),
    )
