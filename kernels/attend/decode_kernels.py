"""Attention of a few queries over the blocks that they chose, and what merges its parts.

The query heads of a group share one list, so they are the rows of one product. Either a program
attends one place of a list and writes a partial result for *merge*, or it walks over the list.
Both do the same arithmetic in the same order: the softmax of a place is finished first, by its own
maximum, and places are merged one by one, ascending. So which of the two runs may depend on how
many lists a call has, and a row still has the same bits.

Keys and values that a query does not see are not loaded, so nothing of theirs reaches it.

Legend: M query heads of a group, N keys of a tile, D key size, V value size, L list length.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsify.kernels.attend.pieces import dot, safe_top
from sparsify.kernels.select.decode_choice_kernels import (
    best_numbers,
    page_of,
    past_end,
    place_of,
    span_of,
)

__all__ = ["decode_attention_fwd_kernel", "decode_merge_fwd_kernel"]

LN2 = tl.constexpr(0.6931471805599453)
NO_BLOCK = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _merged(top, total, new_top, new_total, scale_log2):
    """Maximum and sum of two softmaxes in one, and what their outputs count for."""
    both = tl.maximum(top, new_top)
    safe = safe_top(both)
    shrink = tl.exp2((top - safe) * scale_log2)
    weight = tl.exp2((new_top - safe) * scale_log2)
    return both, tl.fma(new_total, weight, total * shrink), shrink, weight


@triton.jit
def _summed(acc, shrink, new, weight):
    """By `fma`, not by what a compiler makes of the sum, so that every kernel rounds alike."""
    return tl.fma(new, weight, acc * shrink)


@triton.jit
def _log_sum(top, total, scale_log2):
    """-inf without a key, and with logits of -inf alone."""
    log_sum = tl.fma(safe_top(top), scale_log2 * LN2, tl.log(total))
    return tl.where(total == 0.0, float("-inf"), log_sum)


@triton.jit
def _tile_of(
    q_MD, k_ptr, v_ptr, mask_ptr, b, g, c, page, tile, origin, reach, v_V,
    stride_kb, stride_kg, stride_ks, stride_kd, stride_vb, stride_vg, stride_vs, stride_vd,
    stride_mb, scale_log2,
    BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    TILE_N: tl.constexpr, PAGED: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """Softmax over one tile of block `c`, of the keys before `reach`: maximum, sum, and columns
    `v_V` of the output."""
    d_D = tl.arange(0, DP)
    n_N = tile * TILE_N + tl.arange(0, TILE_N)
    x_N = c * BLOCK + n_N
    seen_N = (n_N < BLOCK) & (x_N < reach)
    if mask_ptr is not None:
        at_N = mask_ptr + b * stride_mb + origin + x_N
        seen_N = seen_N & (tl.load(at_N, mask=seen_N, other=0) != 0)
    slot_N = n_N.to(tl.int64)
    if not PAGED:
        slot_N += origin + c * BLOCK
    k_at = k_ptr + page * stride_kb + g * stride_kg
    v_at = v_ptr + page * stride_vb + g * stride_vg
    k_ND = tl.load(
        k_at + slot_N[:, None] * stride_ks + d_D[None, :] * stride_kd,
        mask=seen_N[:, None] & (d_D < D)[None, :],
        other=0.0,
    )
    v_NV = tl.load(
        v_at + slot_N[:, None] * stride_vs + v_V[None, :] * stride_vd,
        mask=seen_N[:, None] & (v_V < V)[None, :],
        other=0.0,
    )
    s_MN = dot(q_MD, tl.trans(k_ND), EXACT_DOT)
    s_MN = tl.where(seen_N[None, :], s_MN, float("-inf"))
    top_M = tl.max(s_MN, 1)
    p_MN = tl.exp2((s_MN - safe_top(top_M)[:, None]) * scale_log2)
    return top_M, tl.sum(p_MN, 1), dot(p_MN.to(v_NV.dtype), v_NV, EXACT_DOT)


@triton.jit
def _at(values_L, l_L, at):
    """One of the numbers of a list in registers: a load would keep those that wait for it from
    being fetched ahead."""
    return tl.sum(tl.where(l_L == at, values_L, 0), 0)


@triton.jit(do_not_specialize=["stride_mb", "stride_tb", "S", "N", "pages"])
def decode_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, best_ptr, part_ptr, stat_ptr, out_ptr, lse_ptr,
    kv_len_ptr, start_ptr, origin_ptr, mask_ptr, table_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    stride_mb, stride_tb,
    scale_log2, S, N, pages,
    T: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr, LENGTH: tl.constexpr, SEGMENTS: tl.constexpr, RANKED: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, M: tl.constexpr,
    TILE_N: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr, UNION: tl.constexpr,
    SPLIT: tl.constexpr, SLICES: tl.constexpr, EXACT_DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SPLIT: one place of a list, or with SLICES a slice of its values, the result to `part`
    [lists, CHOSEN + 1, GROUP, V] and `stat` [lists, CHOSEN + 1, 2, M] in float32 (a sum of -1:
    nothing there). Otherwise a whole list.

    `best`: with RANKED (a power of two that holds all blocks) the scores of the blocks [lists, N]
    int32, of which a place is found here; otherwise what `decode_top_fwd_kernel` writes in
    SEGMENTS, and nothing with SEGMENTS of 0, when every past block is chosen. The own block has the
    last place.
    """
    if PDL:
        gdc_launch_dependents()
    PLACES: tl.constexpr = CHOSEN + 1
    if SPLIT:
        task = tl.program_id(0) // (PLACES * SLICES)
        place = tl.program_id(0) // SLICES % PLACES
    else:
        task, place = tl.program_id(0), 0
    # The queries of a sequence side by side: they share blocks.
    t, g = task % T, (task // T % GROUPS).to(tl.int64)
    b = (task // (T * GROUPS)).to(tl.int64)
    row = (b * T + t) * GROUPS + g
    m_M, l_L, d_D = tl.arange(0, M), tl.arange(0, LENGTH), tl.arange(0, DP)
    WIDTH: tl.constexpr = VP // SLICES
    v_V = tl.program_id(0) % SLICES * WIDTH + tl.arange(0, WIDTH)
    head_M = g * GROUP + m_M
    q_at = q_ptr + b * stride_qb + t.to(tl.int64) * stride_qt
    q_MD = tl.load(
        q_at + head_M[:, None] * stride_qh + d_D[None, :] * stride_qd,
        mask=(m_M < GROUP)[:, None] & (d_D < D)[None, :],
        other=0.0,
    )
    origin, keys, first = span_of(kv_len_ptr, start_ptr, origin_ptr, b, S, T)
    p = first + t
    reach = tl.minimum(p + 1, keys)
    own = tl.maximum(p, 0) // BLOCK
    has_own = (p >= 0) & (own * BLOCK < keys)
    if PDL:
        gdc_wait()

    if RANKED > 0:
        end = past_end(p, keys, BLOCK, UNION)
        number, past = place_of(best_ptr + row * N, end, own, place, RANKED, CHOSEN, LENGTH)
    else:
        if SEGMENTS == 0:
            number_L = tl.where(l_L < past_end(p, keys, BLOCK, False), l_L, NO_BLOCK)
            number_L = tl.where(l_L < CHOSEN, number_L, NO_BLOCK)
        elif SEGMENTS == 1:
            number_L = tl.load(best_ptr + row * LENGTH + l_L)
        else:
            candidate = tl.arange(0, SEGMENTS * LENGTH)
            key_L = tl.topk(tl.load(best_ptr + row * SEGMENTS * LENGTH + candidate), LENGTH)
            number_L = best_numbers(key_L, CHOSEN, LENGTH)
        number = _at(number_L, l_L, place)
        past = tl.sum(((number_L != NO_BLOCK) & (number_L != own)).to(tl.int32), 0)
    # The own block may be among the best; it is attended last in any case.
    count = past + has_own.to(tl.int32)

    if SPLIT:
        is_own = place == CHOSEN
        c = tl.where(is_own, own, number)
        there = (is_own & has_own) | (place < past)
        steps = tl.where(there, TILES, 0)
        page = b
        if table_ptr is not None:
            page = page_of(table_ptr, stride_tb, b, c, there, pages)
    else:
        there = count > 0
        steps = count * TILES
        if table_ptr is not None:
            page_L = page_of(table_ptr, stride_tb, b, number_L, l_L < past, pages)
            own_page = page_of(table_ptr, stride_tb, b, own, has_own, pages)
    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    acc_MV = tl.zeros([M, WIDTH], tl.float32)
    all_top_M, all_sum_M, all_acc_MV = top_M, sum_M, acc_MV
    for step in tl.range(0, steps, num_stages=STAGES):
        tile = step % TILES
        if not SPLIT:
            at = step // TILES
            c = tl.where(at < past, _at(number_L, l_L, at), own)
            page = b
            if table_ptr is not None:
                page = tl.where(at < past, _at(page_L, l_L, at), own_page)
        new_top_M, new_sum_M, new_acc_MV = _tile_of(
            q_MD, k_ptr, v_ptr, mask_ptr, b, g, c, page, tile, origin, reach, v_V,
            stride_kb, stride_kg, stride_ks, stride_kd,
            stride_vb, stride_vg, stride_vs, stride_vd, stride_mb, scale_log2,
            BLOCK, D, DP, V, TILE_N, table_ptr is not None, EXACT_DOT,
        )  # fmt: skip
        if TILES == 1:
            top_M, sum_M, acc_MV = new_top_M, new_sum_M, new_acc_MV
        else:
            both_M, total_M, shrink_M, weight_M = _merged(
                top_M, sum_M, new_top_M, new_sum_M, scale_log2
            )
            both_MV = _summed(acc_MV, shrink_M[:, None], new_acc_MV, weight_M[:, None])
            top_M = tl.where(tile == 0, new_top_M, both_M)
            sum_M = tl.where(tile == 0, new_sum_M, total_M)
            acc_MV = tl.where(tile == 0, new_acc_MV, both_MV)
        if not SPLIT:
            both_M, total_M, shrink_M, weight_M = _merged(
                all_top_M, all_sum_M, top_M, sum_M, scale_log2
            )
            both_MV = _summed(all_acc_MV, shrink_M[:, None], acc_MV, weight_M[:, None])
            last = tile == TILES - 1
            all_top_M = tl.where(last, both_M, all_top_M)
            all_sum_M = tl.where(last, total_M, all_sum_M)
            all_acc_MV = tl.where(last, both_MV, all_acc_MV)

    if SPLIT:
        at = row * PLACES + place
        stat_at = stat_ptr + at * (2 * M) + m_M  # of equal numbers in all slices
        tl.store(stat_at, top_M)
        tl.store(stat_at + M, tl.where(there, sum_M, -1.0))
        tl.store(
            part_ptr + (at * GROUP + m_M)[:, None] * V + v_V[None, :],
            acc_MV,
            mask=(m_M < tl.where(there, GROUP, 0))[:, None] & (v_V < V)[None, :],
        )
    else:
        out_M = (b * (GROUPS * GROUP) + head_M) * T + t
        o_MV = tl.where((all_sum_M == 0.0)[:, None], 0.0, all_acc_MV / all_sum_M[:, None])
        tl.store(
            out_ptr + out_M[:, None] * V + v_V[None, :],
            o_MV.to(out_ptr.dtype.element_ty),
            mask=(m_M < GROUP)[:, None] & (v_V < V)[None, :],
        )
        log_sum_M = _log_sum(all_top_M, all_sum_M, scale_log2)
        tl.store(lse_ptr + out_M, log_sum_M, mask=m_M < GROUP)


@triton.jit
def _with_place(
    top, total, acc_V, stat_ptr, part_ptr, at, head, v_V, scale_log2,
    GROUP: tl.constexpr, M: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """One more place of a list; of one where nothing is, nothing is read."""
    new_top = tl.load(stat_ptr + at * (2 * M) + head)
    new_total = tl.load(stat_ptr + at * (2 * M) + M + head)
    empty = new_total < 0.0
    new_V = tl.load(
        part_ptr + (at * GROUP + head) * V + v_V, mask=v_V < tl.where(empty, 0, V), other=0.0
    )
    both, both_total, shrink, weight = _merged(top, total, new_top, new_total, scale_log2)
    both_V = _summed(acc_V, shrink, new_V, weight)
    return (
        tl.where(empty, top, both),
        tl.where(empty, total, both_total),
        tl.where(empty, acc_V, both_V),
    )


@triton.jit
def decode_merge_fwd_kernel(
    part_ptr, stat_ptr, out_ptr, lse_ptr, scale_log2,
    T: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, PLACES: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, M: tl.constexpr, UNROLLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The places of a list merged, for one query head."""
    row = (tl.program_id(0) // GROUP).to(tl.int64)
    head = tl.program_id(0) % GROUP
    b, t, g = row // (T * GROUPS), row // GROUPS % T, row % GROUPS
    v_V = tl.arange(0, VP)
    top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    acc_V = tl.zeros([VP], tl.float32)
    if PDL:
        gdc_wait()
    if UNROLLED:
        for place in tl.static_range(PLACES):
            top, total, acc_V = _with_place(
                top, total, acc_V, stat_ptr, part_ptr, row * PLACES + place, head, v_V,
                scale_log2, GROUP, M, V,
            )  # fmt: skip
    else:
        for place in tl.range(0, PLACES, loop_unroll_factor=4):
            top, total, acc_V = _with_place(
                top, total, acc_V, stat_ptr, part_ptr, row * PLACES + place, head, v_V,
                scale_log2, GROUP, M, V,
            )  # fmt: skip
    out = (b * (GROUPS * GROUP) + g * GROUP + head) * T + t
    o_V = tl.where(total == 0.0, 0.0, acc_V / total)
    tl.store(out_ptr + out * V + v_V, o_V.to(out_ptr.dtype.element_ty), mask=v_V < V)
    tl.store(lse_ptr + out, _log_sum(top, total, scale_log2))
