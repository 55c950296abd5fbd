"""Tile shapes of the kernels, by the shape of the problem and the GPU's shared memory.

Those of head size 128 in two-byte elements were measured on an H200; other sizes follow from what
fits registers and shared memory, and were not tuned.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

__all__ = [
    "MOST_PROGRAMS",
    "AttentionTiles",
    "GateTiles",
    "attention_tiles",
    "gate_tiles",
    "padded",
    "shared_bytes",
    "span",
]

SMALL_BLOCK = 128
HOPPER_SHARED = 227 << 10
MOST_PROGRAMS = 65_535  # along the second and the third axis of a grid, on an NVIDIA GPU


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds `size`, at least `least` (tensor cores take no less)."""
    return max(least, 1 << (size - 1).bit_length())


def span(share: int) -> int:
    """Query heads of one list that a tile takes together, of the `share` that have it."""
    return min(padded(share, 1), 16)


@dataclass(frozen=True, slots=True)
class GateTiles:
    """Tiles of the gate.

    `width` is the number of places that a list of blocks takes, `exact_length` the length of the
    lists of the exact kernel.
    """

    packed: bool
    rows: int
    width: int
    warps: int
    stages: int
    max_registers: int | None
    exact_rows: int
    exact_columns: int
    exact_length: int
    exact_warps: int


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Tiles of KV-outer attention and of the combine kernel.

    `rows` are entries times the heads that share a list; `chunk` are the entries of a work item.
    `stages` is the depth of the loop over keys, in the small kernel of shared lists that over
    entries; `merge_stages` that of the loop over partial outputs.
    """

    small: bool
    rows: int
    columns: int
    warps: int
    stages: int
    chunk: int
    max_registers: int | None
    combine_rows: int
    combine_columns: int
    combine_warps: int
    combine_stages: int
    merge_stages: int


def gate_tiles(chosen: int, blocks: int, head_dim: int, item_size: int) -> GateTiles:
    """Tiles for lists of `chosen` past blocks out of `blocks`."""
    packed = chosen <= 7 and blocks > 32
    exact_length = padded(chosen, 4)
    columns = max(32, exact_length)
    rows = 64
    if not packed:
        columns = max(columns, min(padded(blocks, 32), 128 if head_dim <= 128 else 64))
    if packed:
        rows = 16  # few rows are left to it, so there should be many programs
    elif exact_length > 16 or item_size > 2:
        rows = 32 if exact_length <= 64 else 16
    return GateTiles(
        packed=packed,
        rows=64,
        width=padded(chosen, 2),
        warps=4,
        stages=2,
        max_registers=None,
        exact_rows=rows,
        exact_columns=columns,
        exact_length=exact_length,
        exact_warps=1 if packed else 8 if columns >= 128 else 4,
    )


def attention_tiles(
    block: int,
    head_dim: int,
    value_dim: int,
    item_size: int,
    shared_bytes: int = HOPPER_SHARED,
    share: int = 1,
) -> AttentionTiles:
    """Tiles for blocks of `block` keys that fit `shared_bytes` of shared memory, with `share` query
    heads to a list."""
    row = (padded(head_dim) + padded(value_dim)) * item_size  # a key and a value
    query = padded(head_dim) * item_size
    small = item_size <= 2 and block <= SMALL_BLOCK and row <= 512
    small = small and padded(block) * row + 64 * query <= shared_bytes
    tiles = _by_shape(block, padded(max(head_dim, value_dim)), item_size, small)
    kept, step = tiles.rows * query, tiles.columns * row
    if share > 1 and small:
        tiles, (kept, step) = replace(tiles, stages=3, chunk=128), (step, kept)
    elif share > 1:
        tiles = replace(tiles, chunk=tiles.rows // span(share))
    stages, combine = tiles.stages, tiles.combine_stages
    while stages > 1 and kept + stages * step > shared_bytes:
        stages -= 1
    rows = tiles.combine_rows * query
    while combine > 1 and rows + combine * tiles.combine_columns * row > shared_bytes:
        combine -= 1
    merge = min(combine, tiles.merge_stages)
    return replace(tiles, stages=stages, combine_stages=combine, merge_stages=merge)


def _by_shape(block: int, widest: int, item_size: int, small: bool) -> AttentionTiles:
    if item_size > 2:
        return AttentionTiles(False, 32, 32, 4, 1, 32, None, 32, 32, 4, 1, 1)
    if widest > 128:
        return AttentionTiles(False, 64, 32, 4, 2, 64, None, 64, 32, 8, 2, 2)
    if small:
        return AttentionTiles(True, 64, padded(block), 4, 1, 1024, None, 64, 64, 4, 3, 3)
    if block < 1024:
        return AttentionTiles(False, 64, 64, 4, 3, 64, None, 64, 64, 4, 3, 3)
    return AttentionTiles(False, 128, 64, 8, 2, 128, 128, 64, 64, 4, 3, 3)


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a thread block may take on `device`; Hopper's where there is no GPU."""
    if device.type != "cuda":
        return HOPPER_SHARED
    found = torch.cuda.get_device_properties(device)
    # The name that torch has for it on CUDA; on HIP a workgroup has 64 KiB.
    return int(getattr(found, "shared_memory_per_block_optin", 64 << 10))
