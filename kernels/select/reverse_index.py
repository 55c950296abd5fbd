"""The reverse index of a slice: lists of queries per block, cut into work items."""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor

from sparsify.kernels.select.reverse_index_kernels import (
    count_entries_kernel,
    place_entries_kernel,
    plan_lists_kernel,
    scan_tiles_kernel,
    write_items_kernel,
)

__all__ = ["ReverseIndex", "reverse_index", "tile_queries"]

_MOST_ENTRIES = 4096  # entries that one program sorts
_COUNT_BYTES = 128 << 20  # counts of all tiles and blocks of a slice


class ReverseIndex(NamedTuple):
    """Entries by block, and the work items `[columns, begin, end, 0]` over them.

    `items` (one number, on the device) says how many work items there are, `bound` how many there
    can be.
    """

    entries: Tensor
    work: Tensor
    items: Tensor
    bound: int


def tile_queries(heads: int, count: int, blocks: int, width: int) -> int:
    """Queries of a tile: few, as long as the counts of all tiles stay small."""
    queries = max(16, min(64, _MOST_ENTRIES // width))
    while queries * width < _MOST_ENTRIES:
        counts = 4 * heads * triton.cdiv(count, queries) * blocks
        if counts <= _COUNT_BYTES:
            break
        queries *= 2
    return queries


def reverse_index(idx: Tensor, blocks: int, chunk: int) -> ReverseIndex:
    """Index `[heads, queries, W]` int32 lists of blocks in 0..blocks-1, -1 for none."""
    heads, count, width = idx.shape
    queries = tile_queries(heads, count, blocks, width)
    tiles, columns = triton.cdiv(count, queries), heads * blocks
    counts = idx.new_zeros(heads, tiles, blocks)
    total, offset, item = idx.new_empty(3, columns).unbind()
    entries = idx.new_empty(idx.numel())
    bound = triton.cdiv(idx.numel(), chunk) + min(columns, idx.numel())
    work, items = idx.new_empty(bound, 4), idx.new_empty(1)
    warps = 2 if queries * width <= 512 else 4
    tile = {"TILE": queries, "WIDTH": width, "num_warps": warps}
    count_entries_kernel[(tiles, heads)](idx, counts, count, blocks, **tile)
    scan_tiles_kernel[(triton.cdiv(blocks, 32), heads)](counts, total, tiles, blocks, C=32, Q=32)
    plan_lists_kernel[(1,)](
        total, offset, item, items, columns, CHUNK=chunk, TILE=1024, num_warps=8
    )
    place_entries_kernel[(tiles, heads)](idx, counts, offset, entries, count, blocks, **tile)
    longest = triton.cdiv(count * min(width, blocks), chunk)  # items of a list, at most
    write_items_kernel[(triton.cdiv(columns, 128), min(longest, 32))](
        total, offset, item, work, columns, CHUNK=chunk, TILE=128
    )
    return ReverseIndex(entries, work, items, bound)
