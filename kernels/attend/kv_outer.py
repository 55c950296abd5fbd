"""Attention over chosen past blocks, block by block: queries are gathered, keys stay.

A work item is a run of entries of one block's list. Its rows get a softmax over that block alone:
an output in the input dtype, and the maximum of its scores and the sum of its weights, which stay
apart until `combine` merges all blocks of a query. Scores are subtracted before they are scaled:
scaled first, two huge scores would differ by the rounding of their product.

Every past block is visible as a whole, so the causal mask plays no part here. The blocks of the
*small* kernel fit one tile and stay in registers or shared memory, with the next queries loaded
ahead; the *large* one walks along its block.

Where `SHARE` query heads have one list, an entry stands for all of them, and a tile of M rows holds
M / SPAN entries with `SPAN` heads each (a power of two; a second grid axis runs over slices of the
heads). Queries whose heads lie side by side are then fetched in long runs.

Legend: M rows of a tile, N keys of a tile, D key size, V value size.
"""

import triton
import triton.language as tl

from sparsify.kernels.attend.pieces import (
    LENGTHS,
    block_of,
    dot,
    entries_of,
    heads_of,
    row_load,
    row_store,
    safe_top,
    softmax_step,
)

__all__ = ["large_block_fwd_kernel", "shared_block_fwd_kernel", "small_block_fwd_kernel"]


