"""Forward passes: the stages of attention over lists of blocks, slice by slice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from sparsify.kernels import tiling
from sparsify.kernels.attend.combine import combine_clean_fwd_kernel, combine_fwd_kernel
from sparsify.kernels.attend.kv_outer import large_block_fwd_kernel, small_block_fwd_kernel
from sparsify.kernels.attend.q_outer import query_block_fwd_kernel
from sparsify.kernels.placement import Placement
from sparsify.kernels.select.index import reverse_index
from sparsify.kernels.tiling import AttentionTiles, attention_tiles, padded

__all__ = [
    "Chooser",
    "Parts",
    "Shape",
    "Slice",
    "by_block",
    "by_query",
    "chunk_of",
    "combine",
    "dense",
    "outputs",
    "shape_of",
    "slices",
    "sparse",
]

LOG2E = 1.4426950408889634
# At most this many queries go query by query.
FEW_QUERIES = 32
_STEP = 128  # queries of a slice come in multiples of this
_LONG = 1 << 16  # with this many queries the lists are long enough for longer work items
_SPLIT = 4  # own blocks of more tiles than this have a loop for those that are seen whole
_MARKS = 256  # tiles that one program of the second combine looks at


class Chooser(Protocol):
    """Gives the past blocks of a slice: `chosen` places of `width`."""

    chosen: int
    width: int

    def rows(self, head: int, heads: int, first: int, count: int) -> tuple[Tensor, Tensor | None]:
        """Lists `[heads, count, width]`, and int8 flags of rows that list their own block, or None
        when all do."""
        ...


class Shape(NamedTuple):
    """What all kernels of a call share."""

    heads: int
    group: int
    block: int
    head_dim: int
    value_dim: int
    scale_log2: float
    tiles: AttentionTiles
    exact: bool

    def sizes(self) -> dict[str, object]:
        """Constants of the kernels."""
        return {
            "HEADS": self.heads,
            "GROUP": self.group,
            "D": self.head_dim,
            "DP": padded(self.head_dim),
            "V": self.value_dim,
            "VP": padded(self.value_dim),
        }


class Slice(NamedTuple):
    """Some heads of all batch rows counted through, and some queries."""

    head: int
    heads: int
    first: int
    queries: int


class Parts(NamedTuple):
    """Partial outputs of a slice `[heads, queries, chosen, V]`; their maxima and sums side by side,
    `[heads, queries, W, 2]` in float32."""

    out: Tensor
    stats: Tensor


def shape_of(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float | None) -> Shape:
    """The shape of a call."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    shared = tiling.shared_bytes(q.device)
    tiles = attention_tiles(block, q.shape[-1], v.shape[-1], q.element_size(), shared)
    exact = q.dtype == torch.float32
    group = q.shape[1] // k.shape[1]
    return Shape(q.shape[1], group, block, q.shape[-1], v.shape[-1], scale * LOG2E, tiles, exact)


