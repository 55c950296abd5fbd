"""Keys and values before they were repeated for the query heads of their group.

Models write grouped-query attention as `expand` and `reshape` of k and v. The ops read grouped
heads as they are, so the copy is not needed: what stands in front of it is found by index
arithmetic.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy

from sparsify.ir import AttentionSite
from sparsify.passes.graphs import is_tensor, number, shape_of
from sparsify.passes.index_space import IndexSpace, Ranges
from sparsify.passes.matchers.call import AttentionCall, Operand
from sparsify.passes.views import view_source

__all__ = ["ungrouped"]

Expr = Any


def ungrouped(call: AttentionCall, site: AttentionSite, ranges: Ranges) -> AttentionCall:
    """The call with k and v taken from in front of their repetition, where that can be shown."""
    if call.rank != 4:
        return call
    k, v = (_source(operand, site.heads.kv_heads, ranges) for operand in (call.k, call.v))
    return dataclasses.replace(call, k=k, v=v)


def _source(operand: Operand, kv_heads: int, ranges: Ranges) -> Operand:
    heads = number(operand.shape[1])
    if heads is None or heads == kv_heads or heads % kv_heads:
        return operand
    space = IndexSpace(ranges)
    b, h, j, d = (space.index(name, size) for name, size in zip("bhjd", operand.shape, strict=True))
    wanted = (b, space.divmod(h, sympy.Integer(heads // kv_heads))[0], j, d)
    sizes = (operand.shape[0], sympy.Integer(kv_heads), *operand.shape[2:])
    node, index = operand.node, operand.at((b, h, j, d))
    while (step := view_source(node, index, space)) is not None:
        node, index = step
        if not is_tensor(node) or node.meta["val"].dtype != operand.node.meta["val"].dtype:
            return operand
        if len(index) == 4 and set(index) == set(wanted):
            order = tuple(index.index(entry) for entry in wanted)
            if len(set(order)) == 4 and tuple(shape_of(node)[axis] for axis in order) == sizes:
                return Operand(node, order)
    return operand
