"""The indices of one attention site: batch b, query head h, query i, key j, feature d.

All proofs of a site speak of the same element: row i of head h in batch b, and key j.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
from torch.fx import Node

from sparsify.passes.graphs import shape_of
from sparsify.passes.index_space import IndexSpace, Ranges
from sparsify.passes.matchers.call import AttentionCall, Operand
from sparsify.passes.views import broadcast_index

__all__ = ["Frame", "make_frame"]

Expr = Any
Index = tuple[Expr, ...]


@dataclass(frozen=True)
class Frame:
    """Index symbols of a site, and what q, k, v and the mask are read at.

    `lead` holds the entries of the axes before [L, D] of q: (b, h), or (b*H + h) when heads are
    flattened into the batch; `heads` is H. `tie` replaces the key length where queries and keys
    are assumed to be equally many.
    """

    call: AttentionCall
    space: IndexSpace
    b: Expr
    h: Expr
    i: Expr
    j: Expr
    lead: Index
    heads: Expr
    tie: dict[Expr, Expr] = field(default_factory=dict)

    @property
    def q_len(self) -> Expr:
        """Queries."""
        return self.call.q_len

    @property
    def kv_len(self) -> Expr:
        """Keys; as many as queries where that is assumed."""
        return self.call.kv_len.subs(self.tie)

    @property
    def shift(self) -> Expr:
        """Position of query 0 among the keys when the last query sees the last key."""
        return sympy.expand(self.kv_len - self.q_len)

    def q_index(self) -> Index:
        """Element of q in its own layout: its feature is the symbol of its own axis."""
        q = self.call.q
        return q.at((*self.lead, self.i, self._feature("q_feature", q)))

    def kv_index(self, operand: Operand, feature: str) -> Index:
        """Element of k or v at key j in its own layout, with grouped or broadcast heads
        resolved."""
        shape, q_shape = operand.shape, self.call.q.shape
        lead = self.lead
        if len(lead) > 1 and self.call.enable_gqa and shape[-3] != q_shape[-3]:
            group = q_shape[-3] / shape[-3]
            lead = (*lead[:-1], self.space.divmod(lead[-1], group)[0])
        index = (*lead, self.j, self._feature(feature, operand))
        return operand.at(broadcast_index(index, shape))

    def mask_index(self, node: Node) -> Index:
        """Element of the mask for query i and key j."""
        return broadcast_index((*self.lead, self.i, self.j), shape_of(node))

    def _feature(self, name: str, operand: Operand) -> Expr:
        return self.space.index(name, operand.shape[-1])


def make_frame(call: AttentionCall, ranges: Ranges, heads: int | None = None) -> Frame:
    """Indices of a site. For q of rank 3, `heads` says how many heads its first axis holds;
    `ranges` are the captured limits of the sizes."""
    space = IndexSpace(ranges)
    shape = call.q.shape
    i, j = space.index("i", shape[-2]), space.index("j", call.k.shape[-2])
    if call.rank >= 4:
        b, h = space.index("b", shape[0]), space.index("h", shape[-3])
        return Frame(call, space, b, h, i, j, (b, h), shape[-3])
    if call.rank == 2:
        zero = sympy.Integer(0)
        return Frame(call, space, zero, zero, i, j, (), sympy.Integer(1))
    if heads is None:
        n = space.index("n", shape[0])
        return Frame(call, space, n, sympy.Integer(0), i, j, (n,), sympy.Integer(1))
    b, h = space.index("b", shape[0] / heads), space.index("h", sympy.Integer(heads))
    return Frame(call, space, b, h, i, j, (sympy.expand(b * heads + h),), sympy.Integer(heads))