def dense(
    q: Tensor, k: Tensor, v: Tensor, placement: Placement, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Causal attention over all keys of each sequence."""
    out, lse = outputs(q, v)
    if not placement.plain:
        placement = _whole_sequences(placement)
    whole = shape._replace(block=padded(max(k.shape[2], 1)))
    part = Slice(0, q.shape[0] * q.shape[1], 0, q.shape[2])
    if out.numel() and k.shape[2]:
        combine(q, k, v, None, None, None, out, lse, placement, whole, part)
    else:
        out.zero_(), lse.fill_(float("-inf"))
    return out, lse


def _whole_sequences(placement: Placement) -> Placement:
    """The same with every query's own block reaching back to the first key of its sequence."""
    first, end, lo, hi = placement[2:6]
    assert first is not None and end is not None and lo is not None and hi is not None
    assert placement.slot_BN is not None and placement.keys_BN is not None
    most = max(placement.blocks - 1, 0)
    at_first, at_last = first.long().clamp(max=most), (end - 1).long().clamp(0, most)
    begin = torch.where(end > first, placement.slot_BN.gather(1, at_first), lo)
    last = placement.slot_BN.gather(1, at_last) + placement.keys_BN.gather(1, at_last)
    reach = torch.where(hi > lo, hi, torch.where(end > first, last, begin))
    return placement._replace(lo_BT=begin.int(), hi_BT=reach.int())


def sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    placement: Placement,
    shape: Shape,
    chooser: Chooser,
    workspace_bytes: int,
) -> tuple[Tensor, Tensor]:
    """Attention over the chosen past blocks and the own block."""
    out, lse = outputs(q, v)
    if not out.numel() or not k.shape[2]:
        out.zero_(), lse.fill_(float("-inf"))
        return out, lse
    for part in slices(q, v, chooser, workspace_bytes):
        idx, own = chooser.rows(*part)
        parts = None
        if chooser.chosen and placement.blocks > 1:
            # Not by the slice: a row must not depend on how the work is cut.
            attend = by_query if q.shape[2] <= FEW_QUERIES else by_block
            parts = attend(q, k, v, idx, placement, shape, part, chooser.chosen)
        combine(q, k, v, idx, own, parts, out, lse, placement, shape, part, chooser.chosen)
    return out, lse


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def slices(q: Tensor, v: Tensor, chooser: Chooser, workspace_bytes: int) -> Iterator[Slice]:
    """Slices of some heads with all queries, or of some queries of one head."""
    batch, heads, q_len = q.shape[:3]
    # Partial outputs, maxima and sums, lists both ways.
    row_bytes = chooser.chosen * v.shape[-1] * q.element_size() + 16 * chooser.width + 8
    rows = max(_STEP, workspace_bytes // max(row_bytes, 1))
    every = batch * heads
    if rows >= q_len:
        step = max(1, min(every, rows // q_len))
        step = triton.cdiv(every, triton.cdiv(every, step))
        for head in range(0, every, step):
            yield Slice(head, min(step, every - head), 0, q_len)
        return
    step = rows // _STEP * _STEP
    for head in range(every):
        for first in range(0, q_len, step):
            yield Slice(head, 1, first, min(step, q_len - first))


def _parts(q: Tensor, v: Tensor, idx: Tensor, chosen: int) -> Parts:
    heads, count, width = idx.shape
    stats = q.new_empty(heads, count, width, 2, dtype=torch.float32)
    return Parts(q.new_empty(heads, count, chosen, v.shape[-1]), stats)


def chunk_of(tiles: AttentionTiles, queries: int) -> int:
    """Entries of a work item: a tile of the large kernel, many of the small one."""
    if not tiles.small:
        return tiles.rows
    return 2 * tiles.chunk if queries >= _LONG else tiles.chunk


def by_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    placement: Placement,
    shape: Shape,
    part: Slice,
    chosen: int,
) -> Parts:
    tiles = shape.tiles
    index = reverse_index(idx, placement.blocks, chunk_of(tiles, part.queries))
    parts = _parts(q, v, idx, chosen)  # after the index, whose scratch memory it takes over
    options: dict[str, object] = {"num_warps": tiles.warps}
    keys: object = k
    values: object = v
    if tiles.small:
        kernel = small_block_fwd_kernel
    else:
        kernel = large_block_fwd_kernel
        by_tma = _fits_tma(k, v, placement, shape)
        options |= {"BY_TMA": by_tma, "STAGES": tiles.stages}
        if tiles.max_registers and by_tma:
            options["maxnreg"] = tiles.max_registers
        if by_tma:
            keys, values = _descriptor(k, tiles.columns), _descriptor(v, tiles.columns)
    kernel[(index.bound,)](
        q,
        keys,
        values,
        index.entries,
        index.work,
        index.items,
        *parts,
        placement.slot_BN,
        placement.keys_BN,
        placement.key_mask,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        shape.scale_log2,
        k.shape[2],
        placement.blocks,
        part.first,
        part.queries,
        part.head,
        **shape.sizes(),
        BLOCK=shape.block,
        WIDTH=idx.shape[2],
        CHOSEN=chosen,
        M=tiles.rows,
        TILE_N=tiles.columns,
        PLAIN=placement.plain,
        MASKED=placement.key_mask is not None,
        EXACT_DOT=shape.exact,
        **options,
    )
    return parts


def by_query(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    placement: Placement,
    shape: Shape,
    part: Slice,
    chosen: int,
) -> Parts:
    parts = _parts(q, v, idx, chosen)
    query_block_fwd_kernel[(part.queries * chosen, part.heads)](
        q,
        k,
        v,
        idx,
        *parts,
        placement.slot_BN,
        placement.keys_BN,
        placement.key_mask,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        shape.scale_log2,
        k.shape[2],
        placement.blocks,
        part.first,
        part.queries,
        part.head,
        **shape.sizes(),
        BLOCK=shape.block,
        WIDTH=idx.shape[2],
        CHOSEN=chosen,
        TILE_N=min(64, padded(shape.block)),
        STAGES=2,
        PLAIN=placement.plain,
        MASKED=placement.key_mask is not None,
        num_warps=4,
    )
    return parts


def combine(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor | None,
    own: Tensor | None,
    parts: Parts | None,
    out: Tensor,
    lse: Tensor,
    placement: Placement,
    shape: Shape,
    part: Slice,
    chosen: int = 0,
) -> None:
    tiles = shape.tiles
    grid = (triton.cdiv(part.queries, tiles.combine_rows), part.heads)
    arguments = (
        q,
        k,
        v,
        idx,
        *(parts or (None, None)),
        out,
        lse,
        placement.lo_BT,
        placement.hi_BT,
        own,
        placement.key_mask,
        q.new_empty(grid, dtype=torch.int8),
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *out.stride(),
        shape.scale_log2,
        k.shape[2],
        q.shape[2],
        placement.start,
        part.first,
        part.queries,
        part.head,
    )
    constants = shape.sizes() | {
        "BLOCK": shape.block,
        "WIDTH": 1 if idx is None else idx.shape[2],
        "CHOSEN": chosen if parts is not None else 0,
        "M": tiles.combine_rows,
        "TILE_N": tiles.combine_columns,
        "STAGES": tiles.combine_stages,
        "PLAIN": placement.plain,
        "MASKED": placement.key_mask is not None,
        "OWN_LISTED": own is not None,
        "EXACT_DOT": shape.exact,
        "num_warps": tiles.combine_warps,
    }
    split = shape.block > _SPLIT * tiles.combine_columns
    combine_fwd_kernel[grid](*arguments, **constants, SPLIT=split)
    marks = (triton.cdiv(grid[0], _MARKS), part.heads)
    combine_clean_fwd_kernel[marks](*arguments, **constants, FLAGS=_MARKS)


def _fits_tma(k: Tensor, v: Tensor, placement: Placement, shape: Shape) -> bool:
    """Whether keys and values can be fetched by the tensor memory accelerator: sm_90 or newer,
    aligned strides, nothing to mask inside a block."""
    if k.device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(k.device)[0] < 9:
        return False
    if not placement.plain or shape.block % shape.tiles.columns:
        return False
    sizes_fit = (
        padded(shape.head_dim) == shape.head_dim and padded(shape.value_dim) == shape.value_dim
    )
    return sizes_fit and all(map(_is_aligned, (k, v)))


def _is_aligned(x: Tensor) -> bool:
    size = x.element_size()
    strides = [stride * size % 16 == 0 and stride > 0 for stride in x.stride()[:3]]
    return x.stride(3) == 1 and all(strides) and x.data_ptr() % 16 == 0


def _descriptor(x: Tensor, rows: int) -> object:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[3]])
