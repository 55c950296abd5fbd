"""Attention over chosen past blocks on Hopper: the large blocks' work, shared out among warps.

The same work items and results as `kv_outer.large_block_fwd_kernel`, in Gluon, since plain Triton
lets no group of warps run ahead of another. A program stays on its multiprocessor and walks through
the work items with four roles:

* two *attending* groups of four warps, each with 64 of an item's 128 rows;
* one warp that fetches keys and values by the tensor memory accelerator;
* four warps that gather the queries of the next item while this one is computed.

A group issues the scores of the next tile before the values of this one, so that a softmax runs
beside a product. No product is in flight at the end of a step: ptxas would serialise all of them.

Barriers. Every ring has a pair per slot: *full*, completed once per filling, and *empty*, completed
once per release. The n-th use of a slot (from 0) waits for completion n of `full`; the n-th filling
waits for completion n - 1 of `empty`, and the first one, which asks a fresh barrier for the phase
before its first, does not wait. A slot is released by both groups before it is filled again, so
nobody is ever more than one completion away from the phase it asks for. All roles count the same
items and tiles, and each waits in the order in which the others give: keys j, values j, keys j + 1.

Legend: M rows of a group, N keys of a tile, D key size (= value size).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sparsify.kernels.attend.pieces import LENGTHS

__all__ = ["large_block_hopper_fwd_kernel"]

_Q_SLOTS = gl.constexpr(2)
_HALF = gl.constexpr(64)  # rows of a group
# Names that changed between versions of Triton.
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_row_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_all_warps = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _work_item(work_ptr, item, items):
    """Column (head of the slice and block) and range of entries; nothing where there is no item."""
    at, there = work_ptr + item * 4, item < items
    column = gl.load(at, mask=there, other=0)
    begin = gl.load(at + 1, mask=there, other=0)
    return column, begin, gl.load(at + 2, mask=there, other=0)


@gluon.jit
def _fetch_keys(
    k_desc, v_desc, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
    work_ptr, items, block, N, head_begin,
    heads, group, D: gl.constexpr,
    TILE_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: keys and values of every item, tile by tile."""
    bytes_of_tile: gl.constexpr = TILE_N * D * 2
    step = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        column, _, _ = _work_item(work_ptr, item, items)
        head, c = head_begin + column // N, column % N
        b, g = head // heads, head % heads // group
        for j in range(0, block, TILE_N):
            at, parity = step % STAGES, step // STAGES & 1
            where = [b, g, c * block + j, 0]
            mbarrier.wait(k_empty.index(at), parity ^ 1)
            mbarrier.expect(k_full.index(at), bytes_of_tile)
            _tma_load(k_desc, where, k_full.index(at), k_slots.index(at))
            mbarrier.wait(v_empty.index(at), parity ^ 1)
            mbarrier.expect(v_full.index(at), bytes_of_tile)
            _tma_load(v_desc, where, v_full.index(at), v_slots.index(at))
            step += 1


