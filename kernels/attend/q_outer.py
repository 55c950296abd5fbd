"""Attention over chosen past blocks, query by query: for few queries over many keys.

One program per query, head and chosen block; it writes what a work item of `kv_outer` writes, so
`combine` finishes both. Without lists of queries per block there are fewer kernels to start, and a
block is read once for every query that chose it. The heads that share a list are the rows of one
tile.

Legend: M heads of a tile, N keys of a tile, D key size, V value size.
"""

import triton
import triton.language as tl

from sparsify.kernels.attend.pieces import LENGTHS, block_of, dot, heads_of, safe_top, softmax_step

__all__ = ["query_block_fwd_kernel", "shared_query_fwd_kernel"]


@triton.jit(do_not_specialize=LENGTHS)
def query_block_fwd_kernel(
    q_ptr, k_ptr, v_ptr, idx_ptr, part_ptr, stat_ptr,
    slot_ptr, keys_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    scale_log2, S, N, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    TILE_N: tl.constexpr, STAGES: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Softmax of one query over one block."""
    i = (tl.program_id(0) // CHOSEN).to(tl.int64)
    place = tl.program_id(0) % CHOSEN
    slice_head = tl.program_id(1).to(tl.int64)
    head = head_begin + slice_head
    b, h = head // heads, head % heads
    g = h // group
    at = (slice_head * t_count + i) * WIDTH + place
    c = tl.load(idx_ptr + at)
    if c >= 0:
        slot, keys = block_of(slot_ptr, keys_ptr, b, c, S, N, BLOCK, PLAIN)
        d_D, v_V, n_N = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, TILE_N)
        q_at = q_ptr + b * stride_qb + h * stride_qh + (t_begin + i) * stride_qt
        q_D = tl.load(q_at + d_D * stride_qd, mask=d_D < D, other=0.0).to(tl.float32)
        k_base = k_ptr + b * stride_kb + g * stride_kg
        v_base = v_ptr + b * stride_vb + g * stride_vg
        top = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc_V = tl.zeros([VP], tl.float32)
        for j in tl.range(0, BLOCK, TILE_N, num_stages=STAGES):
            real_N = j + n_N < keys
            if MASKED:
                real = tl.load(mask_ptr + b * S + slot + j + n_N, mask=real_N, other=0)
                real_N = real_N & (real != 0)
            key_N = (slot + j + n_N).to(tl.int64)
            k_ND = tl.load(
                k_base + key_N[:, None] * stride_ks + d_D[None, :] * stride_kd,
                mask=real_N[:, None] & (d_D < D)[None, :],
                other=0.0,
            )
            v_NV = tl.load(
                v_base + key_N[:, None] * stride_vs + v_V[None, :] * stride_vd,
                mask=real_N[:, None] & (v_V < V)[None, :],
                other=0.0,
            )
            s_N = tl.sum(k_ND.to(tl.float32) * q_D[None, :], 1)
            s_N = tl.where(real_N, s_N, float("-inf"))
            new = tl.maximum(top, tl.max(s_N, 0))
            safe = safe_top(new)
            p_N = tl.exp2((s_N - safe) * scale_log2)
            shrink = tl.exp2((top - safe) * scale_log2)
            total = total * shrink + tl.sum(p_N, 0)
            acc_V = acc_V * shrink + tl.sum(p_N[:, None] * v_NV.to(tl.float32), 0)
            top = new
        o_V = acc_V / tl.where(total == 0.0, 1.0, total)
        row = (slice_head * t_count + i) * CHOSEN + place
        o_V = o_V.to(part_ptr.dtype.element_ty)
        tl.store(part_ptr + row * V + v_V, o_V, mask=v_V < V)
        one = tl.arange(0, 1)
        tl.store(stat_ptr + 2 * at + one, top)
        tl.store(stat_ptr + 2 * at + 1 + one, total)


@triton.jit(do_not_specialize=LENGTHS)
def shared_query_fwd_kernel(
    q_ptr, k_ptr, v_ptr, idx_ptr, part_ptr, stat_ptr,
    slot_ptr, keys_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    stride_vb, stride_vg, stride_vs, stride_vd,
    scale_log2, S, N, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    CHOSEN: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    SHARE: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr, STAGES: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """Softmax of one query over one block, for `M` of the heads that share its list."""
    i = (tl.program_id(0) // CHOSEN).to(tl.int64)
    place = tl.program_id(0) % CHOSEN
    slices: tl.constexpr = (SHARE + M - 1) // M
    slice_list = (tl.program_id(1) // slices).to(tl.int64)
    at = (slice_list * t_count + i) * WIDTH + place
    c = tl.load(idx_ptr + at)
    if c >= 0:
        b, h, g = heads_of(head_begin + slice_list, heads, group, SHARE)
        slot, keys = block_of(slot_ptr, keys_ptr, b, c, S, N, BLOCK, PLAIN)
        d_D, v_V, n_N = tl.arange(0, DP), tl.arange(0, VP), tl.arange(0, TILE_N)
        head_M = tl.program_id(1) % slices * M + tl.arange(0, M)
        known_M = head_M < SHARE
        q_at = q_ptr + b * stride_qb + (h + head_M)[:, None] * stride_qh + (t_begin + i) * stride_qt
        q_MD = tl.load(
            q_at + d_D[None, :] * stride_qd, mask=known_M[:, None] & (d_D < D)[None, :], other=0.0
        )
        k_base = k_ptr + b * stride_kb + g * stride_kg
        v_base = v_ptr + b * stride_vb + g * stride_vg
        top_M = tl.full([M], float("-inf"), tl.float32)
        sum_M = tl.zeros([M], tl.float32)
        acc_MV = tl.zeros([M, VP], tl.float32)
        for j in tl.range(0, BLOCK, TILE_N, num_stages=STAGES):
            real_N = j + n_N < keys
            if MASKED:
                real = tl.load(mask_ptr + b * S + slot + j + n_N, mask=real_N, other=0)
                real_N = real_N & (real != 0)
            key_N = (slot + j + n_N).to(tl.int64)
            k_DN = tl.load(
                k_base + key_N[None, :] * stride_ks + d_D[:, None] * stride_kd,
                mask=real_N[None, :] & (d_D < D)[:, None],
                other=0.0,
            )
            v_NV = tl.load(
                v_base + key_N[:, None] * stride_vs + v_V[None, :] * stride_vd,
                mask=real_N[:, None] & (v_V < V)[None, :],
                other=0.0,
            )
            s_MN = tl.where(real_N[None, :], dot(q_MD, k_DN, EXACT_DOT), float("-inf"))
            top_M, sum_M, acc_MV = softmax_step(
                top_M, sum_M, acc_MV, s_MN, v_NV, scale_log2, EXACT_DOT
            )
        o_MV = acc_MV / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        row_M = ((slice_list * t_count + i) * CHOSEN + place) * SHARE + head_M
        tl.store(
            part_ptr + row_M[:, None] * V + v_V[None, :],
            o_MV.to(part_ptr.dtype.element_ty),
            mask=known_M[:, None] & (v_V < V)[None, :],
        )
        stats = stat_ptr + at * (2 * SHARE) + head_M
        tl.store(stats, top_M, mask=known_M)
        tl.store(stats + SHARE, sum_M, mask=known_M)
