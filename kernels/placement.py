"""Where every query and every block lies, as tensors on the device; nothing is read by the host.

The kernels number the blocks of all sequences of a batch row in one run, so that a tile of queries
may cross the border of two packed documents. For each query they need four numbers, for each block
two; `place` makes them from the layout tensors. A call without layout tensors is *plain*: query i
of T stands at slot S - T + i, block c begins at slot c * block, and the kernels compute all of it.

Values that describe no layout cannot be refused here, since the host does not see them; they are
clamped, so that no kernel reads outside its tensors.

Legend: B batch, T queries, S key slots, N blocks of a batch row, M documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsify.kernels.layout import Layout, block_count

__all__ = ["Placement", "place"]

_FAR = 1 << 30  # positions beyond are all the same: behind every key, and 32 bits hold them


class Placement(NamedTuple):
    """Positions of a call; all tensors are None in a plain one.

    first_BT, end_BT: the blocks before the one the query stands in, as a range of block numbers.
    lo_BT, hi_BT: the key slots that the query sees in its own block; empty when it sees none.
    slot_BN, keys_BN: first key slot of a block, and how many slots it has (0: there is no block).
    own_BT: whether the query stands in a block at all, be it one without a real key.
    real_BN: whether a block holds a real key; None when all do.
    key_mask: as in the layout, contiguous.
    blocks: N.
    start: slot of query 0 in a plain call; may be negative.
    """

    blocks: int
    start: int
    first_BT: Tensor | None = None
    end_BT: Tensor | None = None
    lo_BT: Tensor | None = None
    hi_BT: Tensor | None = None
    own_BT: Tensor | None = None
    slot_BN: Tensor | None = None
    keys_BN: Tensor | None = None
    real_BN: Tensor | None = None
    key_mask: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether there are no layout tensors."""
        return self.slot_BN is None


class _Spans(NamedTuple):
    """Sequences `[B, M]`: query and key ranges of the axes, key slots in use, origin, position of
    query 0 (both counted from the first key slot)."""

    q_from: Tensor
    q_len: Tensor
    k_from: Tensor
    length: Tensor
    origin: Tensor
    start: Tensor


def place(layout: Layout, batch: int, q_len: int, slots: int, block_size: int) -> Placement:
    """Placement of a call whose keys are contiguous (pages gathered before)."""
    if all(x is None for x in layout[:6]):
        return Placement(block_count(slots, block_size), slots - q_len)
    device = next(x for x in layout[:6] if x is not None).device
    spans = _spans(layout, batch, q_len, slots, device)
    documents = spans.q_from.shape[1]
    blocks = block_count(slots, block_size) + (documents if layout.cu_seqlens_q is not None else 0)
    keys_BM = spans.length - spans.origin
    count_BM = (keys_BM + block_size - 1) // block_size
    last_BM = count_BM.cumsum(1)
    table = _block_table(spans, keys_BM, last_BM, last_BM - count_BM, blocks, block_size)
    first, end, lo, hi, own = _rows(spans, keys_BM, last_BM - count_BM, count_BM, q_len, block_size)
    mask = None if layout.key_mask is None else layout.key_mask.contiguous()
    real = None if mask is None else _has_real_key(mask, *table)
    return Placement(blocks, 0, first, end, lo, hi, own, *table, real, mask)


def _spans(layout: Layout, batch: int, q_len: int, slots: int, device: torch.device) -> _Spans:
    if layout.cu_seqlens_q is None:
        q_from = k_from = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        q_size, k_size = torch.full_like(q_from, q_len), torch.full_like(q_from, slots)
    else:
        cu_k = layout.cu_seqlens_q if layout.cu_seqlens_k is None else layout.cu_seqlens_k
        q_from, q_size = _ranges(layout.cu_seqlens_q, q_len)
        k_from, k_size = _ranges(cu_k, slots)

    def given(x: Tensor) -> Tensor:
        return x.long().view(q_from.shape)

    length = k_size if layout.kv_len is None else given(layout.kv_len).clamp(min=0).minimum(k_size)
    origin = (
        _first_real(layout.key_mask, k_from, slots)
        if layout.block_origin is None
        else given(layout.block_origin).clamp(min=0)
    ).minimum(length)
    start = length - q_size if layout.q_start is None else given(layout.q_start)
    return _Spans(q_from, q_size, k_from, length, origin, start)


