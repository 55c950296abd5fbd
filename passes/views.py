"""Index maps of view operators: which element of the input an element of the output is.

One rule per operator, used by the mask evaluator, the head analysis and the dataflow alike. Rules
take shapes from the captured metadata, so that literals such as -1 need no reading.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
from torch.fx import Node

from sparsify.passes.graphs import argument, aten, expression, is_tensor, op_name, shape_of
from sparsify.passes.index_space import IndexSpace

__all__ = [
    "broadcast_index",
    "concat_parts",
    "is_active_dropout",
    "is_view",
    "reshape_index",
    "view_source",
]

Expr = Any
Index = tuple[Expr, ...]
Step = tuple[Node, Index]
Rule = Callable[[Node, Index, IndexSpace], Step | None]

IDENTITY = aten(
    "contiguous clone alias detach detach_ lift_fresh_copy to lift_fresh _to_copy type_as "
    "dropout feature_dropout native_dropout float half bfloat16 view_copy_identity"
)
DROPOUTS = aten("dropout feature_dropout native_dropout")
RESHAPES = aten(
    "view reshape _unsafe_view flatten unflatten view_as reshape_as squeeze unsqueeze "
    "view_copy ravel"
)
EXPANDS = aten("expand expand_as broadcast_to")
SPLITS = aten("split split_with_sizes chunk tensor_split unsafe_chunk unsafe_split")


def view_source(node: Node, index: Index, space: IndexSpace) -> Step | None:
    """The input node and index that hold element `index` of `node`; None if it is no view.

    `IDENTITY` operators that change the dtype count as views here: they keep positions.
    """
    name = op_name(node)
    if name in IDENTITY:
        return None if is_active_dropout(node) else (_source(node), index)
    if name in RESHAPES:
        source = _source(node)
        return source, reshape_index(space, index, shape_of(node), shape_of(source))
    if name in EXPANDS:
        source = _source(node)
        return source, broadcast_index(index, shape_of(source))
    rule = RULES.get(name)
    return rule(node, index, space) if rule else None


def is_view(node: Node) -> bool:
    """Whether the operator is one that `view_source` knows."""
    name = op_name(node)
    return name in IDENTITY or name in RESHAPES or name in EXPANDS or name in RULES


def is_active_dropout(node: Node) -> bool:
    """Whether the operator is dropout that changes values."""
    off = argument(node, "train") is False or argument(node, "p") == 0
    return op_name(node) in DROPOUTS and not off


def broadcast_index(index: Index, shape: tuple[Expr, ...]) -> Index:
    """The index into an operand of `shape` that is broadcast to the rank of `index`."""
    kept = index[len(index) - len(shape) :]
    return tuple(
        sympy.Integer(0) if size == 1 else entry for entry, size in zip(kept, shape, strict=True)
    )


def reshape_index(
    space: IndexSpace, index: Index, shape: tuple[Expr, ...], source: tuple[Expr, ...]
) -> Index:
    """Index into `source` of the element at `index` of the same data seen as `shape`."""
    head = 0
    while head < min(len(shape), len(source)) and shape[head] == source[head]:
        head += 1
    tail = 0
    while (
        tail < min(len(shape), len(source)) - head
        and shape[len(shape) - 1 - tail] == source[len(source) - 1 - tail]
    ):
        tail += 1
    middle = slice(head, len(shape) - tail)
    flat = _linear(index[middle], shape[middle])
    inner = _unravel(space, flat, source[head : len(source) - tail])
    return index[:head] + inner + index[len(shape) - tail :]


def _linear(index: Index, shape: tuple[Expr, ...]) -> Expr:
    flat = sympy.Integer(0)
    for entry, size in zip(index, shape, strict=True):
        flat = flat * size + entry
    return sympy.expand(flat)


def _unravel(space: IndexSpace, flat: Expr, shape: tuple[Expr, ...]) -> Index:
    entries: list[Expr] = []
    real = [position for position, size in enumerate(shape) if size != 1]
    for position in reversed(range(len(shape))):
        if shape[position] == 1:
            entries.append(sympy.Integer(0))
        elif position == real[0]:
            entries.append(space.tidy(flat))
        else:
            flat, rest = space.divmod(flat, shape[position])
            entries.append(rest)
    return tuple(reversed(entries))


def concat_parts(node: Node) -> tuple[int, list[tuple[Node, Expr]]]:
    """Axis of an `aten.cat` and its parts with the offset at which each begins."""
    parts = [part for part in argument(node, "tensors") if is_tensor(part)]
    axis = _axis(argument(node, "dim", 0), len(shape_of(node)))
    offset, out = sympy.Integer(0), []
    for part in parts:
        if len(shape_of(part)) != len(shape_of(node)):
            continue  # the legacy empty part of shape [0]
        out.append((part, offset))
        offset = offset + shape_of(part)[axis]
    return axis, out


def _source(node: Node) -> Node:
    source = node.args[0] if node.args else next(iter(node.kwargs.values()))
    assert isinstance(source, Node)
    return source


def _axis(dim: int, rank: int) -> int:
    return dim + rank if dim < 0 else dim


def _put(index: Index, position: int, entry: Expr) -> Index:
    return (*index[:position], entry, *index[position + 1 :])


def _transpose(node: Node, index: Index, space: IndexSpace) -> Step:
    source = _source(node)
    a = _axis(_either(node, "dim0", "axis0", -2), len(index))
    b = _axis(_either(node, "dim1", "axis1", -1), len(index))
    entries = list(index)
    entries[a], entries[b] = entries[b], entries[a]
    return source, tuple(entries)


def _either(node: Node, first: str, second: str, default: int) -> int:
    value = argument(node, first, argument(node, second, default))
    return default if value is None else int(value)


def _matrix_transpose(node: Node, index: Index, space: IndexSpace) -> Step:
    if len(index) < 2:
        return _source(node), index
    return _source(node), (*index[:-2], index[-1], index[-2])


def _reversed(node: Node, index: Index, space: IndexSpace) -> Step:
    return _source(node), index[::-1]


def _permute(node: Node, index: Index, space: IndexSpace) -> Step:
    order = [_axis(dim, len(index)) for dim in argument(node, "dims")]
    entries: list[Expr] = [None] * len(index)
    for position, dim in enumerate(order):
        entries[dim] = index[position]
    return _source(node), tuple(entries)


def _movedim(node: Node, index: Index, space: IndexSpace) -> Step:
    rank = len(index)
    sources = [_axis(dim, rank) for dim in _as_list(argument(node, "source"))]
    targets = [_axis(dim, rank) for dim in _as_list(argument(node, "destination"))]
    order: list[int] = [-1] * rank
    for source, target in zip(sources, targets, strict=True):
        order[target] = source
    rest = iter(dim for dim in range(rank) if dim not in sources)
    order = [dim if dim >= 0 else next(rest) for dim in order]
    entries: list[Expr] = [None] * rank
    for position, dim in enumerate(order):
        entries[dim] = index[position]
    return _source(node), tuple(entries)


def _as_list(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _slice(node: Node, index: Index, space: IndexSpace) -> Step | None:
    source = _source(node)
    axis = _axis(argument(node, "dim", 0), len(index))
    start = argument(node, "start", 0)
    step = expression(argument(node, "step", 1))
    begin = _clamped(expression(0 if start is None else start), shape_of(source)[axis], space)
    if begin is None:
        return None
    return source, _put(index, axis, sympy.expand(begin + step * index[axis]))


def _clamped(start: Expr, size: Expr, space: IndexSpace) -> Expr | None:
    """First index of a slice, with negative starts counted from the end."""
    if start.is_negative:
        from_end = sympy.expand(size + start)
        if space.is_nonnegative(from_end):
            return from_end
        return sympy.Integer(0) if from_end.is_negative else None
    return start if space.is_nonnegative(start) else None


def _narrow(node: Node, index: Index, space: IndexSpace) -> Step | None:
    source = _source(node)
    axis = _axis(argument(node, "dim", 0), len(index))
    begin = _clamped(expression(argument(node, "start")), shape_of(source)[axis], space)
    if begin is None:
        return None
    return source, _put(index, axis, sympy.expand(begin + index[axis]))


def _select(node: Node, index: Index, space: IndexSpace) -> Step | None:
    source = _source(node)
    axis = _axis(argument(node, "dim", 0), len(index) + 1)
    entry = _clamped(expression(argument(node, "index")), shape_of(source)[axis], space)
    if entry is None:
        return None
    return source, (*index[:axis], entry, *index[axis:])


def _getitem(node: Node, index: Index, space: IndexSpace) -> Step | None:
    """An element of split, chunk or unbind."""
    source, position = node.args
    if not isinstance(source, Node) or not isinstance(position, int):
        return None
    name = op_name(source)
    if name == "aten.unbind":
        base = _source(source)
        axis = _axis(argument(source, "dim", 0), len(index) + 1)
        return base, (*index[:axis], sympy.Integer(position), *index[axis:])
    if name == "aten.native_dropout" and position == 0:
        return _source(source), index
    if name not in SPLITS:
        return None
    axis = _axis(argument(source, "dim", 0), len(index))
    sizes = [expression(piece.shape[axis]) for piece in source.meta["val"][:position]]
    begin = sympy.Add(*sizes)
    return _source(source), _put(index, axis, sympy.expand(index[axis] + begin))


def _repeat(node: Node, index: Index, space: IndexSpace) -> Step:
    source = _source(node)
    shape = shape_of(source)
    skipped = len(index) - len(shape)
    axes = zip(index[skipped:], shape, shape_of(node)[skipped:], strict=True)
    return source, tuple(_tiled(space, entry, size, tiled) for entry, size, tiled in axes)


def _tiled(space: IndexSpace, entry: Expr, size: Expr, tiled: Expr) -> Expr:
    if size == 1:
        return sympy.Integer(0)
    return entry if size == tiled else space.divmod(entry, size)[1]


def _repeat_interleave(node: Node, index: Index, space: IndexSpace) -> Step | None:
    source, repeats, dim = _source(node), argument(node, "repeats"), argument(node, "dim")
    if isinstance(repeats, Node) and is_tensor(repeats):
        return None
    count = expression(repeats)
    if dim is None:
        flat = space.divmod(index[0], count)[0]
        return source, _unravel(space, flat, shape_of(source))
    axis = _axis(dim, len(index))
    return source, _put(index, axis, space.divmod(index[axis], count)[0])


def _flip(node: Node, index: Index, space: IndexSpace) -> Step:
    source = _source(node)
    for dim in argument(node, "dims"):
        axis = _axis(dim, len(index))
        index = _put(index, axis, sympy.expand(shape_of(source)[axis] - 1 - index[axis]))
    return source, index


def _roll(node: Node, index: Index, space: IndexSpace) -> Step | None:
    source = _source(node)
    dims = _as_list(argument(node, "dims", ()) or ())
    shifts = argument(node, "shifts")
    shifts = list(shifts) if isinstance(shifts, list | tuple) else [shifts]
    if len(dims) != len(shifts):
        return None
    for dim, shift in zip(dims, shifts, strict=True):
        axis = _axis(dim, len(index))
        moved = space.divmod(index[axis] - expression(shift), shape_of(source)[axis])[1]
        index = _put(index, axis, moved)
    return source, index


RULES: dict[str, Rule] = {
    "aten.transpose": _transpose,
    "aten.swapaxes": _transpose,
    "aten.swapdims": _transpose,
    "aten.t": _matrix_transpose,
    "aten.mT": _matrix_transpose,
    "aten.numpy_T": _reversed,
    "aten.permute": _permute,
    "aten.movedim": _movedim,
    "aten.moveaxis": _movedim,
    "aten.slice": _slice,
    "aten.narrow": _narrow,
    "aten.select": _select,
    "aten.repeat": _repeat,
    "aten.tile": _repeat,
    "aten.repeat_interleave": _repeat_interleave,
    "aten.flip": _flip,
    "aten.roll": _roll,
    operator.getitem.__name__: _getitem,
}
