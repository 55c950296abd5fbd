"""Blocks that 16 heads share on Hopper: whether the warp-specialised kernel can do a call, and its
launch.

It takes the work items of the reverse index and fills the same parts as
`kv_outer.shared_block_fwd_kernel`. Gluon, which it is written in, is marked experimental by Triton:
where its names are others, the kernel is not to be had and the plain one does the work.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsify.kernels.attend.cutting import Parts, Shape, Slice
from sparsify.kernels.gpus import gluon, is_bulk, is_hopper, processors
from sparsify.kernels.placement import Placement
from sparsify.kernels.select.descriptors import swizzled
from sparsify.kernels.select.reverse_index import ReverseIndex

__all__ = ["fits", "shared_block"]

_DTYPES = (torch.bfloat16, torch.float16)
_SHAPE = (16, 128, 128, 128)  # heads to a list, keys of a block, key and value size
_HALF = 64


def fits(q: Tensor, k: Tensor, v: Tensor, placement: Placement, shape: Shape) -> bool:
    """Whether the kernel can do a call: sm_90, two-byte elements, 16 heads to a list, blocks and
    heads of 128, nothing to mask, and rows that can be fetched in bulk."""
    if not is_hopper(k.device) or not _takes(q, shape):
        return False
    if not placement.plain or placement.key_mask is not None:
        return False
    return all(map(is_bulk, (q, k, v))) and _kernel() is not None


def _takes(q: Tensor, shape: Shape) -> bool:
    sizes = (shape.share, shape.block, shape.head_dim, shape.value_dim)
    return q.dtype in _DTYPES and sizes == _SHAPE and shape.group == shape.share


def _kernel() -> Any:
    """The kernel, or None where Gluon is not as it was."""
    module = gluon("sparsify.kernels.attend.shared_hopper_kernel")
    return None if module is None else module.shared_block_hopper_fwd_kernel


def shared_block(
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
    """Fill the parts of a slice; only where `fits`."""
    rows = parts.out.view(-1, shape.value_dim)
    _kernel()[(min(index.bound, processors(q.device)),)](
        swizzled(q.transpose(1, 2), [1, 1, shape.share, _HALF]),
        swizzled(k, [1, 1, shape.block, _HALF]),
        swizzled(v, [1, 1, shape.block, _HALF]),
        swizzled(rows, [shape.share, _HALF]),
        index.entries,
        index.work,
        index.items,
        parts.stats,
        shape.scale_log2,
        placement.blocks,
        part.first,
        part.queries,
        part.first_list,
        LISTS=shape.heads // shape.share,
        WIDTH=width,
        CHOSEN=chosen,
        num_warps=4,
    )