def _ranges(cumulative: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Begin and size of every document, `[1, M]`."""
    borders = cumulative.long().clamp(0, size).cummax(0).values
    if borders.numel() == 1:  # no document at all is one without tokens
        borders = borders.repeat(2)
    return borders[:-1][None], borders.diff()[None]


def _first_real(key_mask: Tensor | None, k_from_BM: Tensor, slots: int) -> Tensor:
    """Slots before the first real key of each sequence; beyond its end if it has none."""
    if key_mask is None or slots == 0:
        return torch.zeros_like(k_from_BM)
    at_S = torch.arange(slots, device=key_mask.device)
    next_BS = torch.where(key_mask, at_S, slots).flip(1).cummin(1).values.flip(1)
    next_BM = next_BS.gather(1, k_from_BM.clamp(max=slots - 1))
    return next_BM - k_from_BM


def _block_table(
    spans: _Spans,
    keys_BM: Tensor,
    last_BM: Tensor,
    first_BM: Tensor,
    blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """First slot and slots of every block, int32 `[B, N]`."""
    number_BN = torch.arange(blocks, device=keys_BM.device).expand(len(keys_BM), -1).contiguous()
    document_BN = torch.searchsorted(last_BM, number_BN, right=True)
    exists = document_BN < last_BM.shape[1]
    document_BN = document_BN.clamp(max=last_BM.shape[1] - 1)

    def of(x_BM: Tensor) -> Tensor:
        return x_BM.gather(1, document_BN)

    skipped_BN = (number_BN - of(first_BM)) * block_size
    slot_BN = of(spans.k_from) + of(spans.origin) + skipped_BN
    size_BN = (of(keys_BM) - skipped_BN).clamp(0, block_size)
    return (slot_BN * exists).int(), (size_BN * exists).int()


def _rows(
    spans: _Spans,
    keys_BM: Tensor,
    first_BM: Tensor,
    count_BM: Tensor,
    q_len: int,
    block_size: int,
) -> tuple[Tensor, ...]:
    """`first`, `end`, `lo`, `hi` (int32) and `own` (bool) of every query, `[B, T]`."""
    row_BT = torch.arange(q_len, device=keys_BM.device).expand(len(keys_BM), -1).contiguous()
    ends_BM = spans.q_from + spans.q_len
    document_BT = torch.searchsorted(ends_BM, row_BT, right=True)
    known = document_BT < ends_BM.shape[1]
    document_BT = document_BT.clamp(max=ends_BM.shape[1] - 1)

    def of(x_BM: Tensor) -> Tensor:
        return x_BM.gather(1, document_BT)

    position = row_BT - of(spans.q_from) + of(spans.start) - of(spans.origin)
    position = position.clamp(max=_FAR)
    known = known & (position >= 0)
    own = position.clamp(min=0) // block_size
    past = own.minimum(of(count_BM)) * known
    keys_from = of(spans.k_from) + of(spans.origin)
    seen = (position + 1).clamp(min=0).minimum(of(keys_BM))
    lo = own * block_size
    hi = seen.maximum(lo) * known
    first = of(first_BM)
    rows = (first, first + past, keys_from + lo * known, keys_from + hi)
    return (*(x.int() for x in rows), known & (own < of(count_BM)))


def _has_real_key(key_mask: Tensor, slot_BN: Tensor, keys_BN: Tensor) -> Tensor:
    """Whether a block holds a real key, `[B, N]`."""
    before_BS = torch.nn.functional.pad(key_mask.int().cumsum(1), (1, 0))
    begin = slot_BN.long().clamp(max=key_mask.shape[1])
    end = (slot_BN + keys_BN).long().clamp(max=key_mask.shape[1])
    return before_BS.gather(1, end) > before_BS.gather(1, begin)
