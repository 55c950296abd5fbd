"""Where sequences, positions and blocks lie: the one owner of that arithmetic.

An op receives a batch, a packed row of documents or a paged cache. `sequences` turns each into a
list of `Sequence`, and everything behind it sees one plain problem: queries at positions counted
from the first key of block 0, keys 0..length-1 counted from there too, an optional mask of the keys
that are real. Block c of a sequence holds its keys c*B .. (c+1)*B-1.

Positions and blocks are counted in slots, whatever a mask hides. A block before the one a query
stands in is complete, since all its slots lie before the query; it is a candidate if one of them
holds a real key. The block a query stands in keeps its place in the list even if a mask hides all
of it, as long as it begins before `kv_len`. Queries before the origin have no block and see no key.

Legend: B batch, H query heads, G key/value heads, T queries, S key slots, D head size, P pages,
Z slots of a page, N blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Layout",
    "Sequence",
    "block_count",
    "gather_pages",
    "key_slots",
    "list_width",
    "scatter_pages",
    "sequences",
]


class Layout(NamedTuple):
    """The optional tensors that say where queries and keys lie; every op takes them in this order.

    q_start: `[B]` int, position of query 0 among the key slots; default `kv_len - T`.
    kv_len: `[B]` int, key slots in use; slots behind are never read; default S.
    key_mask: `[B, S]` bool, False where a slot holds no key (padding, holes). A masked slot still
        counts as a position, so it moves no other key to another block.
    block_origin: `[B]` int >= 0, slot where block 0 begins; default the first real key. Slots
        before the origin belong to no block and are never read.
    cu_seqlens_q, cu_seqlens_k: `[documents + 1]` int, packed documents (B is 1). Then `q_start`,
        `kv_len` and `block_origin` hold one entry per document, counted inside the document.
    page_table: `[B, pages of a sequence]` int; keys and values are `[P, G, Z, D]`.
    """

    q_start: Tensor | None = None
    kv_len: Tensor | None = None
    key_mask: Tensor | None = None
    block_origin: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    page_table: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One sequence: a row of the batch, or one packed document.

    `index` numbers the sequences of the call. Queries are `q_from .. q_to-1` of the query axis,
    keys `k_from .. k_to-1` of the key axis, the first of them being the first key of block 0.
    `start` is the position of the first query counted from that key; it is negative for queries
    before it. `real` is a bool mask over the keys, or None when all of them are real.
    """

    index: int
    batch: int
    q_from: int
    q_to: int
    k_from: int
    k_to: int
    start: int
    real: Tensor | None

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.q_to - self.q_from

    @property
    def keys(self) -> int:
        """Number of key slots from block 0 on."""
        return self.k_to - self.k_from

    def visible_keys(self, last: int) -> int:
        """Key slots that the queries before number `last` may see at most."""
        return max(0, min(self.keys, self.start + last))

    def positions(self, first: int, last: int, device: torch.device) -> Tensor:
        """Positions of queries `first .. last-1`, int64 `[T]`."""
        return torch.arange(self.start + first, self.start + last, device=device)

    def take_queries(self, x_BHTD: Tensor) -> Tensor:
        """This sequence's part of a tensor with a query axis, `[H, T, ...]`, a view."""
        return x_BHTD[self.batch, :, self.q_from : self.q_to]

    def take_keys(self, x_BGSD: Tensor) -> Tensor:
        """This sequence's part of a tensor with a key axis, `[G, keys, ...]`, a view."""
        return x_BGSD[self.batch, :, self.k_from : self.k_to]


def block_count(keys: int, block_size: int) -> int:
    """Blocks that `keys` slots fill, the last one possibly in part. Accepts symbolic sizes."""
    return (keys + block_size - 1) // block_size


def key_slots(k: Tensor, layout: Layout) -> int:
    """Key slots of a sequence: the key axis, or all slots of its pages. Accepts symbolic sizes."""
    if layout.page_table is None:
        return k.shape[2]
    return layout.page_table.shape[1] * k.shape[2]


def list_width(slots: int, block_size: int, topk: int, local: str = "inside") -> int:
    """Width of the lists of selected blocks: min(topk, blocks), one place more for "union"."""
    places = topk + 1 if local == "union" else topk
    return int_min(places, block_count(slots, block_size))


def int_min(a: int, b: int) -> int:
    """The smaller one, also for symbolic sizes."""
    least: int = torch.sym_min(a, b)  # type: ignore[no-untyped-call]
    return least