@gluon.jit
def _gather_queries(
    q_ptr, q_slots, q_full, q_empty, list_ptr, work_ptr, items, N, head_begin, t_begin,
    stride_qb, stride_qh, stride_qt,
    heads, WIDTH: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """Four warps: the query rows of every item, one item ahead of the products."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    m_M = gl.arange(0, _HALF, layout=gl.SliceLayout(1, layout))
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        column, begin, end = _work_item(work_ptr, item, items)
        head = head_begin + column // N
        base = q_ptr + (head // heads).to(gl.int64) * stride_qb
        base += (head % heads).to(gl.int64) * stride_qh
        first, second = begin + m_M, begin + _HALF + m_M
        # Places behind the list take query 0 of the slice: it is there, and nobody stores it.
        first_M = t_begin + gl.load(list_ptr + first, mask=first < end, other=0) // WIDTH
        second_M = t_begin + gl.load(list_ptr + second, mask=second < end, other=0) // WIDTH
        first_at = base + first_M.to(gl.int64)[:, None] * stride_qt + d_D[None, :]
        second_at = base + second_M.to(gl.int64)[:, None] * stride_qt + d_D[None, :]
        at, parity = turn % _Q_SLOTS, turn // _Q_SLOTS & 1
        mbarrier.wait(q_empty.index(at), parity ^ 1)
        _row_load(q_slots.index(at * 2), first_at)
        _row_load(q_slots.index(at * 2 + 1), second_at)
        async_copy.commit_group()
        async_copy.wait_group(0)
        # The products read through the asynchronous proxy: every writer fences, then one tells.
        fence_async_shared()
        _all_warps()
        mbarrier.arrive(q_full.index(at), count=1)
        turn += 1  # noqa: SIM113


@gluon.jit
def _softmax_step(s_MN, top_M, scale_log2):
    """New maximum, weights of a tile, and what the weights so far shrink by."""
    new_M = gl.maximum(top_M, gl.max(s_MN, 1))
    safe_M = gl.where(new_M == float("-inf"), 0.0, new_M)
    p_MN = gl.exp2((s_MN - safe_M[:, None]) * scale_log2)
    shrink_M = gl.exp2((top_M - safe_M) * scale_log2)
    return new_M, p_MN, shrink_M


@gluon.jit
def _store_item(
    q_MD, q_empty, acc_MV, top_M, sum_M, entry_M, begin, end,
    part_ptr, stat_ptr, slice_head, t_count,
    SIDE: gl.constexpr, WIDTH: gl.constexpr, CHOSEN: gl.constexpr, D: gl.constexpr,
    dtype: gl.constexpr, s_rows: gl.constexpr, o_rows: gl.constexpr,
):  # fmt: skip
    """Outputs, maxima and sums of a group's rows at the places of their entries."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    weight_M = 1.0 / gl.where(sum_M == 0.0, 1.0, sum_M)
    o_MV = acc_MV * gl.convert_layout(weight_M, o_rows)[:, None]
    # The group's own queries are done with: their place turns the output into whole rows.
    q_MD.store(o_MV.to(dtype))
    _all_warps()
    o_MV = q_MD.load(layout)
    _all_warps()
    mbarrier.arrive(q_empty, count=1)
    v_V = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    entry = gl.convert_layout(entry_M, rows)
    row = slice_head * t_count * CHOSEN + entry // WIDTH * CHOSEN + entry % WIDTH
    inside = begin + SIDE * _HALF + gl.arange(0, _HALF, layout=rows) < end
    o_at = part_ptr + row[:, None] * D + v_V[None, :]
    gl.store(o_at, o_MV, mask=inside[:, None] & (v_V >= 0)[None, :])
    inside_M = begin + SIDE * _HALF + gl.arange(0, _HALF, layout=s_rows) < end
    stats = stat_ptr + slice_head * t_count * WIDTH * 2
    gl.store(stats + 2 * entry_M, top_M, mask=inside_M)
    gl.store(stats + 2 * entry_M + 1, sum_M, mask=inside_M)


@gluon.jit
def _attend(
    q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
    list_ptr, work_ptr, items, part_ptr, stat_ptr, scale_log2, block, N, t_count,
    SIDE: gl.constexpr, WIDTH: gl.constexpr, CHOSEN: gl.constexpr,
    D: gl.constexpr, TILE_N: gl.constexpr, STAGES: gl.constexpr, BY_TURNS: gl.constexpr,
):  # fmt: skip
    """Four warps: rows `SIDE * 64` and on of every item."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=o_layout, k_width=2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    m_M = SIDE * _HALF + gl.arange(0, _HALF, layout=s_rows)
    dtype: gl.constexpr = q_slots.dtype
    s_zero = gl.zeros([_HALF, TILE_N], gl.float32, s_layout)
    step = 0
    turn = 0
    issued = 0
    column, begin, end = _work_item(work_ptr, gl.program_id(0), items)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        # Loads take long: the next item is asked for before this one is computed.
        next_column, next_begin, next_end = _work_item(work_ptr, item + gl.num_programs(0), items)
        entry_M = gl.load(list_ptr + begin + m_M, mask=begin + m_M < end, other=0)
        q_at = turn % _Q_SLOTS
        q_MD = q_slots.index(q_at * 2 + SIDE)
        mbarrier.wait(q_full.index(q_at), turn // _Q_SLOTS & 1)

        # The first tile has nothing to overlap with.
        at = step % STAGES
        mbarrier.wait(k_full.index(at), step // STAGES & 1)
        k_DN = k_slots.index(at).reshape([TILE_N, D]).permute((1, 0))
        s_MN = warpgroup_mma(q_MD, k_DN, s_zero, use_acc=False, is_async=True)
        s_MN = warpgroup_mma_wait(0, deps=[s_MN])
        _all_warps()
        mbarrier.arrive(k_empty.index(at), count=1)
        top_M = gl.full([_HALF], float("-inf"), gl.float32, s_rows)
        top_M, p_MN, _ = _softmax_step(s_MN, top_M, scale_log2)
        sum_M = gl.sum(p_MN, 1)
        p_half = gl.convert_layout(p_MN.to(dtype), p_layout)
        acc_MV = gl.zeros([_HALF, D], gl.float32, o_layout)
        mbarrier.wait(v_full.index(at), step // STAGES & 1)

        for _ in range(TILE_N, block, TILE_N):
            v_at = step % STAGES
            step += 1
            at, parity = step % STAGES, step // STAGES & 1
            mbarrier.wait(k_full.index(at), parity)
            if BY_TURNS:
                # Group 0 issues first; its n-th turn follows turn n - 1 of group 1.
                mbarrier.wait(turns.index(SIDE), (issued & 1) ^ (1 - SIDE))
            k_DN = k_slots.index(at).reshape([TILE_N, D]).permute((1, 0))
            s_MN = warpgroup_mma(q_MD, k_DN, s_zero, use_acc=False, is_async=True)
            v_NV = v_slots.index(v_at).reshape([TILE_N, D])
            acc_MV = warpgroup_mma(p_half, v_NV, acc_MV, is_async=True)
            if BY_TURNS:
                mbarrier.arrive(turns.index(1 - SIDE), count=1)
                issued += 1
            s_MN = warpgroup_mma_wait(1, deps=[s_MN])
            _all_warps()
            mbarrier.arrive(k_empty.index(at), count=1)
            top_M, p_MN, shrink_M = _softmax_step(s_MN, top_M, scale_log2)
            sum_M = sum_M * shrink_M + gl.sum(p_MN, 1)
            next_half = gl.convert_layout(p_MN.to(dtype), p_layout)
            # The wait for the next values also keeps ptxas from waiting for the product any sooner:
            # it moves nothing over the loop that a wait is.
            mbarrier.wait(v_full.index(at), parity)
            acc_MV = warpgroup_mma_wait(0, deps=[acc_MV])
            _all_warps()
            mbarrier.arrive(v_empty.index(v_at), count=1)
            acc_MV = acc_MV * gl.convert_layout(shrink_M, o_rows)[:, None]
            p_half = next_half

        v_at = step % STAGES
        v_NV = v_slots.index(v_at).reshape([TILE_N, D])
        acc_MV = warpgroup_mma(p_half, v_NV, acc_MV, is_async=True)
        acc_MV = warpgroup_mma_wait(0, deps=[acc_MV])
        _all_warps()
        mbarrier.arrive(v_empty.index(v_at), count=1)
        step += 1

        _store_item(
            q_MD, q_empty.index(q_at), acc_MV, top_M, sum_M, entry_M, begin, end,
            part_ptr, stat_ptr, (column // N).to(gl.int64), t_count,
            SIDE, WIDTH, CHOSEN, D, dtype, s_rows, o_rows,
        )  # fmt: skip
        turn += 1  # noqa: SIM113
        column, begin, end = next_column, next_begin, next_end


@gluon.jit(do_not_specialize=[*LENGTHS, "block"])
def large_block_hopper_fwd_kernel(
    q_ptr, k_desc, v_desc, list_ptr, work_ptr, items_ptr, part_ptr, stat_ptr,
    stride_qb, stride_qh, stride_qt,
    scale_log2, block, N, t_begin, t_count, head_begin, heads, group,
    WIDTH: gl.constexpr, CHOSEN: gl.constexpr, D: gl.constexpr, TILE_N: gl.constexpr,
    STAGES: gl.constexpr, BY_TURNS: gl.constexpr,
):  # fmt: skip
    """All work items of a slice; `block` keys are at least two tiles."""
    q_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    dtype: gl.constexpr = k_desc.dtype
    q_slots = gl.allocate_shared_memory(dtype, [2 * _Q_SLOTS, _HALF, D], q_layout)
    k_slots = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TILE_N, D], k_desc.layout)
    v_slots = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TILE_N, D], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [_Q_SLOTS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [_Q_SLOTS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()  # the accelerator must find the barriers as they were made
    items = gl.load(items_ptr)
    gl.warp_specialize([
        (_attend, (
            q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
            list_ptr, work_ptr, items, part_ptr, stat_ptr, scale_log2, block, N, t_count,
            0, WIDTH, CHOSEN, D, TILE_N, STAGES, BY_TURNS,
        )),
        (_attend, (
            q_slots, k_slots, v_slots, q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
            list_ptr, work_ptr, items, part_ptr, stat_ptr, scale_log2, block, N, t_count,
            1, WIDTH, CHOSEN, D, TILE_N, STAGES, BY_TURNS,
        )),
        (_gather_queries, (
            q_ptr, q_slots, q_full, q_empty, list_ptr, work_ptr, items, N, head_begin, t_begin,
            stride_qb, stride_qh, stride_qt, heads, WIDTH, D,
        )),
        (_fetch_keys, (
            k_desc, v_desc, k_slots, v_slots, k_full, k_empty, v_full, v_empty,
            work_ptr, items, block, N, head_begin, heads, group, D, TILE_N, STAGES,
        )),
    ], [4, 4, 1], [216, 56, 24])  # fmt: skip
