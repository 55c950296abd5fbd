"""Forward passes: the stages of attention over lists of blocks, slice by slice."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from sparsify import settings
from sparsify.kernels import tuned
from sparsify.kernels.attend import large_hopper, shared_hopper
from sparsify.kernels.attend.combine import combine_clean_fwd_kernel, combine_fwd_kernel
from sparsify.kernels.attend.cutting import Chooser, Parts, Shape, Slice, chunk_of, slices
from sparsify.kernels.attend.kv_outer import (
    large_block_fwd_kernel,
    shared_block_fwd_kernel,
    small_block_fwd_kernel,
)
from sparsify.kernels.attend.q_outer import query_block_fwd_kernel, shared_query_fwd_kernel
from sparsify.kernels.attend.shared_hopper import Path, path
from sparsify.kernels.gpus import is_bulk
from sparsify.kernels.placement import Placement
from sparsify.kernels.select.index import reverse_index
from sparsify.kernels.tiling import MOST_PROGRAMS, padded, span

__all__ = [
    "Chooser",
    "Parts",
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

LOG2E = 1.4426950408889634
# At most this many queries go query by query.
FEW_QUERIES = 32
_SPLIT = 4  # own blocks of more tiles than this have a loop for those that are seen whole
_HEADS = 16  # heads of a tile of one query; tensor cores take no fewer rows
_MARKS = 256  # tiles that one program of the second combine looks at


def shape_of(
    q: Tensor, k: Tensor, v: Tensor, block: int, scale: float | None, share: int = 1
) -> Shape:
    """The shape of a call; `share` query heads have one list of blocks."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sizes = tuned.Sizes(block, q.shape[-1], v.shape[-1], q.element_size(), share)
    tiles = tuned.attention_tiles(q.device, sizes)
    heads, exact = q.shape[1], q.dtype == torch.float32
    return Shape(heads, heads // k.shape[1], *sizes[:3], scale * LOG2E, tiles, exact, share)


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
    for head in range(0, lists, MOST_PROGRAMS):
        part = Slice(head, min(MOST_PROGRAMS, lists - head), 0, q.shape[2])
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
    force: Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the chosen past blocks and the own block; with `force` by that kernel instead
    of what `path` says."""
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


def entries_per_item(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    placement: Placement,
    shape: Shape,
    queries: int,
    force: Path | None = None,
) -> int:
    """Entries of a work item of the kernel that will run a slice of `queries`."""
    if force != "triton" and large_hopper.fits(q, k, v, placement, shape):
        return large_hopper.ROWS
    return chunk_of(shape.tiles, queries)


def by_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    idx: Tensor,
    placement: Placement,
    shape: Shape,
    part: Slice,
    chosen: int,
    force: Path | None = None,
) -> Parts:
    """Partial outputs of a slice.

    Args:
        force: "triton" for the plain kernels; "gluon" for one of Hopper's or an error.

    Raises:
        ValueError: no kernel of Hopper's can do the call that is forced on it.
    """
    tiles = shape.tiles
    chunk = entries_per_item(q, k, v, placement, shape, part.queries, force)
    index = reverse_index(idx, placement.blocks, chunk)
    # After the index, whose scratch memory it takes over.
    parts = _parts(q, v, idx, chosen, shape.share)
    if force != "triton" and large_hopper.fits(q, k, v, placement, shape):
        fixed = (placement, shape, part, chosen, idx.shape[2])
        large_hopper.large_block(q, k, v, index, parts, *fixed)
        return parts
    if force != "triton" and path(q, k, v, placement, shape) == "gluon":
        fixed = (placement, shape, part, chosen, idx.shape[2])
        shared_hopper.shared_block(q, k, v, index, parts, *fixed)
        return parts
    if force == "gluon":
        raise ValueError("no Gluon kernel fits this call.")
    options: dict[str, object] = {"num_warps": tiles.warps}
    keys: object = k
    values: object = v
    if tiles.small and shape.share == 1:
        kernel = small_block_fwd_kernel
    elif tiles.small:
        kernel = shared_block_fwd_kernel
        options |= {"STAGES": tiles.stages} | shape.sharing()
    else:
        kernel = large_block_fwd_kernel
        options |= shape.sharing()
        by_tma = _fits_tma(k, v, placement, shape)
        options |= {"BY_TMA": by_tma, "STAGES": tiles.stages}
        if tiles.max_registers and by_tma:
            options["maxnreg"] = tiles.max_registers
        if by_tma:
            keys, values = _descriptor(k, tiles.columns), _descriptor(v, tiles.columns)
    kernel[(index.bound, shape.head_slices)](
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
    parts = _parts(q, v, idx, chosen, shape.share)
    kernel, rows = query_block_fwd_kernel, part.heads
    options: dict[str, object] = {}
    if shape.share > 1:
        kernel, rows = shared_query_fwd_kernel, part.heads * triton.cdiv(shape.share, _HEADS)
        options = {"SHARE": shape.share, "M": _HEADS, "EXACT_DOT": shape.exact}
    kernel[(part.queries * chosen, rows)](
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
    tiles = shape.tiles
    queries = tiles.combine_rows // span(shape.share)
    grid = (triton.cdiv(part.queries, queries), part.heads * shape.head_slices)
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
    constants = {
        **shape.sizes(),
        **shape.sharing(),
        "BLOCK": shape.block,
        "WIDTH": 1 if idx is None else idx.shape[2],
        "CHOSEN": chosen if parts is not None else 0,
        "M": tiles.combine_rows,
        "TILE_N": tiles.combine_columns,
        "STAGES": tiles.combine_stages,
        "MERGE_STAGES": tiles.merge_stages,
        "PLAIN": placement.plain,
        "MASKED": placement.key_mask is not None,
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
    if k.device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(k.device)[0] < 9:
        return False
    if not placement.plain or shape.block % shape.tiles.columns:
        return False
    sizes_fit = (
        padded(shape.head_dim) == shape.head_dim and padded(shape.value_dim) == shape.value_dim
    )
    return sizes_fit and all(map(is_bulk, (k, v)))


def _descriptor(x: Tensor, rows: int) -> object:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, x.shape[3]])
