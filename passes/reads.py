"""Which elements of which values an element depends on.

`Reader.leaves(node, index)` walks from one element, given by symbolic indices, back to the leaves:
a stop node, an input, a parameter, or an operator it cannot read. Every operator on the way has a
rule that says which elements of its inputs one element of its output uses; a whole axis is an index
of its own. Nothing is assumed of an operator without a rule: it becomes a leaf, and the proof that
meets it fails with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.function import AppliedUndef
from torch.fx import Node

from sparsify.passes.graphs import (
    argument,
    aten,
    expression,
    is_shape_only,
    is_tensor,
    op_name,
    shape_of,
)
from sparsify.passes.index_expr import UNFORESEEN, Evaluator
from sparsify.passes.index_layout import indexed_source
from sparsify.passes.index_space import IndexSpace
from sparsify.passes.matchers import sdpa
from sparsify.passes.matchers.call import AttentionCall
from sparsify.passes.pointwise import is_pointwise
from sparsify.passes.views import broadcast_index, concat_parts, view_source

__all__ = ["ATTENTION", "Part", "Read", "Reader"]

Expr = Any
Index = tuple[Expr, ...]
Step = tuple[Node, Index]

ATTENTION = "aten.scaled_dot_product_attention"
SOFTMAXES = aten("softmax log_softmax _softmax _log_softmax _safe_softmax")
REDUCTIONS = aten(
    "mean sum amax amin var std prod any all linalg_vector_norm norm logsumexp argmax argmin"
)
NORMS = aten("layer_norm rms_norm native_layer_norm _fused_rms_norm")


@dataclass(frozen=True)
class Read:
    """One leaf of a walk. `unread` names the operator when the walk ended at one without a rule;
    `guard` marks an index that decides which of several values is read (a concatenation)."""

    node: Node
    index: Index
    unread: str = ""
    guard: bool = False


@dataclass(frozen=True)
class Part:
    """A part of a concatenation that a walk went into: `entry` = `inside` + `offset`."""

    cat: Node
    node: Node
    entry: Expr
    inside: Expr
    offset: Expr
    size: Expr


class Reader:
    """Walks back from elements.

    Args:
        space: the index symbols of the proof.
        stop: nodes at which a walk ends.
        causal: attention nodes already proved causal: their row i reads keys 0..i only.
        evaluator: reads the values of index tensors, if given.
        frozen: nodes that are changed in place; a walk does not look into them.
        calls: the attention of the graph by the node of its result; read from the graph if None.
    """

    def __init__(
        self,
        space: IndexSpace,
        stop: Collection[Node] = (),
        causal: Collection[Node] = (),
        evaluator: Evaluator | None = None,
        frozen: Collection[Node] = (),
        calls: Mapping[Node, AttentionCall] | None = None,
    ) -> None:
        self.space, self.evaluator, self.calls = space, evaluator, calls
        self.frozen = frozenset(frozen)
        self.stop = frozenset(stop)
        self.causal = frozenset(causal)
        self.mixed: dict[Expr, str] = {}  # whole axes, with the operator that reads them
        self.parts: dict[Part, None] = {}  # parts of concatenations, in order

    def leaves(self, node: Node, index: Index) -> list[Read]:
        """Everything that element `index` of `node` depends on, without repetition."""
        found: dict[Read, None] = {}
        seen: set[Step] = set()
        todo = [(node, index)]
        while todo:
            node, index = todo.pop()
            step = (node, self._canonical(node, index))
            if step in seen:
                continue
            seen.add(step)
            sources = None if node in self.stop else self._sources(*step)
            if sources is None:
                found[self._leaf(*step)] = None
                continue
            for source in sources:
                if isinstance(source, Read):
                    found[source] = None
                else:
                    todo.append(source)
        return list(found)

    def _leaf(self, node: Node, index: Index) -> Read:
        known = node in self.stop or node.op in ("placeholder", "get_attr")
        tensors = [source for source in node.all_input_nodes if is_tensor(source)]
        creates = not tensors or is_shape_only(node)
        written = node in self.frozen and node not in self.stop
        unread = (written or not (known or creates)) and (op_name(node) or node.name)
        return Read(node, index, f"{unread} (changed in place)" if written else unread or "")

    def _canonical(self, node: Node, index: Index) -> Index:
        """One symbol for every axis that is read whole, so that equal walks are seen as equal."""
        shape = shape_of(node)
        return tuple(
            self._whole(node, axis, self.mixed[entry])
            if entry in self.mixed and self.space.covers(entry, size)
            else entry
            for axis, (entry, size) in enumerate(zip(index, shape, strict=True))
        )

    def _whole(self, node: Node, axis: int, why: str) -> Expr:
        symbol = self.space.index(f"any_{node.name}_{axis}", shape_of(node)[axis])
        if symbol.is_Symbol and self.mixed.get(symbol, ATTENTION) == ATTENTION:
            self.mixed[symbol] = why
        return symbol

    def _whole_axes(self, node: Node, index: Index, axes: Collection[int], why: str) -> Step:
        entries = list(index)
        for axis in axes:
            entries[axis] = self._whole(node, axis, why)
        return node, tuple(entries)

    def _sources(self, node: Node, index: Index) -> list[Step | Read] | None:
        if node.op != "call_function" or node in self.frozen:
            return None
        try:
            return self._by_rule(node, index)
        except UNFORESEEN:
            return None  # a call that no rule foresees is as unknown as one without a rule

    def _by_rule(self, node: Node, index: Index) -> list[Step | Read] | None:
        call = self._call(node)
        if call is not None:
            return list(self._attention(call, index))
        view = view_source(node, index, self.space)
        if view is not None:
            return [view]
        rule = _RULES.get(op_name(node))
        if rule is not None:
            sources = rule(self, node, index)
            return None if sources is None else list(sources)
        return list(self._pointwise(node, index)) if is_pointwise(node) else None

    def _pointwise(self, node: Node, index: Index) -> Iterator[Step]:
        for source in node.all_input_nodes:
            if is_tensor(source):
                yield source, broadcast_index(index, shape_of(source))

    def _concat(self, node: Node, index: Index) -> Iterator[Step | Read]:
        axis, parts = concat_parts(node)
        if len(parts) == 1:  # an empty cache and the own tokens
            yield parts[0][0], index
            return
        entry = index[axis]
        if not (entry in self.mixed and self.space.covers(entry, shape_of(node)[axis])):
            yield Read(node, (entry,), guard=True)
        for part, offset in parts:
            inside = self._inside(node, part, entry, axis, offset)
            yield part, (*index[:axis], inside, *index[axis + 1 :])

    def _stacked(self, node: Node, index: Index) -> Iterator[Step | Read]:
        axis = _axis(argument(node, "dim", 0), len(index))
        yield Read(node, (index[axis],), guard=True)
        for part in argument(node, "tensors"):
            yield part, (*index[:axis], *index[axis + 1 :])

    def _written(self, node: Node, index: Index) -> list[Step | Read] | None:
        """slice_scatter: a piece written over an axis of features, or of heads."""
        source, piece = node.args[:2]
        axis, start = _axis(argument(node, "dim", 0), len(index)), argument(node, "start") or 0
        assert isinstance(source, Node) and isinstance(piece, Node)
        if argument(node, "step", 1) != 1:
            return None
        inside = self._inside(node, piece, index[axis], axis, expression(start))
        return [
            Read(node, (index[axis],), guard=True),
            (source, index),
            (piece, (*index[:axis], inside, *index[axis + 1 :])),
        ]

    def _copied(self, node: Node, index: Index) -> Iterator[Step]:
        """copy(x, y): y in the shape of x."""
        source = node.args[1]
        assert isinstance(source, Node)
        yield source, broadcast_index(index, shape_of(source))

    def _indexed(self, node: Node, index: Index) -> list[Step | Read] | None:
        """x[t0, t1, ...], where the index tensors can be read."""
        if self.evaluator is None:
            return None
        found = indexed_source(self.evaluator, node, index)
        if found is None or any(entry.atoms(AppliedUndef) for entry in found[1]):
            return None
        return [found]

    def _inside(self, cat: Node, part: Node, entry: Expr, axis: int, offset: Expr) -> Expr:
        """The entry inside a part: a symbol of its own, tied to the whole by `parts`."""
        size = shape_of(part)[axis]
        if entry in self.mixed or not entry.is_Symbol:
            return self._whole(part, axis, op_name(cat))
        inside = self.space.index(f"{entry}_in_{part.name}_of_{cat.name}", size)
        self.parts[Part(cat, part, entry, inside, offset, size)] = None
        return inside

    def _linear(self, node: Node, index: Index) -> Iterator[Step]:
        x, weight = argument(node, "input"), argument(node, "weight")
        bias = argument(node, "bias")
        yield self._whole_axes(x, (*index[:-1], index[-1]), [len(index) - 1], "aten.linear")
        yield self._whole_axes(weight, (index[-1], index[-1]), [1], "aten.linear")
        if bias is not None:
            yield bias, (index[-1],)

    def _matmul(self, node: Node, index: Index) -> Iterator[Step]:
        tensors = [s for s in node.args if isinstance(s, Node) and is_tensor(s)]
        left, right = tensors[-2:]
        for extra in tensors[:-2]:  # addmm, baddbmm
            yield extra, broadcast_index(index, shape_of(extra))
        left_rank, right_rank = len(shape_of(left)), len(shape_of(right))
        row = index[-2:-1] if right_rank > 1 else index[-1:]
        batch = index[: len(index) - (left_rank > 1) - (right_rank > 1)]
        if left_rank > 1:
            at = broadcast_index((*batch, *row, row[0]), shape_of(left))
            yield self._whole_axes(left, at, [left_rank - 1], op_name(node))
        else:
            yield self._whole_axes(left, index[-1:], [0], op_name(node))
        if right_rank > 1:
            at = broadcast_index((*batch, index[-1], index[-1]), shape_of(right))
            yield self._whole_axes(right, at, [right_rank - 2], op_name(node))
        else:
            yield self._whole_axes(right, row, [0], op_name(node))

    def _softmax(self, node: Node, index: Index) -> Iterator[Step]:
        source = node.args[0]
        dim = argument(node, "dim", -1)
        axis = dim + len(index) if dim < 0 else dim
        yield self._whole_axes(source, index, [axis], op_name(node))  # type: ignore[arg-type]

    def _reduction(self, node: Node, index: Index) -> Iterator[Step]:
        source = node.args[0]
        assert isinstance(source, Node)
        rank = len(shape_of(source))
        dims = argument(node, "dim")
        dims = [dims] if isinstance(dims, int) else list(dims or range(rank))
        axes = sorted(dim + rank if dim < 0 else dim for dim in dims)
        entries = list(index)
        if len(index) < rank:
            for axis in axes:
                entries.insert(axis, sympy.Integer(0))
        yield self._whole_axes(source, tuple(entries), axes, op_name(node))

    def _norm(self, node: Node, index: Index) -> Iterator[Step]:
        source = node.args[0]
        assert isinstance(source, Node)
        count = len(argument(node, "normalized_shape"))
        axes = range(len(index) - count, len(index))
        yield self._whole_axes(source, index, axes, op_name(node))
        for name in ("weight", "bias"):
            state = argument(node, name)
            if state is not None:
                yield state, index[len(index) - count :]

    def _embedding(self, node: Node, index: Index) -> Iterator[Step]:
        weight, ids = argument(node, "weight"), argument(node, "indices")
        yield ids, index[:-1]
        whole = self._whole_axes(weight, (index[-1], index[-1]), [0], op_name(node))
        yield whole

    def _convolution(self, node: Node, index: Index) -> list[Step] | None:
        """Only a kernel of one position keeps positions apart; others read their neighbours."""
        source, weight = node.args[0], node.args[1]
        assert isinstance(source, Node) and isinstance(weight, Node)
        if op_name(node) != "aten.conv1d" or len(index) != 3:
            return None
        one = shape_of(weight)[2] == 1 and shape_of(source)[2] == shape_of(node)[2]
        axes = [1] if one else [1, 2]
        return [self._whole_axes(source, index, axes, op_name(node))]

    def _group_norm(self, node: Node, index: Index) -> Iterator[Step]:
        source = node.args[0]
        assert isinstance(source, Node)
        yield self._whole_axes(source, index, range(1, len(index)), op_name(node))

    def _running(self, node: Node, index: Index) -> Iterator[Step]:
        """cumsum and its like: everything up to the element."""
        source = node.args[0]
        assert isinstance(source, Node)
        dim = argument(node, "dim")
        axis = dim + len(index) if dim < 0 else dim
        yield self._whole_axes(source, index, [axis], op_name(node))

    def _gathered(self, node: Node, index: Index) -> Iterator[Step]:
        """index_select and gather: which element is read is data."""
        source = node.args[0]
        assert isinstance(source, Node)
        dim = argument(node, "dim")
        axis = dim + len(index) if dim < 0 else dim
        yield self._whole_axes(source, index, [axis], op_name(node))

    def _call(self, node: Node) -> AttentionCall | None:
        if self.calls is None:
            return sdpa.read_call(node) if sdpa.is_anchor(node) else None
        return self.calls.get(node)

    def _attention(self, call: AttentionCall, index: Index) -> Iterator[Step]:
        """One step, however the attention is written: row i reads q there, and keys and values."""
        index = tuple(index[axis] for axis in call.out.order)
        q, k, v = call.operands
        at = q.at(broadcast_index(index, q.shape))
        yield self._whole_axes(q.node, at, [q.order[-1]], ATTENTION)
        lead = self._kv_lead(index[:-2], q.shape, k.shape)
        key = self._key(call.node, index[-2], k.shape[-2])
        at = k.at(broadcast_index((*lead, key, index[-1]), k.shape))
        yield self._whole_axes(k.node, at, [k.order[-1]], ATTENTION)
        yield v.node, v.at(broadcast_index((*lead, key, index[-1]), v.shape))

    def _key(self, node: Node, row: Expr, size: Expr) -> Expr:
        name = f"key_{node.name}"
        if node in self.causal:
            # one symbol per row, so that two rows of one walk are never confused
            symbol = self.space.upto(f"{name}_{row}", size, row)
        else:
            symbol = self.space.index(name, size)
            self.mixed.setdefault(symbol, ATTENTION)
        return symbol

    def _kv_lead(self, lead: Index, q_shape: Index, k_shape: Index) -> Index:
        """Batch and head entries of k and v for those of the output, with grouped heads."""
        if len(lead) < 2 or q_shape[-3] == k_shape[-3] or 1 in (q_shape[-3], k_shape[-3]):
            return lead
        group = q_shape[-3] / k_shape[-3]
        return (*lead[:-1], self.space.divmod(lead[-1], group)[0])


def _axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


_Sources = Iterable[Step] | Iterable[Read] | Iterable[Step | Read]
_Rule = Callable[[Reader, Node, Index], "_Sources | None"]
_RULES: dict[str, _Rule] = {
    "aten.cat": Reader._concat,
    "aten.concat": Reader._concat,
    "aten.stack": Reader._stacked,
    "aten.slice_scatter": Reader._written,
    "aten.index": Reader._indexed,
    "aten.copy": Reader._copied,
    "aten.linear": Reader._linear,
    "aten.matmul": Reader._matmul,
    "aten.mm": Reader._matmul,
    "aten.bmm": Reader._matmul,
    "aten.addmm": Reader._matmul,
    "aten.baddbmm": Reader._matmul,
    "aten.embedding": Reader._embedding,
    "aten.conv1d": Reader._convolution,
    "aten.group_norm": Reader._group_norm,
    "aten.cumsum": Reader._running,
    "aten.cumprod": Reader._running,
    "aten.index_select": Reader._gathered,
    "aten.gather": Reader._gathered,
    **dict.fromkeys(SOFTMAXES, Reader._softmax),
    **dict.fromkeys(REDUCTIONS, Reader._reduction),
    **dict.fromkeys(NORMS, Reader._norm),
}
