"""Whether a site is self-attention over one token stream, with or without a cache before it.

Every row i of q must stand for token i + offset of the stream, and k and v at position j must be
made of token j alone. All three are followed back to the value they share (the hidden state); what
mixes positions on the way, or cannot be read, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx import Node

from sparsify.ir import StreamProof
from sparsify.passes.context import Context
from sparsify.passes.dominators import Dataflow
from sparsify.passes.frame import Frame
from sparsify.passes.graphs import dtype_of, shape_of
from sparsify.passes.reads import Part, Read
from sparsify.passes.refused import Refused
from sparsify.passes.separate import separate_stream

__all__ = ["Dataflow", "Stream", "prove_stream"]

Expr = Any


@dataclass(frozen=True)
class Stream:
    """The proof, and the position of query 0 among the keys that follows from it (None: the
    inputs are separate, so that only the mask can say)."""

    proof: StreamProof
    offset: Expr | None


def prove_stream(frame: Frame, context: Context) -> Stream:
    """Show that q, k and v come position by position from one token stream.

    Args:
        frame: the site's indices.
        context: the graph around the site, with the hidden state.

    Raises:
        Refused: CROSS_ATTENTION, NOT_SELF_ATTENTION or SOFTMAX_AXIS, with what was read.
    """
    hidden = context.hidden
    if hidden is None:
        return Stream(separate_stream(frame.call, context.flow, bool(frame.tie)), None)
    if hidden in context.frozen:
        raise _not_self(f"{hidden.name} is changed in place while q, k and v are made of it")
    walks = {name: _Walk(frame, name, hidden, context) for name in ("q", "k", "v")}
    for walk in walks.values():
        walk.check_readable(context.flow)
    axis = _position_axis(frame, hidden, walks)
    _check_axes(frame, hidden, axis, walks)
    offsets = {name: walk.offset(axis) for name, walk in walks.items()}
    # as many values as keys, or the model could not run: so both are counted from the end
    surplus = frame.call.k.shape[-2] - frame.call.v.shape[-2]
    if sympy.expand(offsets["k"] - offsets["v"] + surplus) != 0:
        raise _not_self(f"k stands at {offsets['k']}, v at {offsets['v']} of the stream")
    cached = any(walk.cache for walk in walks.values())
    return Stream(
        StreamProof(hidden.name, cached, _assumed(hidden, axis, list(walks.values()))),
        sympy.expand(offsets["q"] - offsets["k"]),
    )


class _Walk:
    """What one of q, k and v reads of the hidden state."""

    def __init__(self, frame: Frame, name: str, hidden: Node, context: Context) -> None:
        self.frame, self.name, self.hidden = frame, name, hidden
        self.reader = context.reader(frame.space)
        operand = getattr(frame.call, name)
        index = frame.q_index() if name == "q" else frame.kv_index(operand, f"{name}_feature")
        self.position = frame.i if name == "q" else frame.j
        self.reads = self.reader.leaves(operand.node, index)
        self.stream = [read.index for read in self.reads if read.node is hidden and not read.guard]
        self.parts = [part for part in self.reader.parts if part.entry == self.position]
        self.cache: list[Node] = []
        self.beside: list[Node] = []
        self.numbers: list[Node] = []

    def check_readable(self, flow: Dataflow) -> None:
        """Refuse what was not read, and inputs that reach k or v past the hidden state."""
        for read in self.reads:
            if read.unread and flow.inputs_of(read.node):
                raise _not_self(
                    f"{self.name} passes through {read.unread}, which is not known to keep "
                    f"positions apart ({read.node.name})"
                )
        if not self.stream:
            raise _not_self(f"{self.name} does not depend on {self.hidden.name}")
        for read in self.reads:
            if read.node in flow.inputs and read.node is not self.hidden and not read.guard:
                self._side_input(read)

    def _side_input(self, read: Read) -> None:
        """Another model input: a cache before the own keys, or positions."""
        if self._is_cache(read):
            self.cache.append(read.node)
            return
        if not dtype_of(read.node).is_floating_point:
            if self._elsewhere(read):
                raise _not_self(f"{self.name} also reads the model input {read.node.name}")
            self.numbers.append(read.node)
        elif self.position in read.index:
            self.beside.append(read.node)
        else:
            raise _not_self(f"{self.name} also reads the model input {read.node.name}")

    def _elsewhere(self, read: Read) -> bool:
        """Whether an input of numbers (positions, a padding mask) is read at another position;
        read as a whole, it is where positions are counted from."""
        return any(e.has(self.position) and e != self.position for e in read.index)

    def _is_cache(self, read: Read) -> bool:
        if self.name == "q" or len(self.parts) != 2:
            return False
        first, b = self.parts[0], self.frame.b
        own_row = not b.is_Symbol or any(entry.has(b) for entry in read.index)
        return first.inside in read.index and first.offset == 0 and own_row

    def own(self) -> Part | None:
        """The part of a concatenation with a cache that holds the stream's own tokens."""
        if not self.parts:
            return None
        if len(self.parts) != 2 or not self.cache:
            raise _not_self(
                f"{self.name} is put together of {len(self.parts)} parts along its positions "
                f"({', '.join(part.node.name for part in self.parts)})"
            )
        return self.parts[1]

    def local(self) -> tuple[Expr, Expr]:
        """The position symbol inside the stream's own tokens, and where they begin."""
        part = self.own()
        return (self.position, sympy.Integer(0)) if part is None else (part.inside, part.offset)

    def offset(self, axis: int | None) -> Expr:
        """Position in the hidden state minus position in q, k or v."""
        symbol, begin = self.local()
        if axis is None:
            return -begin
        shifts = set()
        for index in self.stream:
            entry = index[axis]
            if self._is_whole(entry) or self._is_past(entry, symbol):
                continue
            shifts.add(sympy.expand(entry - symbol))
        if not shifts and self.name == "q":
            raise Refused(
                "CROSS_ATTENTION",
                "keys and values do not come from the queries' token stream",
                f"row i of q has no place of its own in {self.hidden.name}, the source of k and v",
            )
        if len(shifts) != 1 or any(s.has(symbol) for s in shifts):
            raise _not_self(
                f"position j of {self.name} reads positions "
                f"{_listed(index[axis] for index in self.stream)} of {self.hidden.name}"
            )
        return shifts.pop() - begin

    def _is_whole(self, entry: Expr) -> bool:
        """A whole axis: harmless in q, whose rows keep their place, refused in k and v unless
        it is the past of a causal attention."""
        if entry not in self.reader.mixed:
            return False
        if self.name == "q":
            return True
        raise _not_self(
            f"{self.name} mixes positions by {self.reader.mixed[entry]} on the way from "
            f"{self.hidden.name}"
        )

    def _is_past(self, entry: Expr, symbol: Expr) -> bool:
        bounds = self.frame.space.bounds
        while entry in bounds:
            entry = bounds[entry]
            if entry == symbol:
                return True
        return False


