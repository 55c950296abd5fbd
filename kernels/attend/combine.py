"""A query's own block, merged with its past blocks: the last stage of KV-outer attention.

The own block is cut by the diagonal, so it is computed query by query anyway; doing it here saves a
partial output. The same kernel without past blocks, started at the first key of the sequence, is
dense causal attention.

Keys and values that no row of a tile sees are not loaded. In the tiles that the diagonal cuts, a
value that is not finite reaches earlier rows as 0 * inf. That shows in the sum: such tiles are
marked, and a second launch (`CLEAN`) computes them once more with 0 in the place of such values;
rows that see one become NaN.

Where `SHARE` query heads have one list, a tile of M rows holds M / SPAN queries with `SPAN` heads
each, and the second grid axis runs over the lists and the slices of their heads.

Legend: M rows of a tile, N keys of a tile, D key size, V value size, W places of a list.
"""

import triton
import triton.language as tl

from sparsify.kernels.attend.pieces import LENGTHS, dot, entries_of, heads_of, safe_top

__all__ = ["combine_clean_fwd_kernel", "combine_fwd_kernel"]

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _own_step(
    top_M, sum_M, acc_MV, bad_M, q_MD, k_base, v_base, mask_base, j, n_N, d_D, v_V, lo_M, hi_M,
    stride_ks, stride_kd, stride_vs, stride_vd, scale_log2, end,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, CUT: tl.constexpr,
    CLEAN: tl.constexpr, MASKED: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """One tile of the own block; `CUT` where some rows do not see all of it."""
    key_N = j + n_N
    seen_N = key_N < end
    if MASKED:
        seen_N = seen_N & (tl.load(mask_base + key_N, mask=seen_N, other=0) != 0)
    at_N = key_N.to(tl.int64)
    k_at = k_base + at_N[None, :] * stride_ks + d_D[:, None] * stride_kd
    v_at = v_base + at_N[:, None] * stride_vs + v_V[None, :] * stride_vd
    k_mask, v_mask = seen_N[None, :], seen_N[:, None]
    if D != DP:
        k_mask = k_mask & (d_D < D)[:, None]
    if V != VP:
        v_mask = v_mask & (v_V < V)[None, :]
    if CUT or MASKED or D != DP:
        k_DN = tl.load(k_at, mask=k_mask, other=0.0)
    else:
        k_DN = tl.load(k_at)
    if CUT or MASKED or V != VP:
        v_NV = tl.load(v_at, mask=v_mask, other=0.0)
    else:
        v_NV = tl.load(v_at)
    s_MN = dot(q_MD, k_DN, EXACT_DOT)
    if CUT or MASKED:
        keep_MN = seen_N[None, :] & (key_N[None, :] >= lo_M[:, None])
        keep_MN = keep_MN & (key_N[None, :] < hi_M[:, None])
        s_MN = tl.where(keep_MN, s_MN, float("-inf"))
    if CLEAN:
        v_NV, bad_M = _without_strangers(v_NV, bad_M, keep_MN)
    new_M = tl.maximum(top_M, tl.max(s_MN, 1))
    safe_M = safe_top(new_M)
    p_MN = tl.exp2((s_MN - safe_M[:, None]) * scale_log2)
    shrink_M = tl.exp2((top_M - safe_M) * scale_log2)
    sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
    acc_MV = acc_MV * shrink_M[:, None]
    acc_MV += dot(p_MN.to(v_NV.dtype), v_NV, EXACT_DOT)
    return new_M, sum_M, acc_MV, bad_M


@triton.jit
def _without_strangers(v_NV, bad_M, keep_MN):
    """Values with 0 for what is not finite, and the rows that see such a value."""
    odd_N = tl.sum(v_NV.to(tl.float32) * 0.0, 1) != 0.0
    hit_M = tl.max(tl.where(keep_MN & odd_N[None, :], 1, 0), 1)
    x_NV = v_NV.to(tl.float32)
    clean = tl.where(x_NV * 0.0 == 0.0, x_NV, 0.0).to(v_NV.dtype)
    return clean, tl.maximum(bad_M, hit_M)


@triton.jit
def _stats(
    stat_ptr, row_M, head_M, inside_M, WIDTH: tl.constexpr, SHARE: tl.constexpr, M: tl.constexpr
):
    """Maxima and sums of all places, `[M, W]` each; where nothing was written they are anything."""
    if SHARE == 1:
        w_2W = tl.arange(0, 2 * WIDTH)
        at = stat_ptr + row_M[:, None] * (2 * WIDTH) + w_2W[None, :]
        stats = tl.load(at, mask=inside_M[:, None], other=0.0)
        top_MW, total_MW = tl.split(tl.reshape(stats, [M, WIDTH, 2]))
    else:
        w_W = tl.arange(0, WIDTH)
        at = stat_ptr + row_M[:, None] * (2 * SHARE * WIDTH) + head_M[:, None]
        at += w_W[None, :] * (2 * SHARE)
        top_MW = tl.load(at, mask=inside_M[:, None], other=0.0)
        total_MW = tl.load(at + SHARE, mask=inside_M[:, None], other=0.0)
    return top_MW, total_MW


@triton.jit
def _with_past(
    top_M, sum_M, acc_MV, idx_ptr, part_ptr, stat_ptr, slice_list, i_M, head_M, inside_M, v_V,
    t_count, scale_log2, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, SHARE: tl.constexpr,
    V: tl.constexpr, M: tl.constexpr, VP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The own block's softmax merged with those of the past blocks."""
    w_W = tl.arange(0, WIDTH)
    row_M = slice_list.to(tl.int64) * t_count + i_M
    idx_at = idx_ptr + row_M[:, None] * WIDTH + w_W[None, :]
    there_MW = tl.load(idx_at, mask=inside_M[:, None], other=-1) >= 0
    top_MW, total_MW = _stats(stat_ptr, row_M, head_M, inside_M, WIDTH, SHARE, M)
    top_MW = tl.where(there_MW, top_MW, float("-inf"))  # what was not written may be anything
    all_M = tl.maximum(top_M, tl.max(top_MW, 1))
    safe_M = safe_top(all_M)
    weight_MW = tl.where(there_MW, total_MW * tl.exp2((top_MW - safe_M[:, None]) * scale_log2), 0.0)
    shrink_M = tl.exp2((top_M - safe_M) * scale_log2)
    sum_M = sum_M * shrink_M + tl.sum(weight_MW, 1)
    acc_MV = acc_MV * shrink_M[:, None]
    # The valid places of a list come first.
    count_M = tl.sum(there_MW.to(tl.int32), 1)
    for place in tl.range(0, tl.max(count_M, 0), num_stages=STAGES):
        valid_M = place < count_M
        part_M = row_M * CHOSEN + place
        if SHARE == 1:
            weight_M = tl.sum(tl.where((w_W == place)[None, :], weight_MW, 0.0), 1)
        else:
            # Read once more, from a cache: there are more weights than registers to keep them in.
            stat_at = stat_ptr + (row_M * WIDTH + place) * (2 * SHARE) + head_M
            weight_M = tl.load(stat_at, mask=valid_M, other=float("-inf"))
            weight_M = tl.exp2((weight_M - safe_M) * scale_log2)
            weight_M *= tl.load(stat_at + SHARE, mask=valid_M, other=0.0)
            part_M = part_M * SHARE + head_M
        x_MV = tl.load(
            part_ptr + part_M[:, None] * V + v_V[None, :],
            mask=valid_M[:, None] if V == VP else valid_M[:, None] & (v_V < V)[None, :],
            other=0.0,
        )
        acc_MV += x_MV.to(tl.float32) * weight_M[:, None]
    return all_M, sum_M, acc_MV


@triton.jit
def _combine_tile(
    q_ptr, k_ptr, v_ptr, idx_ptr, part_ptr, stat_ptr, out_ptr, lse_ptr,
    lo_ptr, hi_ptr, own_ptr, mask_ptr, tile, slice_list, head_slice,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_ot, stride_od,
    scale_log2, S, T, start, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SHARE: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    STAGES: tl.constexpr, MERGE_STAGES: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, OWN_LISTED: tl.constexpr, EXACT_DOT: tl.constexpr,
    CLEAN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One tile of queries; returns whether a sum of the own block is not finite."""
    b, h, g = heads_of(head_begin + slice_list, heads, group, SHARE)
    b, h, g = b.to(tl.int64), h.to(tl.int64), g.to(tl.int64)
    entry_M, head_M, known_M = entries_of(head_slice, M, SHARE, SPAN)
    i_M = tile * (M // SPAN) + entry_M
    inside_M = i_M < t_count
    if SHARE > 1:
        inside_M = inside_M & known_M
    t_M = t_begin + i_M
    d_D, v_V, n_N = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, TILE_N)
    if PLAIN:
        slot_M = start + t_M
        lo_M = tl.maximum(slot_M, 0) // BLOCK * BLOCK
        hi_M = tl.where(inside_M, tl.maximum(slot_M + 1, lo_M), lo_M)
    else:
        lo_M = tl.load(lo_ptr + b * T + t_M, mask=inside_M, other=0)
        hi_M = tl.load(hi_ptr + b * T + t_M, mask=inside_M, other=0)
    if OWN_LISTED:
        listed = tl.load(own_ptr + slice_list.to(tl.int64) * t_count + i_M, mask=inside_M, other=0)
        hi_M = tl.where(listed != 0, hi_M, lo_M)
    q_at = q_ptr + b * stride_qb + h * stride_qh + t_M.to(tl.int64)[:, None] * stride_qt
    if SHARE > 1:
        q_at += head_M.to(tl.int64)[:, None] * stride_qh
    q_mask = inside_M[:, None] & (d_D < D)[None, :]
    q_MD = tl.load(q_at + d_D[None, :] * stride_qd, mask=q_mask, other=0.0)
    k_base = k_ptr + b * stride_kb + g * stride_kg
    v_base = v_ptr + b * stride_vb + g * stride_vg
    mask_base = mask_ptr
    if MASKED:
        mask_base += b * S

    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    acc_MV = tl.zeros([M, VP], tl.float32)
    bad_M = tl.zeros([M], tl.int32)
    sees_M = hi_M > lo_M
    end = tl.max(tl.where(sees_M, hi_M, 0), 0)
    # At most `end`: the pipeline adds steps to it even if there is nothing to do.
    begin = tl.min(tl.where(sees_M, lo_M, end), 0)
    # Tiles that all rows see whole come first: from the last `lo` up to the first `hi`.
    whole = tl.min(tl.where(inside_M, tl.where(sees_M, hi_M, 0), 0x7FFFFFFF), 0)
    middle = begin
    if SPLIT:
        if tl.max(tl.where(inside_M, lo_M, 0), 0) == begin:
            middle = begin + tl.maximum(whole - begin, 0) // TILE_N * TILE_N
    if SPLIT:
        for j in tl.range(begin, middle, TILE_N, num_stages=STAGES):
            top_M, sum_M, acc_MV, bad_M = _own_step(
                top_M, sum_M, acc_MV, bad_M, q_MD, k_base, v_base, mask_base, j, n_N, d_D, v_V,
                lo_M, hi_M, stride_ks, stride_kd, stride_vs, stride_vd, scale_log2, end,
                D, DP, V, VP, CLEAN, CLEAN, MASKED, EXACT_DOT,
            )  # fmt: skip
    for j in tl.range(middle, end, TILE_N, num_stages=1 if SPLIT or CLEAN else STAGES):
        top_M, sum_M, acc_MV, bad_M = _own_step(
            top_M, sum_M, acc_MV, bad_M, q_MD, k_base, v_base, mask_base, j, n_N, d_D, v_V,
            lo_M, hi_M, stride_ks, stride_kd, stride_vs, stride_vd, scale_log2, end,
            D, DP, V, VP, True, CLEAN, MASKED, EXACT_DOT,
        )  # fmt: skip
    # Not a sum of sums: triton 3.6 has no layout for one on sm_100.
    odd = tl.sum(tl.reshape(acc_MV * 0.0, [M * VP]), 0) != 0.0
    if CHOSEN > 0:
        top_M, sum_M, acc_MV = _with_past(
            top_M, sum_M, acc_MV, idx_ptr, part_ptr, stat_ptr, slice_list, i_M, head_M,
            inside_M, v_V, t_count, scale_log2, WIDTH, CHOSEN, SHARE, V, M, VP, MERGE_STAGES,
        )  # fmt: skip
    o_MV = tl.where((bad_M > 0)[:, None], float("nan"), acc_MV / sum_M[:, None])
    o_MV = tl.where((sum_M == 0.0)[:, None], 0.0, o_MV)  # no key, or all logits -inf
    out = out_ptr + b * stride_ob + h * stride_oh + t_M.to(tl.int64)[:, None] * stride_ot
    if SHARE > 1:
        out += head_M.to(tl.int64)[:, None] * stride_oh
    tl.store(
        out + v_V[None, :] * stride_od,
        o_MV.to(out_ptr.dtype.element_ty),
        mask=inside_M[:, None] & (v_V < V)[None, :],
    )
    # One operation, or each of the two kernels would round as its compiler likes.
    lse_M = tl.fma(safe_top(top_M), scale_log2 * LN2, tl.log(sum_M))
    tl.store(lse_ptr + (b * heads + h + head_M) * T + t_M, lse_M, mask=inside_M)
    return odd


@triton.jit(do_not_specialize=LENGTHS)
def combine_fwd_kernel(
    q_ptr, k_ptr, v_ptr, idx_ptr, part_ptr, stat_ptr, out_ptr, lse_ptr,
    lo_ptr, hi_ptr, own_ptr, mask_ptr, odd_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_ot, stride_od,
    scale_log2, S, T, start, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SHARE: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    STAGES: tl.constexpr, MERGE_STAGES: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, OWN_LISTED: tl.constexpr, EXACT_DOT: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp; tiles to be computed once more are marked in `odd_ptr`.

    `CHOSEN` 0: no past blocks. OWN_LISTED: rows whose own block is not in their list do not see it
    (`own_ptr`). SPLIT: the tiles of the own block that all rows see have a loop of their own.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.program_id(1)
    slices: tl.constexpr = (SHARE + SPAN - 1) // SPAN
    odd = _combine_tile(
        q_ptr, k_ptr, v_ptr, idx_ptr, part_ptr, stat_ptr, out_ptr, lse_ptr,
        lo_ptr, hi_ptr, own_ptr, mask_ptr, tile, row // slices, row % slices,
        stride_qb, stride_qh, stride_qt, stride_qd,
        stride_kb, stride_kg, stride_ks, stride_kd,
        stride_vb, stride_vg, stride_vs, stride_vd,
        stride_ob, stride_oh, stride_ot, stride_od,
        scale_log2, S, T, start, t_begin, t_count, head_begin,
        heads, group, BLOCK, WIDTH, CHOSEN, D, DP, V, VP, SHARE, SPAN, M, TILE_N, STAGES,
        MERGE_STAGES, PLAIN, MASKED, OWN_LISTED, EXACT_DOT, False, SPLIT,
    )  # fmt: skip
    tl.store(odd_ptr + row * tl.num_programs(0) + tile, odd.to(tl.int8))


@triton.jit(do_not_specialize=LENGTHS)
def combine_clean_fwd_kernel(
    q_ptr, k_ptr, v_ptr, idx_ptr, part_ptr, stat_ptr, out_ptr, lse_ptr,
    lo_ptr, hi_ptr, own_ptr, mask_ptr, odd_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    stride_ob, stride_oh, stride_ot, stride_od,
    scale_log2, S, T, start, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SHARE: tl.constexpr, SPAN: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    STAGES: tl.constexpr, MERGE_STAGES: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, OWN_LISTED: tl.constexpr, EXACT_DOT: tl.constexpr,
    FLAGS: tl.constexpr,
):  # fmt: skip
    """The marked tiles among `FLAGS` once more, with 0 for values that are not finite."""
    tiles = tl.cdiv(t_count, M // SPAN)
    first = tl.program_id(0) * FLAGS
    f_F = first + tl.arange(0, FLAGS)
    row = tl.program_id(1)
    slices: tl.constexpr = (SHARE + SPAN - 1) // SPAN
    marks = tl.load(odd_ptr + row * tiles + f_F, mask=f_F < tiles, other=0)
    if tl.max(marks.to(tl.int32), 0) != 0:
        for tile in range(first, tl.minimum(first + FLAGS, tiles)):
            if tl.load(odd_ptr + row * tiles + tile) != 0:
                _combine_tile(
                    q_ptr, k_ptr, v_ptr, idx_ptr, part_ptr, stat_ptr, out_ptr, lse_ptr,
                    lo_ptr, hi_ptr, own_ptr, mask_ptr, tile, row // slices, row % slices,
                    stride_qb, stride_qh, stride_qt, stride_qd,
                    stride_kb, stride_kg, stride_ks, stride_kd,
                    stride_vb, stride_vg, stride_vs, stride_vd,
                    stride_ob, stride_oh, stride_ot, stride_od,
                    scale_log2, S, T, start, t_begin, t_count, head_begin,
                    heads, group, BLOCK, WIDTH, CHOSEN, D, DP, V, VP, SHARE, SPAN, M, TILE_N,
                    STAGES, MERGE_STAGES, PLAIN, MASKED, OWN_LISTED, EXACT_DOT, True, False,
                )  # fmt: skip
