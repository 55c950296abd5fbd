"""Small pieces that the attention kernels share.

Legend: M rows of a tile, D key size, V value size.
"""

import triton
import triton.language as tl

__all__ = [
    "LENGTHS",
    "block_of",
    "dot",
    "entries_of",
    "heads_of",
    "row_load",
    "row_store",
    "safe_top",
    "softmax_step",
]

# One compilation serves all lengths and head counts.
LENGTHS = ["S", "T", "N", "start", "t_begin", "t_count", "head_begin", "heads", "group"]


@triton.jit
def dot(a, b, EXACT_DOT: tl.constexpr):
    precision: tl.constexpr = "ieee" if EXACT_DOT else "tf32"
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def heads_of(first_list, heads, group, SHARE: tl.constexpr):
    """Batch row, first query head and key group of a list; lists are counted through the batch."""
    lists = heads // SHARE
    b, h = first_list // lists, first_list % lists * SHARE
    return b, h, h // group


@triton.jit
def entries_of(head_slice, M: tl.constexpr, SHARE: tl.constexpr, SPAN: tl.constexpr):
    """Which entry of the tile a row belongs to, and which of the heads that share a list; rows
    behind the last head repeat it, and are not `known`."""
    m_M = tl.arange(0, M)
    if SHARE == 1:
        entry_M, head_M = m_M, tl.zeros([M], tl.int32)
        known_M = m_M < M
    else:
        entry_M, head_M = m_M // SPAN, head_slice * SPAN + m_M % SPAN
        known_M = head_M < SHARE
        if SHARE % SPAN != 0:
            head_M = tl.minimum(head_M, SHARE - 1)
    return entry_M, head_M, known_M


@triton.jit
def row_load(at_MD, d_D, D: tl.constexpr, DP: tl.constexpr):
    """Rows of `D` numbers, padded with 0 to `DP`."""
    if D == DP:
        rows = tl.load(at_MD)
    else:
        rows = tl.load(at_MD, mask=(d_D < D)[None, :], other=0.0)
    return rows


@triton.jit
def row_store(at_MV, rows, inside_M, v_V, V: tl.constexpr, VP: tl.constexpr):
    if V == VP:
        tl.store(at_MV, rows, mask=inside_M[:, None])
    else:
        tl.store(at_MV, rows, mask=inside_M[:, None] & (v_V < V)[None, :])


@triton.jit
def block_of(slot_ptr, keys_ptr, b, c, S, N, BLOCK: tl.constexpr, PLAIN: tl.constexpr):
    """First slot of a block, and its keys."""
    if PLAIN:
        slot = c * BLOCK
        keys = tl.minimum(S - slot, BLOCK)
    else:
        slot = tl.load(slot_ptr + b * N + c)
        keys = tl.load(keys_ptr + b * N + c)
    return slot, keys


@triton.jit
def safe_top(top_M):
    """The maximum to subtract: 0 where no score is above -inf."""
    return tl.where(top_M == float("-inf"), 0.0, top_M)


@triton.jit
def softmax_step(top_M, sum_M, acc_MV, s_MN, v_NV, scale_log2, EXACT_DOT: tl.constexpr):
    """A running softmax, further by the scores of one tile of keys."""
    new_M = tl.maximum(top_M, tl.max(s_MN, 1))
    safe_M = safe_top(new_M)
    p_MN = tl.exp2((s_MN - safe_M[:, None]) * scale_log2)
    shrink_M = tl.exp2((top_M - safe_M) * scale_log2)
    sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
    acc_MV = acc_MV * shrink_M[:, None]
    acc_MV += dot(p_MN.to(v_NV.dtype), v_NV, EXACT_DOT)
    return new_M, sum_M, acc_MV
