"""Forward passes: the stages of attention over lists of blocks, slice by slice.

Past blocks are attended block by block (`by_block`: the queries of each by the reverse index, in
the kernel that `path` names) or, with few queries, query by query (`by_query`); `combine` adds each
query's own block and merges. Where top-k covers every block, `combine` alone does it (`dense`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
from torch import Tensor

from sparsify import settings
from sparsify.kernels import tuned
from sparsify.kernels.attend import large_hopper, shared_hopper
from sparsify.kernels.attend.combine import combine_clean_fwd_kernel, combine_fwd_kernel
from sparsify.kernels.attend.cutting import (
    Chooser,
    Parts,
    Shape,
    Slice,
    chunk_of,
    scale_log2,
    slices,
)
from sparsify.kernels.attend.kv_outer import (
    large_block_fwd_kernel,
    shared_block_fwd_kernel,
    small_block_fwd_kernel,
)
from sparsify.kernels.attend.q_outer import query_block_fwd_kernel, shared_query_fwd_kernel
from sparsify.kernels.gpus import is_bulk, is_hopper_or_newer
from sparsify.kernels.placement import Placement
from sparsify.kernels.select import descriptors
from sparsify.kernels.select.reverse_index import ReverseIndex, reverse_index
from sparsify.kernels.tiling import MOST_PROGRAMS, AttentionTiles, padded, span

__all__ = [
    "Chooser",
    "Forced",
    "Parts",
    "Path",
    "Shape",
    "Slice",
    "by_block",
    "by_query",
    "combine",
    "dense",
    "entries_per_item",
    "outputs",
    "path",
    "shape_of",
    "slices",
    "sparse",
]

Path = Literal["large gluon", "shared gluon", "triton"]
Forced = Literal["gluon", "triton"]

# At most this many queries go query by query.
FEW_QUERIES = 32
_SPLIT = 4  # own blocks of more tiles than this have a loop for those that are seen whole
_HEADS = 16  # heads of a tile of one query; tensor cores take no fewer rows
_MARKS = 256  # tiles that one program of the second combine looks at


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, block: int, scale: float | None, share: int = 1
) -> Shape:
    """The shape of a call; `share` query heads have one list of blocks."""
    sizes = tuned.Sizes(block, q.shape[-1], v.shape[-1], q.element_size(), share)
    tiles = tuned.attention_tiles(q.device, sizes)
    heads, exact = q.shape[1], q.dtype == torch.float32
    return Shape(heads, heads // k.shape[1], *sizes[:3], scale_log2(q, scale), tiles, exact, share)


def dense(
    q: Tensor, k: Tensor, v: Tensor, placement: Placement, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Causal attention over all keys of each sequence, head by head."""
    assert shape.share == 1
    out, lse = outputs(q, v)
    if not placement.plain:
        placement = _whole_sequences(placement)
    whole = shape._replace(block=padded(max(k.shape[2], 1)))
    if not out.numel() or not k.shape[2]:
        out.zero_(), lse.fill_(float("-inf"))
        return out, lse
    lists = q.shape[0] * q.shape[1]
    for first in range(0, lists, MOST_PROGRAMS):
        part = Slice(first, min(MOST_PROGRAMS, lists - first), 0, q.shape[2])
        combine(q, k, v, None, None, None, out, lse, placement, whole, part)
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
    force: Forced | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the chosen past blocks and the own block; `force` as in `by_block`."""
    out, lse = outputs(q, v)
    if not out.numel() or not k.shape[2]:
        out.zero_(), lse.fill_(float("-inf"))
        return out, lse
    if settings.autotune():
        from sparsify.kernels.attend.tuning import in_request

        results = (out, lse)
        shape = in_request(q, k, v, placement, shape, chooser, workspace_bytes, results)
    for part in slices(q, v, chooser, workspace_bytes, shape.share):
        idx, own = chooser.rows(*part)
        parts = None
        # A query behind all keys has a past block even if there is only one.
        if chooser.chosen and placement.blocks > int(placement.plain):
            # Not by the slice: a row must not depend on how the work is cut.
            fixed = (q, k, v, idx, placement, shape, part, chooser.chosen)
            few = q.shape[2] <= FEW_QUERIES
            parts = by_query(*fixed) if few else by_block(*fixed, force)
        combine(q, k, v, idx, own, parts, out, lse, placement, shape, part, chooser.chosen)
    return out, lse


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _parts(q: Tensor, v: Tensor, idx: Tensor, chosen: int, share: int) -> Parts:
    lists, count, width = idx.shape
    stats = q.new_empty(lists, count, width, 2, share, dtype=torch.float32)
    return Parts(q.new_empty(lists, count, chosen, share, v.shape[-1]), stats)


def path(q: Tensor, k: Tensor, v: Tensor, placement: Placement, shape: Shape) -> Path:
    """Which kernel attends past blocks block by block: one of the two for Hopper where its tiles
    fit, the plain one elsewhere."""
    if large_hopper.fits(q, k, v, placement, shape):
        return "large gluon"
    return "shared gluon" if shared_hopper.fits(q, k, v, placement, shape) else "triton"


def entries_per_item(
    q: Tensor, k: Tensor, v: Tensor, placement: Placement, shape: Shape, queries: int
) -> int:
    """Entries of a work item of the kernel that will run a slice of `queries`."""
    return _entries(path(q, k, v, placement, shape), shape.tiles, queries)


def _entries(chosen: Path, tiles: AttentionTiles, queries: int) -> int:
    return large_hopper.ROWS if chosen == "large gluon" else chunk_of(tiles, queries)


def by_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    placement: Placement,
    shape: Shape,
    part: Slice,
    chosen: int,
    force: Forced | None = None,
) -> Parts:
    """Partial outputs of a slice.

    Args:
        force: "triton" for the plain kernels; "gluon" for one of Hopper's or an error.

    Raises:
        ValueError: no kernel of Hopper's can do the call that is forced on it.
    """
    way = "triton" if force == "triton" else path(q, k, v, placement, shape)
    if force == "gluon" and way == "triton":
        raise ValueError("no Gluon kernel fits this call.")
    index = reverse_index(idx, placement.blocks, _entries(way, shape.tiles, part.queries))
    # After the index, whose scratch memory it takes over.
    parts = _parts(q, v, idx, chosen, shape.share)
    fixed = (placement, shape, part, chosen, idx.shape[2])
    if way == "large gluon":
        large_hopper.large_block(q, k, v, index, parts, *fixed)
    elif way == "shared gluon":
        shared_hopper.shared_block(q, k, v, index, parts, *fixed)
    else:
        _plain(q, k, v, index, parts, *fixed)
    return parts


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    index: ReverseIndex,
    parts: Parts,
    placement: Placement,
    shape: Shape,
    part: Slice,
    chosen: int,
    width: int,
) -> None:
    kernel, keys, values, options = _plain_kernel(k, v, placement, shape)
    lists = (index.entries, index.work, index.items)
    kernel[(index.bound, shape.head_slices)](
        *(q, keys, values, *lists, *parts, *_blocks(q, k, v, placement, shape, part)),
        **_constants(placement, shape, chosen, width),
        M=shape.tiles.rows,
        TILE_N=shape.tiles.columns,
        EXACT_DOT=shape.exact,
        **options,
    )


def _plain_kernel(
    k: Tensor, v: Tensor, placement: Placement, shape: Shape
) -> tuple[Any, object, object, dict[str, object]]:
    """The kernel, keys and values as it fetches them, and its own options."""
    tiles = shape.tiles
    if tiles.small and shape.share == 1:
        return small_block_fwd_kernel, k, v, {"num_warps": tiles.warps}
    options = {"num_warps": tiles.warps, "STAGES": tiles.stages} | shape.sharing()
    if tiles.small:
        return shared_block_fwd_kernel, k, v, options
    by_tma = _fits_tma(k, v, placement, shape)
    options["BY_TMA"] = by_tma
    if not by_tma:
        return large_block_fwd_kernel, k, v, options
    if tiles.max_registers:
        options["maxnreg"] = tiles.max_registers
    rows = tiles.columns
    return large_block_fwd_kernel, descriptors.tiles(k, rows), descriptors.tiles(v, rows), options


def _blocks(
    q: Tensor, k: Tensor, v: Tensor, placement: Placement, shape: Shape, part: Slice
) -> tuple[object, ...]:
    """What kernels of past blocks are told of blocks, strides and the slice, in their order."""
    return (
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
        part.first_list,
    )


def _constants(placement: Placement, shape: Shape, chosen: int, width: int) -> dict[str, object]:
    """Constants of all kernels."""
    return shape.sizes() | {
        "BLOCK": shape.block,
        "WIDTH": width,
        "CHOSEN": chosen,
        "PLAIN": placement.plain,
        "MASKED": placement.key_mask is not None,
    }


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
    """Partial outputs of a slice, by a program for each query and block."""
    parts = _parts(q, v, idx, chosen, shape.share)
    kernel, rows = query_block_fwd_kernel, part.lists
    options: dict[str, object] = {}
    if shape.share > 1:
        kernel, rows = shared_query_fwd_kernel, part.lists * triton.cdiv(shape.share, _HEADS)
        options = {"SHARE": shape.share, "M": _HEADS, "EXACT_DOT": shape.exact}
    kernel[(part.queries * chosen, rows)](
        *(q, k, v, idx, *parts, *_blocks(q, k, v, placement, shape, part)),
        **_constants(placement, shape, chosen, idx.shape[2]),
        TILE_N=min(64, padded(shape.block)),
        STAGES=2,
        num_warps=4,
        **options,
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
    """Fill the slice's rows of `out` and `lse`: past blocks from `parts`, if any, and own ones."""
    tiles = shape.tiles
    queries = tiles.combine_rows // span(shape.share)
    grid = (triton.cdiv(part.queries, queries), part.lists * shape.head_slices)
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
        part.first_list,
    )
    constants = {
        **_constants(placement, shape, chosen if parts else 0, 1 if idx is None else idx.shape[2]),
        **shape.sharing(),
        "M": tiles.combine_rows,
        "TILE_N": tiles.combine_columns,
        "STAGES": tiles.combine_stages,
        "MERGE_STAGES": tiles.merge_stages,
        "OWN_LISTED": own is not None,
        "EXACT_DOT": shape.exact,
        "num_warps": tiles.combine_warps,
    }
    split = shape.block > _SPLIT * tiles.combine_columns
    combine_fwd_kernel[grid](*arguments, **constants, SPLIT=split)
    marks = (triton.cdiv(grid[0], _MARKS), grid[1])
    combine_clean_fwd_kernel[marks](*arguments, **constants, FLAGS=_MARKS)


def _fits_tma(k: Tensor, v: Tensor, placement: Placement, shape: Shape) -> bool:
    """Whether keys and values can be fetched by the tensor memory accelerator: sm_90 or newer,
    aligned strides, nothing to mask inside a block."""
    if not is_hopper_or_newer(k.device) or not placement.plain or shape.block % shape.tiles.columns:
        return False
    sizes_fit = (
        padded(shape.head_dim) == shape.head_dim and padded(shape.value_dim) == shape.value_dim
    )
    return sizes_fit and all(map(is_bulk, (k, v)))