def gather_pages(x_PGZD: Tensor, page_table: Tensor | None) -> Tensor:
    """Pages laid out as contiguous slots, `[B, G, pages*Z, D]`; entries below 0 mean no page.

    Without a page table the tensor itself.
    """
    if page_table is None:
        return x_PGZD
    table_BN = page_table.long().clamp(min=0)
    x_BGNZD = x_PGZD[table_BN].transpose(1, 2)
    return x_BGNZD.flatten(2, 3)


def scatter_pages(grad_BGSD: Tensor, page_table: Tensor | None, like_PGZD: Tensor) -> Tensor:
    """Transpose of `gather_pages`: gradients of slots summed into their pages."""
    if page_table is None:
        return grad_BGSD
    batch, groups, _, size = grad_BGSD.shape
    pages_of_row, slots = page_table.shape[1], like_PGZD.shape[2]
    grad_BNGZD = grad_BGSD.view(batch, groups, pages_of_row, slots, size).transpose(1, 2)
    known = page_table.reshape(-1) >= 0
    pages = page_table.reshape(-1)[known].long()
    out = grad_BGSD.new_zeros(like_PGZD.shape)
    return out.index_add_(0, pages, grad_BNGZD.flatten(0, 1)[known])


def sequences(batch: int, q_len: int, slots: int, layout: Layout) -> list[Sequence]:
    """All sequences of a call that hold a query or a key, in order.

    Args:
        batch: rows of the batch.
        q_len: T, the length of the query axis.
        slots: S, the length of the key axis (after `gather_pages`).
        layout: the layout tensors; their values are read here.

    Raises:
        ValueError: for values that describe no layout (falling cumulative lengths, a length beyond
            the axis, a negative origin).
    """
    spans = _spans(batch, q_len, slots, layout)
    lengths = _per_sequence("kv_len", layout.kv_len, len(spans))
    starts = _per_sequence("q_start", layout.q_start, len(spans))
    origins = _per_sequence("block_origin", layout.block_origin, len(spans))
    found = []
    for index, (row, (q_from, q_to), (k_from, k_to)) in enumerate(spans):
        length = k_to - k_from if lengths is None else lengths[index]
        if not 0 <= length <= k_to - k_from:
            raise ValueError(
                f"kv_len is {length} for sequence {index}, which has {k_to - k_from} key slots."
            )
        if layout.cu_seqlens_q is not None and (q_from, k_from) == (q_to, k_to):
            continue  # lengths of a fixed number of documents leave many of them empty
        first = length - (q_to - q_from) if starts is None else starts[index]
        real = None
        if layout.key_mask is not None:
            real = layout.key_mask[row, k_from : k_from + length]
        origin = _first_real(real) if origins is None else origins[index]
        if origin < 0:
            raise ValueError(f"block_origin is {origin} for sequence {index}; expected at least 0.")
        origin = min(origin, length)
        if real is not None:
            real = real[origin:]
            real = None if bool(real.all()) else real
        keys = (k_from + origin, k_from + length)
        found.append(Sequence(index, row, q_from, q_to, *keys, first - origin, real))
    return found


_Span = tuple[int, tuple[int, int], tuple[int, int]]


def _spans(batch: int, q_len: int, slots: int, layout: Layout) -> list[_Span]:
    """Batch row, query range and key range of every sequence."""
    if layout.cu_seqlens_q is None:
        return [(row, (0, q_len), (0, slots)) for row in range(batch)]
    cu_q = layout.cu_seqlens_q
    cu_k = cu_q if layout.cu_seqlens_k is None else layout.cu_seqlens_k
    q_ranges = _ranges("cu_seqlens_q", cu_q, q_len)
    k_ranges = _ranges("cu_seqlens_k", cu_k, slots)
    return [(0, q, k) for q, k in zip(q_ranges, k_ranges, strict=True)]


def _ranges(name: str, cumulative: Tensor, size: int) -> list[tuple[int, int]]:
    values = [int(x) for x in cumulative.tolist()]
    rising = all(a <= b for a, b in pairwise(values))
    if values[0] != 0 or not rising or values[-1] > size:
        raise ValueError(
            f"{name} must start at 0, never fall and end at or before {size}; it is {values}."
        )
    return list(pairwise(values))


def _per_sequence(name: str, values: Tensor | None, count: int) -> list[int] | None:
    if values is None:
        return None
    if values.numel() != count:
        raise ValueError(f"{name} has {values.numel()} entries for {count} sequences.")
    return [int(x) for x in values.tolist()]


def _first_real(real: Tensor | None) -> int:
    """Slot of the first real key; the length if there is none."""
    if real is None:
        return 0
    found = torch.nonzero(real)
    return int(found[0]) if found.numel() else real.shape[0]
