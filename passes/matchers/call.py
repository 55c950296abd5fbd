"""What every form of attention is read into: three operands, what hides keys, and the result.

The forms differ in how a tensor is laid out (einsum reads `[B, L, H, D]` as it stands, a matrix
product wants the keys transposed); an operand therefore says which of its axes is which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from sparsify.passes.graphs import dtype_of, shape_of
from sparsify.passes.index_space import IndexSpace

__all__ = ["AttentionCall", "Operand", "Scores", "as_is", "turned"]

Expr = Any
Index = tuple[Expr, ...]


@dataclass(frozen=True)
class Operand:
    """A tensor of an attention call.

    `order[a]` is the axis of `node` that is axis a of the canonical layout `[..., length, size]`.
    """

    node: Node
    order: tuple[int, ...]

    @property
    def shape(self) -> tuple[Expr, ...]:
        """Sizes in the canonical layout."""
        sizes = shape_of(self.node)
        return tuple(sizes[axis] for axis in self.order)

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.order)

    @property
    def permuted(self) -> bool:
        """Whether the node's own layout is not the canonical one."""
        return self.order != tuple(range(len(self.order)))

    def at(self, index: Index) -> Index:
        """The node's own index of the canonical element `index`."""
        own: list[Expr] = [None] * len(self.order)
        for axis, entry in zip(self.order, index, strict=True):
            own[axis] = entry
        return tuple(own)


def as_is(node: Node) -> Operand:
    """A tensor that already lies in the canonical layout."""
    return Operand(node, tuple(range(len(shape_of(node)))))


def turned(operand: Operand) -> Operand:
    """The operand with the last two canonical axes exchanged."""
    return Operand(operand.node, (*operand.order[:-2], operand.order[-1], operand.order[-2]))


@dataclass(frozen=True)
class Scores:
    """The scores of an attention that is written out as products and a softmax.

    `product` multiplies queries and keys; its element `entries` is the score of row and key at
    `places`, index symbols of `[..., L, S]`. `softmax` turns what became of the product into the
    weights; `weights` `[..., L, S]` is what multiplies the values.
    """

    product: Node
    entries: Index
    places: Index
    softmax: Node
    weights: Operand

    def at(self, index: Index, space: IndexSpace) -> Index:
        """The product's own index of the score at `index`."""
        pairs = zip(self.places, index, strict=True)
        values = {place: entry for place, entry in pairs if place.is_Symbol}
        return tuple(space.replaced(entry, values) for entry in self.entries)

    @property
    def logits(self) -> Node:
        """What the softmax takes."""
        source = self.softmax.args[0]
        assert isinstance(source, Node)
        return source


@dataclass(frozen=True)
class AttentionCall:
    """One attention, however it is written.

    q `[..., L, D]`, k `[..., S, D]`, v `[..., S, Dv]` and `out` `[..., L, Dv]`; `out.node` is the
    node that a rewrite replaces. `mask` is a boolean or additive tensor that is broadcast to
    `[..., L, S]`; `scale` is None when the call leaves it to the default, 1/sqrt(D); `enable_gqa`
    repeats KV head g for the query heads of group g. `pattern` names the form.

    `scores` is given when the attention is written out. What hides keys, and the rest of the
    scale, then stand between `scores.product` and the softmax: `mask` is None, and `scale` holds
    only the constant factors that q and k are multiplied by on their way into the product.
    """

    pattern: str
    out: Operand
    q: Operand
    k: Operand
    v: Operand
    mask: Node | None
    dropout_p: Any
    is_causal: Any
    scale: Any
    enable_gqa: bool
    scores: Scores | None = None

    @property
    def node(self) -> Node:
        """The node that holds the result."""
        return self.out.node

    @property
    def q_len(self) -> Expr:
        """Queries, as an expression over the capture's symbols."""
        return self.q.shape[-2]

    @property
    def kv_len(self) -> Expr:
        """Keys, as an expression over the capture's symbols."""
        return self.k.shape[-2]

    @property
    def head_dim(self) -> Expr:
        """Size of a query and a key."""
        return self.q.shape[-1]

    @property
    def value_dim(self) -> Expr:
        """Size of a value."""
        return self.v.shape[-1]

    @property
    def rank(self) -> int:
        """Axes of q."""
        return self.q.rank

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def dtypes(self) -> set[Any]:
        """dtypes of q, k and v."""
        return {dtype_of(operand.node) for operand in self.operands}
