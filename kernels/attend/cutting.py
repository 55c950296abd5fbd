"""The shape of a call, and the slices that its work is cut into.

A *list* of blocks belongs to one query head (MoBA) or to all query heads of a key group (MSA).
Lists are counted through the batch rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import triton
from torch import Tensor

from sparsify.kernels.tiling import MOST_PROGRAMS, AttentionTiles, padded, span

__all__ = ["Chooser", "Parts", "Shape", "Slice", "chunk_of", "scale_log2", "slices"]

_STEP = 128  # queries of a slice come in multiples of this
_LONG = 1 << 16  # with this many queries the lists are long enough for longer work items


def scale_log2(q: Tensor, scale: float | None) -> float:
    """A factor for scores under powers of two; without a scale it is `D ** -0.5` for those of e."""
    return (q.shape[-1] ** -0.5 if scale is None else scale) * math.log2(math.e)


class Chooser(Protocol):
    """Gives the past blocks of a slice: `chosen` places of `width`.

    There are three: `moba.Gate` scores blocks for each head, `msa.Index` for each key group, and
    `lists.Given` has them from the caller.

    together: whether all lists of a batch row are chosen at once, so that slices had better hold
        all of them and fewer queries.
    """

    @property
    def together(self) -> bool: ...
    @property
    def chosen(self) -> int: ...
    @property
    def width(self) -> int: ...

    def rows(
        self, first_list: int, lists: int, first: int, count: int, /
    ) -> tuple[Tensor, Tensor | None]:
        """Lists `[lists, count, width]`, and int8 flags of rows that list their own block, or None
        when all do."""
        ...


class Shape(NamedTuple):
    """What all kernels of a call share. `share` query heads have one list."""

    heads: int
    group: int
    block: int
    head_dim: int
    value_dim: int
    scale_log2: float
    tiles: AttentionTiles
    exact: bool
    share: int = 1

    @property
    def head_slices(self) -> int:
        """Parts that the heads of a list are cut into, each as many as a tile takes."""
        return int(triton.cdiv(self.share, span(self.share)))

    def sizes(self) -> dict[str, object]:
        """Constants of the kernels."""
        return {
            "heads": self.heads,
            "group": self.group,
            "D": self.head_dim,
            "DP": padded(self.head_dim),
            "V": self.value_dim,
            "VP": padded(self.value_dim),
        }

    def sharing(self) -> dict[str, object]:
        """Constants of the kernels that know lists of several heads."""
        return {"SHARE": self.share, "SPAN": span(self.share)}


class Slice(NamedTuple):
    """Some lists of all batch rows counted through, and some queries."""

    first_list: int
    lists: int
    first: int
    queries: int


class Parts(NamedTuple):
    """Partial outputs of a slice `[lists, queries, chosen, SHARE, V]`; their maxima and sums,
    `[lists, queries, W, 2, SHARE]` in float32."""

    out: Tensor
    stats: Tensor


def slices(
    q: Tensor, v: Tensor, chooser: Chooser, workspace_bytes: int, share: int = 1
) -> Iterator[Slice]:
    """Slices of some lists with all queries, or of some queries of one list or of all lists of a
    batch row; never of more lists than a grid takes along its second axis."""
    batch, q_len, lists = q.shape[0], q.shape[2], q.shape[1] // share
    # Partial outputs, maxima and sums, lists both ways.
    row_bytes = share * (chooser.chosen * v.shape[-1] * q.element_size() + 8 * chooser.width)
    row_bytes += 8 * chooser.width + 8
    rows = max(_STEP, workspace_bytes // max(row_bytes, 1))
    unit = lists if chooser.together else 1
    units = batch * lists // unit
    if rows >= unit * q_len:
        most = MOST_PROGRAMS // (unit * triton.cdiv(share, span(share)))
        for number, count in _even(units, min(rows // (unit * q_len), max(most, 1)), 1):
            yield Slice(number * unit, count * unit, 0, q_len)
        return
    for number in range(units):
        for first, count in _even(q_len, rows // unit, _STEP):
            yield Slice(number * unit, unit, first, count)


def _even(size: int, most: int, step: int) -> Iterator[tuple[int, int]]:
    """Begin and size of parts of about equal size, in multiples of `step` and `most` at most."""
    steps = triton.cdiv(size, step)
    parts = triton.cdiv(steps, max(most // step, 1))
    for part in range(parts):
        first, last = (min(steps * p // parts * step, size) for p in (part, part + 1))
        yield first, last - first


def chunk_of(tiles: AttentionTiles, queries: int) -> int:
    """Entries of a work item: a tile of the large kernel, many of the small one."""
    return 2 * tiles.chunk if tiles.small and queries >= _LONG else tiles.chunk
