"""Head counts and sizes of a site, and how query heads share keys and values.

Heads are grouped when element (b, h, j, d) of k and of v depends on h only through h // group: this
is shown for every value that k and v are made of, by index arithmetic. A tiled expansion (0,1,0,1)
depends on h % n instead and stays ordinary multi-head attention over the expanded tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sympy

from sparsify.ir import HeadLayout
from sparsify.passes.context import Context
from sparsify.passes.frame import Frame, make_frame
from sparsify.passes.graphs import number
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.matchers.call import AttentionCall
from sparsify.passes.reads import Read
from sparsify.passes.refused import Refused

__all__ = ["framed", "head_layout"]

Expr = Any


def framed(call: AttentionCall, context: Context) -> Frame:
    """The site's indices, with flattened heads of a rank-3 call taken apart.

    Raises:
        Refused: FORM_UNSUPPORTED for ranks other than 2, 3 and 4.
    """
    _check_ranks(call)
    if call.rank != 3:
        return make_frame(call, context.captured.ranges)
    frame = make_frame(call, context.captured.ranges)
    reads = context.reader(frame.space).leaves(call.q.node, frame.q_index())
    heads = _flattened_heads(frame, reads)
    return frame if heads is None else make_frame(call, context.captured.ranges, heads)


def head_layout(frame: Frame, context: Context) -> HeadLayout:
    """Query and KV heads, and sizes of keys and values.

    Raises:
        Refused: HEAD_DIM when a size is not a number.
    """
    call = frame.call
    sizes = {
        "number of query heads": frame.heads,
        "head size": call.head_dim,
        "value size": call.value_dim,
    }
    for what, size in sizes.items():
        if number(size) is None:
            raise Refused("HEAD_DIM", f"the {what} is not a fixed number", f"{what} = {size}")
    heads = int(frame.heads)
    reader = context.reader(frame.space)
    reads = reader.leaves(call.k.node, frame.kv_index(call.k, "k_feature"))
    reads += reader.leaves(call.v.node, frame.kv_index(call.v, "v_feature"))
    group = _group(frame, reads)
    return HeadLayout(heads, heads // group, int(call.head_dim), int(call.value_dim))


def _check_ranks(call: AttentionCall) -> None:
    if call.out.shape[:-1] != call.q.shape[:-1]:
        raise Refused(
            "FORM_UNSUPPORTED",
            "the queries are broadcast over a batch, over heads or over rows",
            f"q has shape {call.q.shape}, the output {call.out.shape}",
        )
    ranks = {operand.rank for operand in call.operands}
    if ranks not in ({2}, {3}, {4}):
        raise Refused(
            "FORM_UNSUPPORTED",
            "q, k and v must all have three or four axes",
            f"ranks {sorted(ranks)}",
        )


def _flattened_heads(frame: Frame, reads: Iterable[Read]) -> int | None:
    """H of a first axis that is b*H + h; None when that axis is the batch alone."""
    n = frame.b
    divisors = {
        int(atom.args[0].as_numer_denom()[1])
        for read in reads
        for entry in read.index
        for atom in entry.atoms(sympy.floor)
        if atom.args[0].as_numer_denom()[0] == n and number(atom.args[0].as_numer_denom()[1])
    }
    if len(divisors) == 1:
        return divisors.pop()
    inputs = [read for read in reads if not read.unread and n in _own_axes(read)]
    if divisors or inputs:
        return None
    # the axis is used inside feature axes only: it is the heads, and there is no batch
    return number(frame.call.q.shape[0])


def _own_axes(read: Read) -> set[Expr]:
    return {entry for entry in read.index if entry.is_Symbol}


def _group(frame: Frame, reads: list[Read]) -> int:
    """Largest number of neighbouring query heads that read the same keys and values."""
    entries = {entry for read in reads for entry in read.index if entry.has(frame.h)}
    for group in sorted(sympy.divisors(int(frame.heads)), reverse=True):
        if all(_shared(frame, entry, group) for entry in entries):
            return int(group)
    return 1


def _shared(frame: Frame, entry: Expr, group: int) -> bool:
    """Whether `entry` is the same for all heads of a group."""
    if group == 1:
        return True
    space = IndexSpace(frame.space.ranges)
    space.sizes.update(frame.space.sizes)
    outer = space.index("h_group", frame.heads / group)
    inner = space.index("h_inner", sympy.Integer(group))
    return not space.replaced(entry, {frame.h: outer * group + inner}).has(inner)