def _position_axis(frame: Frame, hidden: Node, walks: dict[str, _Walk]) -> int | None:
    """Axis of the hidden state along which keys are counted; None when it has one position."""
    symbols = {name: walk.local()[0] for name, walk in walks.items()}
    for axis in range(len(shape_of(hidden))):
        for name in ("k", "v", "q"):
            symbol = symbols[name]
            if symbol.is_Symbol and _counts(axis, symbol, walks[name]):
                return axis
    if not any(symbol.is_Symbol for symbol in symbols.values()):
        _check_one_place(hidden, walks)
        return None
    for name, walk in walks.items():
        if any(_is_rearranged(entry, symbols[name], walk) for i in walk.stream for entry in i):
            raise _not_self(f"{name} reads the positions of {hidden.name} in another order")
    raise Refused(
        "SOFTMAX_AXIS",
        "attention runs over an axis that is not the positions of the token stream",
        f"no axis of {hidden.name} {shape_of(hidden)} is counted by the keys",
    )


def _check_one_place(hidden: Node, walks: dict[str, _Walk]) -> None:
    """One query and one own key: they must be the same token."""
    for axis in range(len(shape_of(hidden))):
        entries = {index[axis] for walk in walks.values() for index in walk.stream}
        fixed = {entry for entry in entries if not entry.free_symbols & set(_sizes(walks))}
        if len(fixed) > 1:
            raise _not_self(f"q, k and v read {_listed(fixed)} of axis {axis} of {hidden.name}")


def _sizes(walks: dict[str, _Walk]) -> Iterable[Expr]:
    return next(iter(walks.values())).frame.space.sizes


def _counts(axis: int, symbol: Expr, walk: _Walk) -> bool:
    """Whether an axis is counted by the symbol, alone or behind the batch (b*L + j), and does not
    merely pick features by it."""
    others = set(walk.frame.space.sizes) - {symbol, walk.frame.b}
    return any(
        index[axis].coeff(symbol) == 1 and not index[axis].free_symbols & others
        for index in walk.stream
    )


def _is_rearranged(entry: Expr, symbol: Expr, walk: _Walk) -> bool:
    """Whether an axis is counted by the symbol in some other way, without features in between."""
    others = set(walk.frame.space.sizes) - {symbol, walk.frame.b}
    return bool(symbol.is_Symbol and entry.has(symbol) and not entry.free_symbols & others)


def _assumed(hidden: Node, axis: int | None, walks: Sequence[_Walk]) -> tuple[str, ...]:
    def names(pick: Callable[[_Walk], list[Node]]) -> list[str]:
        return sorted({node.name for walk in walks for node in pick(walk)})

    b = walks[0].frame.b
    rows_of_batch = any(index[0].has(b) for walk in walks for index in walk.stream if b.is_Symbol)
    # sequence first, or attention between the rows of a batch: the graph cannot tell
    first = axis == 0 and not rows_of_batch
    return (
        *((f"axis 0 of {hidden.name} counts the tokens",) if first else ()),
        *(f"{n} holds one row for every token of the stream" for n in names(lambda w: w.beside)),
        *(f"{n} holds positions or padding of the stream" for n in names(lambda w: w.numbers)),
        *(f"{n} holds the stream's earlier tokens" for n in names(lambda w: w.cache)),
    )


def _check_axes(frame: Frame, hidden: Node, axis: int | None, walks: dict[str, _Walk]) -> None:
    """Batch entries must be the same for q, k and v, and positions stay on their axis."""
    for other in range(len(shape_of(hidden))):
        if other == axis:
            continue
        entries = {index[other] for walk in walks.values() for index in walk.stream}
        if any(entry.has(frame.b) for entry in entries if frame.b.is_Symbol) and len(entries) > 1:
            raise _not_self(f"q, k and v read {_listed(entries)} of axis {other} of {hidden.name}")
        for walk in walks.values():
            symbol = walk.local()[0]
            if symbol.is_Symbol and any(index[other].has(symbol) for index in walk.stream):
                raise _not_self(
                    f"{walk.name} spreads its positions over axis {other} of {hidden.name}"
                )


def _not_self(evidence: str) -> Refused:
    return Refused(
        "NOT_SELF_ATTENTION",
        "k and v are not made position by position from the queries' token stream",
        evidence,
    )


def _listed(entries: Iterable[Expr]) -> str:
    return "{" + ", ".join(sorted({str(entry) for entry in entries})) + "}"
