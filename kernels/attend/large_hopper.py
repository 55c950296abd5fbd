"""Large blocks on Hopper: whether the warp-specialised kernel can do a call, and its launch.

It takes the work items of the reverse index, cut into `ROWS` entries, and fills the same parts as
`kv_outer.large_block_fwd_kernel`. Gluon, which it is written in, is marked experimental by Triton:
where its names are others, the kernel is not to be had and the plain one does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsify.kernels.gpus import gluon, is_bulk, is_hopper, processors
from sparsify.kernels.placement import Placement
from sparsify.kernels.select.descriptors import swizzled
from sparsify.kernels.select.reverse_index import ReverseIndex

if TYPE_CHECKING:
    from sparsify.kernels.attend.cutting import Parts, Shape, Slice

__all__ = ["ROWS", "fits", "large_block"]

ROWS = 128  # entries of a work item: 64 for each of two groups of warps
_COLUMNS = 128  # keys of a tile
_STAGES = {64: 4, 128: 2}  # tiles of keys, and of values, that fit shared memory by head size
_DTYPES = (torch.bfloat16, torch.float16)
_BY_TURNS = True  # the two groups issue their products one after the other


def fits(q: Tensor, k: Tensor, v: Tensor, placement: Placement, shape: Shape) -> bool:
    """Whether the kernel can do a call: sm_90, two-byte elements, heads of 64 or 128, lists of one
    head each, blocks of whole tiles, nothing to mask, and rows that can be fetched in bulk."""
    if k.device.type != "cuda" or torch.version.hip is not None:
        return False
    if not is_hopper(k.device) or not _takes(q, shape):
        return False
    if not placement.plain or placement.key_mask is not None:
        return False
    return _is_gathered(q) and all(map(is_bulk, (k, v))) and _kernel() is not None


def _takes(q: Tensor, shape: Shape) -> bool:
    if q.dtype not in _DTYPES or shape.share != 1:
        return False
    if shape.head_dim not in _STAGES or shape.value_dim != shape.head_dim:
        return False
    return shape.block % _COLUMNS == 0 and shape.block >= 2 * _COLUMNS


def _is_gathered(q: Tensor) -> bool:
    """Whether copies of 16 bytes fetch the rows: strides that 16 elements divide, as the compiler
    looks for it."""
    strides = [stride % 16 == 0 for stride in q.stride()[:3]]
    return q.stride(3) == 1 and all(strides) and q.data_ptr() % 16 == 0


def _kernel() -> Any:
    """The kernel, or None where Gluon is not as it was."""
    module = gluon("sparsify.kernels.attend.large_hopper_kernel")
    return None if module is None else module.large_block_hopper_fwd_kernel


def large_block(
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
    """Fill the parts of a slice; only where `fits`, and with an index cut into `ROWS` entries."""
    box = [1, 1, _COLUMNS, shape.head_dim]
    _kernel()[(min(index.bound, processors(q.device)),)](
        q,
        swizzled(k, box),
        swizzled(v, box),
        index.entries,
        index.work,
        index.items,
        *parts,
        *q.stride()[:3],
        shape.scale_log2,
        shape.block,
        placement.blocks,
        part.first,
        part.queries,
        part.first_list,
        shape.heads,
        shape.group,
        WIDTH=width,
        CHOSEN=chosen,
        D=shape.head_dim,
        TILE_N=_COLUMNS,
        STAGES=_STAGES[shape.head_dim],
        BY_TURNS=_BY_TURNS,
        num_warps=4,
    )
