"""What the decode kernels of a call share: its sizes, tiles, and how its lists are cut.

Legend: B batch, H query heads, G key/value heads, T queries, D key size, V value size, I index
size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsify.kernels import tiling
from sparsify.kernels.gpus import is_hopper_or_newer, processors
from sparsify.kernels.layout import Layout, block_count, key_slots
from sparsify.kernels.select.msa_tiles import padded_size, terms_of
from sparsify.kernels.tiling import padded

__all__ = [
    "CHUNK",
    "MOST_PLACES",
    "Call",
    "Tiles",
    "call_of",
    "index_width",
    "is_exact",
    "readable",
    "row_strides",
    "starts",
    "terms_of",
    "tiles_of",
]

CHUNK = 512  # blocks that one program ranks at once, at most
LEAST_CHUNK = 128
LEAST_RANKED, MOST_RANKED = 128, 2048  # blocks of a row that every program of a place ranks
MOST_PLACES = 256
_FULL = 0.85  # share of the last wave of programs that should be busy
_WAVES = 6  # of which the last one matters little
_MOST_PART_BYTES = 256 << 20  # of partial results
_BUFFER_BYTES = 64 << 10  # of keys and values of a program; a multiprocessor has two of them


@dataclass(frozen=True, slots=True)
class Tiles:
    """Sizes of the tiles. Those of the attention decide how a row rounds, so they depend on
    nothing but its own shape; stages do not."""

    score_rows: int
    score_columns: int
    score_stages: int
    score_warps: int
    columns: int
    stages: int


@dataclass(frozen=True, slots=True)
class Call:
    """What all kernels of a call share.

    `chosen` blocks are taken by score, of `blocks`; `every` one of them without a look at a score.
    """

    batch: int
    queries: int
    heads: int
    groups: int
    block: int
    slots: int
    blocks: int
    chosen: int
    length: int
    every: bool
    union: bool
    tiles: Tiles
    pdl: bool
    sm_count: int
    part_bytes: int

    @property
    def lists(self) -> int:
        """One for each query of a key/value head."""
        return self.batch * self.queries * self.groups

    @property
    def one_program(self) -> bool:
        """Whether a program walks over a whole list: when there are enough lists."""
        waves = self.lists / self.sm_count
        if self.lists * (self.chosen + 1) * self.part_bytes > _MOST_PART_BYTES or waves >= _WAVES:
            return True
        return waves >= _FULL * block_count(self.lists, self.sm_count)

    @property
    def chunk(self) -> int:
        """Blocks that one program ranks at once where a row has several segments."""
        return max(min(padded(self.blocks) // 8, CHUNK), LEAST_CHUNK, self.length)

    @property
    def per_place(self) -> int:
        """Multiprocessors for each place where every place gets a program; 0 if fewer than one."""
        return 0 if self.one_program else self.sm_count // (self.lists * (self.chosen + 1))

    @property
    def ranked(self) -> int:
        """Numbers among which every program of a place finds that place; 0 where a kernel before
        it ranks the row, or none has to."""
        if self.every:
            return 0
        numbers = max(padded(self.blocks), LEAST_RANKED, self.length)
        return numbers if self.per_place and numbers <= MOST_RANKED else 0

    @property
    def segments(self) -> int:
        """Programs that rank one row."""
        if self.one_program or self.length > CHUNK // 2:
            return 1
        return min(padded(block_count(self.blocks, self.chunk), 1), CHUNK // self.length)


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    iq: Tensor,
    ik: Tensor,
    layout: Layout,
    block_size: int,
    topk: int,
    local: str,
) -> Call:
    """Sizes of a call; those of the keys are of their axes, whatever lengths on the device say."""
    slots = key_slots(k, layout)
    blocks = block_count(slots, block_size)
    chosen = topk if local == "union" else topk - 1
    if chosen > blocks:  # not the number itself: each is a kernel of its own
        chosen = min(chosen, padded(max(blocks, 1), 1))
    shared = tiling.shared_bytes(q.device)
    return Call(
        batch=q.shape[0],
        queries=q.shape[2],
        heads=q.shape[1],
        groups=iq.shape[1],
        block=block_size,
        slots=slots,
        blocks=blocks,
        chosen=chosen,
        length=padded(max(chosen, 1), 4),
        every=chosen == 0 or chosen >= blocks,
        union=local == "union",
        tiles=tiles_of(q, v, iq, ik, block_size, shared),
        pdl=is_hopper_or_newer(q.device),
        sm_count=processors(q.device),
        part_bytes=4 * v.shape[3] * q.shape[1] // iq.shape[1],
    )


def tiles_of(q: Tensor, v: Tensor, iq: Tensor, ik: Tensor, block: int, shared_bytes: int) -> Tiles:
    """Tiles that fit `shared_bytes` of shared memory."""
    shared_bytes -= 4 << 10
    exact = is_exact(iq, ik)
    in_terms = terms_of(iq, ik) > 1
    item = 4 if exact else ik.element_size() if in_terms else max(iq.itemsize, ik.itemsize)
    key = index_width(iq, ik) * item
    rows = iq.shape[2] * (iq.shape[1] if ik.shape[1] == 1 else 1)
    # More than 32 rows of float8 would go to products that do not sum in float32.
    rows = min(padded(rows), 16 if exact else 32 if item == 1 or in_terms else 64)
    columns = 16 if exact else 128 if index_width(iq, ik) <= 128 else 64
    stages = 5 if item == 1 else 3
    while stages > 1 and stages * columns * key + rows * key > shared_bytes:
        stages -= 1
    pair = (padded(q.shape[3]) + padded(v.shape[3])) * q.element_size()
    widest = padded(max(q.shape[3], v.shape[3]))
    width = (128 if widest <= 128 else 64) >> (2 if q.element_size() > 2 else 0)
    width = min(width, padded(block))
    while width > 16 and (width + 16) * pair > shared_bytes:
        width //= 2
    buffers = 2  # as many as stages but one
    while buffers > 1 and (
        buffers * width * pair > _BUFFER_BYTES or (buffers * width + 16) * pair > shared_bytes
    ):
        buffers -= 1
    return Tiles(rows, columns, stages, 8 if exact else 4, width, buffers + 1)


def index_width(iq: Tensor, ik: Tensor) -> int:
    """Size of an index query in a tile; of two dtypes the wider one is multiplied."""
    return padded_size(iq.shape[3], max(iq.itemsize, ik.itemsize))


def is_exact(iq: Tensor, ik: Tensor) -> bool:
    """Whether scores are products of float32: for keys of float32, and for keys of 8 bits whose
    queries have 32."""
    return ik.dtype == torch.float32 or (iq.dtype == torch.float32 and terms_of(iq, ik) == 1)


def readable(layout: Layout) -> Layout:
    """Vectors and rows that kernels can read, and the origin that a mask implies."""
    origin, mask, table = layout.block_origin, layout.key_mask, layout.page_table
    if mask is not None and mask.shape[1]:
        mask = mask if mask.stride(1) == 1 else mask.contiguous()
        if origin is None:
            origin = (mask.cumsum(1, dtype=torch.int32) == 0).sum(1, dtype=torch.int32)
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    return Layout(
        q_start=None if layout.q_start is None else layout.q_start.contiguous(),
        kv_len=None if layout.kv_len is None else layout.kv_len.contiguous(),
        key_mask=mask,
        block_origin=None if origin is None else origin.contiguous(),
        page_table=table,
    )


def row_strides(layout: Layout) -> tuple[int, int]:
    """From one row of the batch to the next, in the mask and in the table of pages."""
    mask, table = layout.key_mask, layout.page_table
    return 0 if mask is None else mask.stride(0), 0 if table is None else table.stride(0)


def starts(call: Call, *, first: bool = False, warps: int = 4) -> dict[str, object]:
    """Options of a launch; all but the first kernel may start before their input is there."""
    options: dict[str, object] = {"PDL": call.pdl, "num_warps": warps}
    if call.pdl and not first:
        options["launch_pdl"] = True
    return options
