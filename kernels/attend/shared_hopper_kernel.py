"""Attention over past blocks that 16 heads choose together, on Hopper: shared out among warps.

The same work items and results as `kv_outer.shared_block_fwd_kernel`, in Gluon. A program stays on
its multiprocessor and walks through the work items with three roles: two *attending* groups of four
warps take the tiles of an item by turns, and one warp fetches queries, keys and values by the
tensor memory accelerator. Partial outputs leave the same way, so nobody waits for memory who has
something to compute.

A tile is four entries of 16 heads: 64 rows. Behind the last entry of an item a tile repeats it; the
repeated rows are equal bit for bit and are stored over one another.

Barriers. Every slot has a pair: *full*, completed once per filling, and *empty*, completed once per
release. The n-th use of a slot (from 0) waits for completion n of `full`; the n-th filling waits
for completion n - 1 of `empty`, and the first, which asks a fresh barrier for the phase before its
first, does not wait. Tiles are numbered through all items of a program: tile n lies in query slot
n % 4 and belongs to group n % 2, so a query slot has one reader, who releases it before it is
filled again; slots of keys and values are released by both groups, also by one that had no tile of
the item. Hence nobody is ever more than one completion away from the phase it asks for.

Legend: M rows of a tile, N keys of a block, D key size, V value size (both 128, fetched and stored
in halves of 64, which is as wide as the accelerator's swizzle).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = ["shared_block_hopper_fwd_kernel"]

_HEADS = gl.constexpr(16)  # heads of an entry
_ENTRIES = gl.constexpr(4)  # entries of a tile
_ROWS = gl.constexpr(64)
_HALF = gl.constexpr(64)
_BLOCK = gl.constexpr(128)
_Q_SLOTS = gl.constexpr(4)
_KV_SLOTS = gl.constexpr(2)
# Names that changed between versions of Triton.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_all_warps = getattr(gl, "barrier", None) or gl.thread_barrier
_memory = gl.shared_memory_descriptor
_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret


@gluon.jit
def _work_item(work_ptr, item):
    """Column (list of the slice and block) and range of entries."""
    at = work_ptr + item * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2)


@gluon.jit
def _fetch(
    q_desc, k_desc, v_desc, q_slots, k_slots, v_slots, q_full, q_empty, kv_full, kv_empty,
    list_ptr, work_ptr, items, N, head_begin, t_begin, LISTS: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """One warp: a block's keys and values, then the queries of its tiles; numbers of entries are
    read one tile ahead."""
    half_block: gl.constexpr = _BLOCK * _HALF * 2
    box: gl.constexpr = _HEADS * _HALF * 2
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        column, begin, end = _work_item(work_ptr, item)
        number = head_begin + column // N
        b, g, slot = number // LISTS, number % LISTS, column % N * _BLOCK
        h = g * _HEADS
        last = end - 1
        entry_0 = gl.load(list_ptr + begin)
        entry_1 = gl.load(list_ptr + gl.minimum(begin + 1, last))
        entry_2 = gl.load(list_ptr + gl.minimum(begin + 2, last))
        entry_3 = gl.load(list_ptr + gl.minimum(begin + 3, last))
        at = turn % _KV_SLOTS
        full = kv_full.index(at)
        mbarrier.wait(kv_empty.index(at), (turn // _KV_SLOTS & 1) ^ 1)
        mbarrier.expect(full, 4 * half_block)
        for half in gl.static_range(2):
            where = [b, g, slot, half * _HALF]
            _tma_load(k_desc, where, full, k_slots.index(at * 2 + half))
        for half in gl.static_range(2):
            where = [b, g, slot, half * _HALF]
            _tma_load(v_desc, where, full, v_slots.index(at * 2 + half))
        for i in range(begin, end, _ENTRIES):
            ahead_0 = gl.load(list_ptr + gl.minimum(i + 4, last))
            ahead_1 = gl.load(list_ptr + gl.minimum(i + 5, last))
            ahead_2 = gl.load(list_ptr + gl.minimum(i + 6, last))
            ahead_3 = gl.load(list_ptr + gl.minimum(i + 7, last))
            q_at = step % _Q_SLOTS
            full = q_full.index(q_at)
            mbarrier.wait(q_empty.index(q_at), (step // _Q_SLOTS & 1) ^ 1)
            mbarrier.expect(full, 2 * _ENTRIES * box)
            t_0, t_1 = t_begin + entry_0 // WIDTH, t_begin + entry_1 // WIDTH
            t_2, t_3 = t_begin + entry_2 // WIDTH, t_begin + entry_3 // WIDTH
            for half in gl.static_range(2):
                first = (q_at * 2 + half) * _ENTRIES
                d = half * _HALF
                _tma_load(q_desc, [b, t_0, h, d], full, q_slots.index(first))
                _tma_load(q_desc, [b, t_1, h, d], full, q_slots.index(first + 1))
                _tma_load(q_desc, [b, t_2, h, d], full, q_slots.index(first + 2))
                _tma_load(q_desc, [b, t_3, h, d], full, q_slots.index(first + 3))
            entry_0, entry_1, entry_2, entry_3 = ahead_0, ahead_1, ahead_2, ahead_3
            step += 1
        turn += 1  # noqa: SIM113


@gluon.jit
def _attend(
    q_tiles, k_slots, v_slots, o_tiles, o_slots, q_full, q_empty, kv_full, kv_empty,
    part_desc, stat_ptr, list_ptr, work_ptr, items, scale_log2, N, t_count,
    SIDE: gl.constexpr, WIDTH: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """Four warps: every second tile."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _HALF, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_tiles.dtype
    m_M = gl.arange(0, _ROWS, layout=s_rows)
    s_zero = gl.zeros([_ROWS, _BLOCK], gl.float32, s_layout)
    o_zero = gl.zeros([_ROWS, _HALF], gl.float32, o_layout)
    left_tile, right_tile = o_tiles.index(SIDE * 2), o_tiles.index(SIDE * 2 + 1)
    before = 0  # tiles of the items before
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        column, begin, end = _work_item(work_ptr, item)
        rows_before = column // N * t_count  # queries of the lists before
        last = end - 1
        at = turn % _KV_SLOTS
        k_left, k_right = k_slots.index(at * 2), k_slots.index(at * 2 + 1)
        v_left, v_right = v_slots.index(at * 2), v_slots.index(at * 2 + 1)
        mbarrier.wait(kv_full.index(at), turn // _KV_SLOTS & 1)
        tiles = (end - begin + _ENTRIES - 1) // _ENTRIES
        for i in range((SIDE + before) & 1, tiles, 2):
            first = begin + i * _ENTRIES
            entry_M = gl.load(list_ptr + gl.minimum(first + m_M // _HEADS, last))
            entry_0 = gl.load(list_ptr + first)
            entry_1 = gl.load(list_ptr + gl.minimum(first + 1, last))
            entry_2 = gl.load(list_ptr + gl.minimum(first + 2, last))
            entry_3 = gl.load(list_ptr + gl.minimum(first + 3, last))
            step = before + i
            q_at = step % _Q_SLOTS
            mbarrier.wait(q_full.index(q_at), step // _Q_SLOTS & 1)
            k_DN = k_left.reshape([_BLOCK, _HALF]).permute((1, 0))
            s_MN = warpgroup_mma(
                q_tiles.index(q_at * 2), k_DN, s_zero, use_acc=False, is_async=True
            )
            k_DN = k_right.reshape([_BLOCK, _HALF]).permute((1, 0))
            s_MN = warpgroup_mma(q_tiles.index(q_at * 2 + 1), k_DN, s_MN, is_async=True)
            s_MN = warpgroup_mma_wait(0, deps=[s_MN])
            _all_warps()
            mbarrier.arrive(q_empty.index(q_at), count=1)
            top_M = gl.max(s_MN, 1)
            safe_M = gl.where(top_M == float("-inf"), 0.0, top_M)
            p_MN = gl.exp2((s_MN - safe_M[:, None]) * scale_log2)
            sum_M = gl.sum(p_MN, 1)
            p_half = gl.convert_layout(p_MN.to(dtype), p_layout)
            v_NV = v_left.reshape([_BLOCK, _HALF])
            left = warpgroup_mma(p_half, v_NV, o_zero, use_acc=False, is_async=True)
            v_NV = v_right.reshape([_BLOCK, _HALF])
            right = warpgroup_mma(p_half, v_NV, o_zero, use_acc=False, is_async=True)
            stats = stat_ptr + (rows_before.to(gl.int64) * WIDTH + entry_M) * (2 * _HEADS)
            gl.store(stats + m_M % _HEADS, top_M)
            gl.store(stats + _HEADS + m_M % _HEADS, sum_M)
            one_M = gl.convert_layout(1.0 / gl.where(sum_M == 0.0, 1.0, sum_M), o_rows)
            left, right = warpgroup_mma_wait(0, deps=[left, right])
            tma.store_wait(pendings=0)  # of the tile before: its rows have left shared memory
            left_tile.store((left * one_M[:, None]).to(dtype))
            right_tile.store((right * one_M[:, None]).to(dtype))
            fence_async_shared()
            _all_warps()
            row_0 = (rows_before * CHOSEN + entry_0 // WIDTH * CHOSEN + entry_0 % WIDTH) * _HEADS
            row_1 = (rows_before * CHOSEN + entry_1 // WIDTH * CHOSEN + entry_1 % WIDTH) * _HEADS
            row_2 = (rows_before * CHOSEN + entry_2 // WIDTH * CHOSEN + entry_2 % WIDTH) * _HEADS
            row_3 = (rows_before * CHOSEN + entry_3 // WIDTH * CHOSEN + entry_3 % WIDTH) * _HEADS
            for half in gl.static_range(2):
                box = (SIDE * 2 + half) * _ENTRIES
                v = half * _HALF
                _tma_store(part_desc, [row_0, v], o_slots.index(box))
                _tma_store(part_desc, [row_1, v], o_slots.index(box + 1))
                _tma_store(part_desc, [row_2, v], o_slots.index(box + 2))
                _tma_store(part_desc, [row_3, v], o_slots.index(box + 3))
        _all_warps()
        mbarrier.arrive(kv_empty.index(at), count=1)
        before += tiles
        turn += 1  # noqa: SIM113
    tma.store_wait(pendings=0)


@gluon.jit(do_not_specialize=["N", "t_begin", "t_count", "head_begin"])
def shared_block_hopper_fwd_kernel(
    q_desc, k_desc, v_desc, part_desc, list_ptr, work_ptr, items_ptr, stat_ptr,
    scale_log2, N, t_begin, t_count, head_begin,
    LISTS: gl.constexpr, WIDTH: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """All work items of a slice.

    Descriptors have boxes of `[1, 1, 16, 64]` for q `[B, T, H, D]`, `[1, 1, 128, 64]` for k and v
    `[B, G, S, D]`, and `[16, 64]` for the parts as rows of `V`.
    """
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = k_desc.dtype
    boxes: gl.constexpr = 2 * _ENTRIES
    q_slots = gl.allocate_shared_memory(
        dtype, [_Q_SLOTS * boxes, 1, 1, _HEADS, _HALF], q_desc.layout
    )
    q_tiles = _as(q_slots, dtype, [_Q_SLOTS * 2, _ROWS, _HALF], tile)
    k_slots = gl.allocate_shared_memory(dtype, [_KV_SLOTS * 2, 1, 1, _BLOCK, _HALF], k_desc.layout)
    v_slots = gl.allocate_shared_memory(dtype, [_KV_SLOTS * 2, 1, 1, _BLOCK, _HALF], v_desc.layout)
    o_tiles = gl.allocate_shared_memory(dtype, [4, _ROWS, _HALF], tile)
    o_slots = _as(o_tiles, dtype, [2 * boxes, _HEADS, _HALF], part_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [_Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [_Q_SLOTS, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [_KV_SLOTS, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [_KV_SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(_KV_SLOTS):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_empty.index(i), count=2)
    fence_async_shared()  # the accelerator must find the barriers as they were made
    items = gl.load(items_ptr)
    gl.warp_specialize([
        (_attend, (
            q_tiles, k_slots, v_slots, o_tiles, o_slots, q_full, q_empty, kv_full, kv_empty,
            part_desc, stat_ptr, list_ptr, work_ptr, items, scale_log2, N, t_count,
            0, WIDTH, CHOSEN,
        )),
        (_attend, (
            q_tiles, k_slots, v_slots, o_tiles, o_slots, q_full, q_empty, kv_full, kv_empty,
            part_desc, stat_ptr, list_ptr, work_ptr, items, scale_log2, N, t_count,
            1, WIDTH, CHOSEN,
        )),
        (_fetch, (
            q_desc, k_desc, v_desc, q_slots, k_slots, v_slots, q_full, q_empty, kv_full, kv_empty,
            list_ptr, work_ptr, items, N, head_begin, t_begin, LISTS, WIDTH,
        )),
    ], [4, 1], [232, 40])  # fmt: skip