@triton.jit(do_not_specialize=LENGTHS)
def small_block_fwd_kernel(
    q_ptr, k_ptr, v_ptr, list_ptr, work_ptr, items_ptr, part_ptr, stat_ptr,
    slot_ptr, keys_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    scale_log2, S, N, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    M: tl.constexpr, TILE_N: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """Blocks of at most `TILE_N` keys."""
    item = tl.program_id(0)
    if item >= tl.load(items_ptr):
        return
    column = tl.load(work_ptr + item * 4)
    begin, end = tl.load(work_ptr + item * 4 + 1), tl.load(work_ptr + item * 4 + 2)
    slice_head, c = (column // N).to(tl.int64), column % N
    head = head_begin + slice_head
    b, h = head // heads, head % heads
    g = h // group
    slot, keys = block_of(slot_ptr, keys_ptr, b, c, S, N, BLOCK, PLAIN)
    d_D, v_V = tl.arange(0, DP), tl.arange(0, VP)
    m_M, n_N = tl.arange(0, M), tl.arange(0, TILE_N)
    whole: tl.constexpr = PLAIN and (BLOCK == TILE_N)
    real_N = n_N < keys
    if MASKED:
        real_N = real_N & (tl.load(mask_ptr + b * S + slot + n_N, mask=real_N, other=0) != 0)

    q_base = q_ptr + b * stride_qb + h * stride_qh + t_begin.to(tl.int64) * stride_qt
    entry_M = tl.load(list_ptr + begin + m_M, mask=begin + m_M < end, other=0)
    ahead_M = tl.load(list_ptr + begin + M + m_M, mask=begin + M + m_M < end, other=0)
    q_at = (entry_M // WIDTH).to(tl.int64)[:, None] * stride_qt + d_D[None, :] * stride_qd
    q_MD = row_load(q_base + q_at, d_D, D, DP)

    key_at = (slot + n_N).to(tl.int64)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    v_base = v_ptr + b * stride_vb + g * stride_vg
    k_at = key_at[None, :] * stride_ks + d_D[:, None] * stride_kd
    v_at = key_at[:, None] * stride_vs + v_V[None, :] * stride_vd
    if whole and not MASKED and D == DP and V == VP:
        k_DN = tl.load(k_base + k_at)
        v_NV = tl.load(v_base + v_at)
    else:
        k_DN = tl.load(k_base + k_at, mask=real_N[None, :] & (d_D < D)[:, None], other=0.0)
        v_NV = tl.load(v_base + v_at, mask=real_N[:, None] & (v_V < V)[None, :], other=0.0)

    parts = part_ptr + slice_head * t_count * CHOSEN * V
    stats = stat_ptr + slice_head * t_count * WIDTH * 2
    for i in tl.range(begin, end, M, num_stages=1):
        inside_M = i + m_M < end
        s_MN = dot(q_MD, k_DN, EXACT_DOT)
        # The next queries are on their way while this tile is computed.
        q_at = (ahead_M // WIDTH).to(tl.int64)[:, None] * stride_qt + d_D[None, :] * stride_qd
        q_MD = row_load(q_base + q_at, d_D, D, DP)
        beyond = i + 2 * M + m_M
        beyond_M = tl.load(list_ptr + beyond, mask=beyond < end, other=0)
        if MASKED or not whole:
            s_MN = tl.where(real_N[None, :], s_MN, float("-inf"))
        top_M = tl.max(s_MN, 1)
        p_MN = tl.exp2((s_MN - safe_top(top_M)[:, None]) * scale_log2)
        sum_M = tl.sum(p_MN, 1)
        o_MV = dot(p_MN.to(v_NV.dtype), v_NV, EXACT_DOT)
        o_MV = o_MV * (1.0 / tl.where(sum_M == 0.0, 1.0, sum_M))[:, None]
        row_M = (entry_M // WIDTH * CHOSEN + entry_M % WIDTH).to(tl.int64)
        o_at = parts + row_M[:, None] * V + v_V[None, :]
        row_store(o_at, o_MV.to(part_ptr.dtype.element_ty), inside_M, v_V, V, VP)
        tl.store(stats + 2 * entry_M, top_M, mask=inside_M)
        tl.store(stats + 2 * entry_M + 1, sum_M, mask=inside_M)
        entry_M, ahead_M = ahead_M, beyond_M


@triton.jit
def _store_rows(
    part_ptr, stat_ptr, slice_list, entry_M, head_M, keep_M, o_MV, top_M, sum_M, v_V, t_count,
    SHARE: tl.constexpr, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr,
):  # fmt: skip
    """Partial outputs of a tile, their maxima and sums, at the places of its entries."""
    first = slice_list.to(tl.int64) * t_count
    row_M = (first * CHOSEN + entry_M // WIDTH * CHOSEN + entry_M % WIDTH) * SHARE + head_M
    o_at = part_ptr + row_M[:, None] * V + v_V[None, :]
    row_store(o_at, o_MV.to(part_ptr.dtype.element_ty), keep_M, v_V, V, VP)
    stats = stat_ptr + (first * WIDTH + entry_M) * (2 * SHARE) + head_M
    tl.store(stats, top_M, mask=keep_M)
    tl.store(stats + SHARE, sum_M, mask=keep_M)


@triton.jit(do_not_specialize=LENGTHS)
def shared_block_fwd_kernel(
    q_ptr, k_ptr, v_ptr, list_ptr, work_ptr, items_ptr, part_ptr, stat_ptr,
    slot_ptr, keys_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    scale_log2, S, N, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SHARE: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    STAGES: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """Blocks of at most `TILE_N` keys; lists that `SHARE` heads have in common."""
    item = tl.program_id(0)
    if item < tl.load(items_ptr):
        column = tl.load(work_ptr + item * 4)
        begin, end = tl.load(work_ptr + item * 4 + 1), tl.load(work_ptr + item * 4 + 2)
        slice_list, c = (column // N).to(tl.int64), column % N
        b, h, g = heads_of(head_begin + slice_list, heads, group, SHARE)
        slot, keys = block_of(slot_ptr, keys_ptr, b, c, S, N, BLOCK, PLAIN)
        d_D, v_V, n_N = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, TILE_N)
        e_M, head_M, known_M = entries_of(tl.program_id(1), M, SHARE, SPAN)
        whole: tl.constexpr = PLAIN and (BLOCK == TILE_N)
        real_N = n_N < keys
        if MASKED:
            real_N = real_N & (tl.load(mask_ptr + b * S + slot + n_N, mask=real_N, other=0) != 0)
        key_at = (slot + n_N).to(tl.int64)
        k_at = k_ptr + b * stride_kb + g * stride_kg
        v_at = v_ptr + b * stride_vb + g * stride_vg
        k_at += key_at[None, :] * stride_ks + d_D[:, None] * stride_kd
        v_at += key_at[:, None] * stride_vs + v_V[None, :] * stride_vd
        if whole and not MASKED and D == DP and V == VP:
            k_DN, v_NV = tl.load(k_at), tl.load(v_at)
        else:
            k_DN = tl.load(k_at, mask=real_N[None, :] & (d_D < D)[:, None], other=0.0)
            v_NV = tl.load(v_at, mask=real_N[:, None] & (v_V < V)[None, :], other=0.0)
        q_base = q_ptr + b * stride_qb + h * stride_qh + t_begin.to(tl.int64) * stride_qt
        head_at_M = head_M.to(tl.int64) * stride_qh
        for i in tl.range(begin, end, M // SPAN, num_stages=STAGES):
            inside_M = i + e_M < end
            entry_M = tl.load(list_ptr + i + e_M, mask=inside_M, other=0)
            q_at = (entry_M // WIDTH).to(tl.int64) * stride_qt + head_at_M
            q_MD = row_load(q_base + q_at[:, None] + d_D[None, :] * stride_qd, d_D, D, DP)
            s_MN = dot(q_MD, k_DN, EXACT_DOT)
            if MASKED or not whole:
                s_MN = tl.where(real_N[None, :], s_MN, float("-inf"))
            top_M = tl.max(s_MN, 1)
            p_MN = tl.exp2((s_MN - safe_top(top_M)[:, None]) * scale_log2)
            sum_M = tl.sum(p_MN, 1)
            o_MV = dot(p_MN.to(v_NV.dtype), v_NV, EXACT_DOT)
            o_MV = o_MV * (1.0 / tl.where(sum_M == 0.0, 1.0, sum_M))[:, None]
            _store_rows(
                part_ptr, stat_ptr, slice_list, entry_M, head_M, inside_M & known_M, o_MV, top_M,
                sum_M, v_V, t_count, SHARE, WIDTH, CHOSEN, V, VP,
            )  # fmt: skip


@triton.jit
def _tile_of_block(
    k_ptr, v_ptr, j, slot, b, g, key_at, d_D, v_V, real_N,
    stride_kb, stride_kg, stride_ks, stride_kd, stride_vb, stride_vg, stride_vs, stride_vd,
    D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr, TILE_N: tl.constexpr,
    BY_TMA: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Keys [N, D] and values [N, V] of one tile, by descriptor or by pointer."""
    if BY_TMA:
        k_ND = tl.reshape(k_ptr.load([b, g, slot + j, 0]), [TILE_N, DP])
        v_NV = tl.reshape(v_ptr.load([b, g, slot + j, 0]), [TILE_N, VP])
    else:
        k_at = k_ptr + b.to(tl.int64) * stride_kb + g.to(tl.int64) * stride_kg
        v_at = v_ptr + b.to(tl.int64) * stride_vb + g.to(tl.int64) * stride_vg
        k_at += key_at[:, None] * stride_ks + d_D[None, :] * stride_kd
        v_at += key_at[:, None] * stride_vs + v_V[None, :] * stride_vd
        if CUT:
            k_ND = tl.load(k_at, mask=real_N[:, None] & (d_D < D)[None, :], other=0.0)
            v_NV = tl.load(v_at, mask=real_N[:, None] & (v_V < V)[None, :], other=0.0)
        else:
            k_ND, v_NV = row_load(k_at, d_D, D, DP), row_load(v_at, v_V, V, VP)
    return k_ND, v_NV


@triton.jit(do_not_specialize=LENGTHS)
def large_block_fwd_kernel(
    q_ptr, k_ptr, v_ptr, list_ptr, work_ptr, items_ptr, part_ptr, stat_ptr,
    slot_ptr, keys_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    scale_log2, S, N, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SHARE: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    STAGES: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr, BY_TMA: tl.constexpr,
    EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """Blocks of any length; a tile of entries per work item. With BY_TMA, k and v are
    descriptors."""
    item = tl.program_id(0)
    if item < tl.load(items_ptr):
        column = tl.load(work_ptr + item * 4)
        begin, end = tl.load(work_ptr + item * 4 + 1), tl.load(work_ptr + item * 4 + 2)
        slice_list, c = column // N, column % N
        b, h, g = heads_of(head_begin + slice_list, heads, group, SHARE)
        slot, keys = block_of(slot_ptr, keys_ptr, b, c, S, N, BLOCK, PLAIN)
        d_D, v_V = tl.arange(0, DP), tl.arange(0, VP)
        n_N = tl.arange(0, TILE_N)
        e_M, head_M, known_M = entries_of(tl.program_id(1), M, SHARE, SPAN)
        inside_M = begin + e_M < end
        entry_M = tl.load(list_ptr + begin + e_M, mask=inside_M, other=0)
        q_base = q_ptr + b.to(tl.int64) * stride_qb + h.to(tl.int64) * stride_qh
        q_at = (t_begin + entry_M // WIDTH).to(tl.int64)[:, None] * stride_qt
        if SHARE > 1:
            q_at += head_M.to(tl.int64)[:, None] * stride_qh
            inside_M = inside_M & known_M
        q_at += d_D[None, :] * stride_qd
        q_MD = row_load(q_base + q_at, d_D, D, DP)
        cut: tl.constexpr = MASKED or not PLAIN or (BLOCK % TILE_N != 0)

        top_M = tl.full([M], float("-inf"), tl.float32)
        sum_M = tl.zeros([M], tl.float32)
        acc_MV = tl.zeros([M, VP], tl.float32)
        for j in tl.range(0, BLOCK, TILE_N, num_stages=STAGES):
            real_N = j + n_N < keys
            if MASKED:
                at = mask_ptr + b.to(tl.int64) * S + slot + j + n_N
                real_N = real_N & (tl.load(at, mask=real_N, other=0) != 0)
            key_at = (slot + j + n_N).to(tl.int64)
            k_ND, v_NV = _tile_of_block(
                k_ptr, v_ptr, j, slot, b, g, key_at, d_D, v_V, real_N,
                stride_kb, stride_kg, stride_ks, stride_kd,
                stride_vb, stride_vg, stride_vs, stride_vd,
                D, V, DP, VP, TILE_N, BY_TMA, cut,
            )  # fmt: skip
            s_MN = dot(q_MD, tl.trans(k_ND), EXACT_DOT)
            if cut:
                s_MN = tl.where(real_N[None, :], s_MN, float("-inf"))
            top_M, sum_M, acc_MV = softmax_step(
                top_M, sum_M, acc_MV, s_MN, v_NV, scale_log2, EXACT_DOT
            )
        o_MV = acc_MV / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        _store_rows(
            part_ptr, stat_ptr, slice_list, entry_M, head_M, inside_M, o_MV, top_M, sum_M, v_V,
            t_count, SHARE, WIDTH, CHOSEN, V, VP,
        )  # fmt: skip
