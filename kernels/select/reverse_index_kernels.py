"""From the blocks of each query to the queries of each block, on the device and in a fixed order.

The entries of a slice (its heads, its queries, `WIDTH` places each) are counted per tile of queries
and block, a scan turns the counts into places, and each tile sorts its own entries by block, so a
list holds its entries in order of the queries whatever the hardware does first. A list is then cut
into work items of `CHUNK` entries, so that a block that every query chose becomes many items.

An entry is its place in the slice's head: query * WIDTH + place. Sizes are bounds known to the
host; nothing is read back.

Legend: E entries of a tile, C block columns of a tile, Q query tiles.
"""

import triton
import triton.language as tl

__all__ = [
    "count_entries_kernel",
    "place_entries_kernel",
    "plan_lists_kernel",
    "scan_tiles_kernel",
    "write_items_kernel",
]


@triton.jit
def _entries(idx_ptr, tile, head, t_count, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """Numbers of the entries of a tile, their blocks, and which are there."""
    local_E = tl.arange(0, TILE * WIDTH)
    entry_E = tile * TILE * WIDTH + local_E
    inside_E = entry_E < t_count * WIDTH
    block_E = tl.load(idx_ptr + head * t_count * WIDTH + entry_E, mask=inside_E, other=-1)
    return entry_E, block_E, block_E >= 0


@triton.jit
def count_entries_kernel(
    idx_ptr, counts_ptr, t_count, N, TILE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """How many entries of a tile name each block; `counts` `[heads, Q, N]` must be zero."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, block_E, valid_E = _entries(idx_ptr, tile, head, t_count, TILE, WIDTH)
    row = (head * tl.num_programs(0) + tile) * N
    tl.atomic_add(counts_ptr + row + block_E, 1, mask=valid_E, sem="relaxed")


@triton.jit
def scan_tiles_kernel(
    counts_ptr, total_ptr, tiles, N, C: tl.constexpr, Q: tl.constexpr
):  # fmt: skip
    """Counts of the earlier tiles in the place of each count, and the total of each block."""
    c_C, head = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1).to(tl.int64)
    q_Q = tl.arange(0, Q)
    run_C = tl.zeros([C], tl.int32)
    for begin in tl.range(0, tiles, Q, num_stages=3):
        inside = ((begin + q_Q) < tiles)[:, None] & (c_C < N)[None, :]
        at = counts_ptr + (head * tiles + begin + q_Q)[:, None] * N + c_C[None, :]
        x_QC = tl.load(at, mask=inside, other=0)
        tl.store(at, tl.cumsum(x_QC, 0) - x_QC + run_C[None, :], mask=inside)
        run_C += tl.sum(x_QC, 0)
    tl.store(total_ptr + head * N + c_C, run_C, mask=c_C < N)


@triton.jit
def plan_lists_kernel(
    total_ptr, offset_ptr, item_ptr, items_ptr, columns, CHUNK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """One program: where each list begins, where its work items begin, and how many there are."""
    c_T = tl.arange(0, TILE)
    entries = tl.zeros([1], tl.int32)
    items = tl.zeros([1], tl.int32)
    for begin in tl.range(0, columns, TILE, num_stages=3):
        inside = begin + c_T < columns
        total_T = tl.load(total_ptr + begin + c_T, mask=inside, other=0)
        chunks_T = (total_T + CHUNK - 1) // CHUNK
        tl.store(offset_ptr + begin + c_T, tl.cumsum(total_T, 0) - total_T + entries, mask=inside)
        tl.store(item_ptr + begin + c_T, tl.cumsum(chunks_T, 0) - chunks_T + items, mask=inside)
        entries += tl.sum(total_T, 0)
        items += tl.sum(chunks_T, 0)
    tl.store(items_ptr + tl.arange(0, 1), items)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def place_entries_kernel(
    idx_ptr, before_ptr, offset_ptr, list_ptr, t_count, N, TILE: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write the entries of a tile into their lists, in order of block and query."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    size: tl.constexpr = TILE * WIDTH
    none: tl.constexpr = 0x7FFFFFFF
    _, block_E, valid_E = _entries(idx_ptr, tile, head, t_count, TILE, WIDTH)
    local_E = tl.arange(0, size)
    key_E = tl.sort(tl.where(valid_E, block_E * size + local_E, none))
    block_E = key_E // size
    before_E = tl.gather(block_E, tl.maximum(local_E - 1, 0), 0)
    starts_E = (block_E != before_E) | (local_E == 0)
    run_E = tl.associative_scan(tl.where(starts_E, local_E, 0), 0, _larger)
    known_E = key_E != none
    row = (head * tl.num_programs(0) + tile) * N
    place_E = tl.load(before_ptr + row + block_E, mask=known_E, other=0)
    place_E += tl.load(offset_ptr + head * N + block_E, mask=known_E, other=0)
    entry_E = key_E % size + tile * size
    tl.store(list_ptr + place_E + local_E - run_E, entry_E, mask=known_E)


@triton.jit
def write_items_kernel(
    total_ptr, offset_ptr, item_ptr, work_ptr, columns, CHUNK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Work items [column, begin, end, 0]: at most `CHUNK` entries of one list each."""
    c_T = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = c_T < columns
    total_T = tl.load(total_ptr + c_T, mask=inside, other=0)
    offset_T = tl.load(offset_ptr + c_T, mask=inside, other=0)
    item_T = tl.load(item_ptr + c_T, mask=inside, other=0)
    for i in range(tl.program_id(1), tl.max(tl.cdiv(total_T, CHUNK), 0), tl.num_programs(1)):
        mine = inside & (i * CHUNK < total_T)
        at = work_ptr + (item_T + i).to(tl.int64) * 4
        tl.store(at, c_T, mask=mine)
        tl.store(at + 1, offset_T + i * CHUNK, mask=mine)
        tl.store(at + 2, offset_T + tl.minimum(i * CHUNK + CHUNK, total_T), mask=mine)
