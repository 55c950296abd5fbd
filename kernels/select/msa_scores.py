"""MSA's index scores: the best key of every block for every query, as numbers that sort.

Rows are queries; where all index heads share one key head, a query and a head, so that a tile of
keys serves all heads. A block's score is written block by block, as a whole number that sorts by
the rule of `kernels.ranking`: no candidate, NaN, -inf .. +inf. What is written for a block that a
row may not choose is never read.

Past blocks are visible as a whole. Only where the own block competes too (UNION) do the blocks that
some row of a tile stands in need the causal mask.

Legend: M rows of a tile, N keys of a tile, P blocks of a tile, D index size.
"""

import triton
import triton.language as tl

from sparsify.kernels.select.query_terms import row_terms, sum_of_products

NO_CANDIDATE = tl.constexpr(-0x80000000)
NOT_A_NUMBER = tl.constexpr(-0x7FFFFFFF)
# One compilation serves all of them.
LENGTHS = ("T", "S", "N", "start", "t_begin", "t_count", "z_begin", "head_begin", "blocks")
LENGTHS += ("segment", "list_stride")

__all__ = [
    "LENGTHS",
    "NO_CANDIDATE",
    "block_range",
    "largest",
    "msa_scores_fwd_kernel",
    "sorting_number",
]


@triton.jit
def largest(a, b):
    """The larger one; NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sorting_number(x):
    """A float32 score as an int32 that sorts as the rule says; zeros of either sign are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x == x, order, NOT_A_NUMBER)


@triton.jit
def block_range(
    first_ptr, end_ptr, own_ptr, b, t_M, inside_M, T, N, start,
    BLOCK: tl.constexpr, PLAIN: tl.constexpr, UNION: tl.constexpr,
):  # fmt: skip
    """First past block of each query, the block behind the last, the block behind the last that
    may be chosen by score. Rows behind the end have none."""
    if PLAIN:
        slot_M = start + t_M
        end_M = tl.where(inside_M, tl.maximum(slot_M, 0) // BLOCK, 0)
        first_M = tl.where(inside_M, 0, N)
        own_M = inside_M & (slot_M >= 0)
    else:
        first_M = tl.load(first_ptr + b * T + t_M, mask=inside_M, other=0)
        end_M = tl.load(end_ptr + b * T + t_M, mask=inside_M, other=0)
        first_M = tl.where(inside_M, first_M, N)
        own_M = inside_M
        if UNION:
            own_M = tl.load(own_ptr + b * T + t_M, mask=inside_M, other=0) != 0
    reach_M = end_M
    if UNION:
        reach_M = end_M + own_M.to(tl.int32)
    return first_M, end_M, reach_M


@triton.jit
def _tile_slots(
    step, slot_ptr, count_ptr, b, S, N,
    BLOCK: tl.constexpr, TILE_N: tl.constexpr, PER: tl.constexpr, PARTS: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Key slots of the columns of a tile, and whether a column is a slot of its block."""
    n_N = tl.arange(0, TILE_N)
    columns: tl.constexpr = TILE_N // PER
    c_N = step // PARTS * PER + n_N // columns
    j_N = step % PARTS * TILE_N + n_N % columns
    if PLAIN:
        slot_N = c_N * BLOCK + j_N
        real_N = (j_N < BLOCK) & (slot_N < S)
    else:
        slot_N = tl.load(slot_ptr + b * N + c_N, mask=c_N < N, other=0) + j_N
        real_N = j_N < tl.load(count_ptr + b * N + c_N, mask=c_N < N, other=0)
    return slot_N, real_N


@triton.jit
def _tile_dots(
    terms, ik_ptr, step, slot_N, b, g, S, stride_kb, stride_kg, stride_ks, stride_kd,
    BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE_N: tl.constexpr,
    PER: tl.constexpr, PARTS: tl.constexpr, BY_TMA: tl.constexpr, EXACT_DOT: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """Products with one tile of keys, by descriptor or by pointer."""
    if BY_TMA:
        slot = step // PARTS * PER * BLOCK + step % PARTS * TILE_N
        k_ND = tl.reshape(ik_ptr.load([b, g, slot, 0]), [TILE_N, DP])
    else:
        d_D = tl.arange(0, DP)
        # Columns that are no slots of their block read some key; what comes of it is dropped.
        at_N = tl.minimum(slot_N, S - 1).to(tl.int64) * stride_ks
        at_ND = ik_ptr + b.to(tl.int64) * stride_kb + g.to(tl.int64) * stride_kg
        at_ND += at_N[:, None] + d_D[None, :] * stride_kd
        if D == DP:
            k_ND = tl.load(at_ND)
        else:
            k_ND = tl.load(at_ND, mask=(d_D < D)[None, :], other=0.0)
    if EXACT_DOT:
        x_MN = tl.dot(terms[0], tl.trans(k_ND), input_precision="ieee")
    else:
        x_MN = sum_of_products(terms, tl.trans(k_ND), TERMS)
    return x_MN


@triton.jit
def _by_block(x_MN, M: tl.constexpr, TILE_N: tl.constexpr, PER: tl.constexpr):
    """The columns of each block on an axis of their own, unless they are all of one."""
    if PER == 1:
        x = x_MN
    else:
        x = tl.reshape(x_MN, [M, PER, TILE_N // PER])
    return x


@triton.jit
def _walk(
    terms, ik_ptr, scores_M, slot_ptr, count_ptr, mask_ptr, seen_M, begin, end, b, g,
    S, N, blocks, row_stride, stride_kb, stride_kg, stride_ks, stride_kd,
    BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    PER: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, PLAIN: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BY_TMA: tl.constexpr, EXACT_DOT: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """Scores of the tiles `begin` to `end`; with CAUSAL of keys before slot `seen_M` only."""
    columns: tl.constexpr = TILE_N // PER
    # Columns that belong to no block, or to no key.
    cut: tl.constexpr = not PLAIN or columns * PARTS != BLOCK
    best_MP = tl.full([M], float("-inf"), tl.float32)  # of one block, cut into parts
    known_MP = tl.zeros([M], tl.int32)
    for step in tl.range(begin, end, num_stages=STAGES):
        slot_N, real_N = _tile_slots(
            step, slot_ptr, count_ptr, b, S, N, BLOCK, TILE_N, PER, PARTS, PLAIN
        )
        x_MN = _tile_dots(
            terms, ik_ptr, step, slot_N, b, g, S, stride_kb, stride_kg, stride_ks, stride_kd,
            BLOCK, D, DP, TILE_N, PER, PARTS, BY_TMA, EXACT_DOT, TERMS,
        )  # fmt: skip
        if MASKED:
            at_N = mask_ptr + b.to(tl.int64) * S + slot_N
            real_N = real_N & (tl.load(at_N, mask=real_N, other=0) != 0)
        if CAUSAL:
            keep_MN = real_N[None, :] & (slot_N[None, :] < seen_M[:, None])
            x_MN = tl.where(keep_MN, x_MN, float("-inf"))
        elif cut:
            keep_MN = real_N[None, :]
            x_MN = tl.where(keep_MN, x_MN, float("-inf"))
        top_MP = tl.reduce(_by_block(x_MN, M, TILE_N, PER), 1 if PER == 1 else 2, largest)
        again = step % PARTS > 0
        if PARTS > 1:
            top_MP = tl.where(again, largest(top_MP, best_MP), top_MP)
            best_MP = top_MP
        number_MP = sorting_number(top_MP)
        if MASKED:
            kept_MN = tl.broadcast_to(keep_MN, [M, TILE_N]).to(tl.int32)
            any_MP = tl.max(_by_block(kept_MN, M, TILE_N, PER), 1 if PER == 1 else 2)
            if PARTS > 1:
                any_MP = tl.where(again, any_MP | known_MP, any_MP)
                known_MP = any_MP
            number_MP = tl.where(any_MP != 0, number_MP, NO_CANDIDATE)
        _store(scores_M, number_MP, step // PARTS * PER, blocks, row_stride, PER)


@triton.jit
def _store(scores_M, number_MP, c, blocks, row_stride, PER: tl.constexpr):
    """Numbers of the blocks from `c` on; offsets within one list are less than 2**31."""
    if PER == 1:
        tl.store(scores_M + c * row_stride, number_MP)
    else:
        c_P = c + tl.arange(0, PER)
        at_MP = scores_M[:, None] + c_P[None, :] * row_stride
        tl.store(at_MP, number_MP, mask=(c_P < blocks)[None, :])


@triton.jit(do_not_specialize=LENGTHS)
def msa_scores_fwd_kernel(
    iq_ptr, ik_ptr, scores_ptr,
    first_ptr, end_ptr, own_ptr, seen_ptr, slot_ptr, count_ptr, mask_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    stride_kb, stride_kg, stride_ks, stride_kd,
    T, S, N, start, t_begin, t_count, z_begin, head_begin, blocks, row_stride, segment,
    OF_BATCH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    PER: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
    PLAIN: tl.constexpr, MASKED: tl.constexpr, UNION: tl.constexpr, OWN_ALONE: tl.constexpr,
    BY_TMA: tl.constexpr, EXACT_DOT: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Scores `[lists, blocks, row_stride]` of `t_count` queries times `HEADS` heads.

    The second program axis cuts the keys into segments of `segment` tiles, the third counts the
    lists of rows: `OF_BATCH` of each batch row. `PER` blocks fill a tile, or `PARTS` tiles a block.
    With OWN_ALONE the blocks before that of the first query of a tile are left out. With BY_TMA,
    ik is a descriptor. With more than one of TERMS, queries are float32 and keys of 16 bits.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    z = z_begin + tl.program_id(2)
    b, g = z // OF_BATCH, z % OF_BATCH
    row_M = tile * M + tl.arange(0, M)
    i_M = row_M // HEADS
    inside_M = i_M < t_count
    t_M = t_begin + i_M
    first_M, end_M, reach_M = block_range(
        first_ptr, end_ptr, own_ptr, b, t_M, inside_M, T, N, start, BLOCK, PLAIN, UNION
    )
    seen_M = start + t_M + 1
    if UNION and not PLAIN:
        seen_M = tl.load(seen_ptr + b * T + t_M, mask=inside_M, other=0)
    lowest = tl.min(first_M, 0) // PER * PARTS
    highest = tl.cdiv(tl.max(reach_M, 0), PER) * PARTS
    middle = highest
    if UNION:
        middle = lowest
        if PLAIN:
            middle = tl.min(tl.where(inside_M, end_M, N), 0) // PER * PARTS
    begin = tl.maximum(lowest, tl.program_id(1) * segment)
    end = tl.minimum(highest, (tl.program_id(1) + 1) * segment)

    d_D = tl.arange(0, DP)
    head_M = (g * HEADS + head_begin + row_M % HEADS).to(tl.int64)
    at_MD = iq_ptr + b.to(tl.int64) * stride_qb + head_M[:, None] * stride_qh
    at_MD += t_M.to(tl.int64)[:, None] * stride_qt + d_D[None, :] * stride_qd
    busy_M = i_M < tl.where(begin < end, t_count, 0)
    q_MD = tl.load(at_MD, mask=busy_M[:, None] & (d_D < D)[None, :], other=0.0)
    terms = row_terms(q_MD, TERMS)
    scores_M = scores_ptr + (tl.program_id(2) * blocks).to(tl.int64) * row_stride + row_M
    if not OWN_ALONE:
        if PLAIN or not UNION:
            _walk(
                terms, ik_ptr, scores_M, slot_ptr, count_ptr, mask_ptr, seen_M,
                begin, tl.minimum(end, middle), b, g, S, N, blocks, row_stride,
                stride_kb, stride_kg, stride_ks, stride_kd,
                BLOCK, D, DP, M, TILE_N, PER, PARTS, STAGES, PLAIN, MASKED, False,
                BY_TMA, EXACT_DOT, TERMS,
            )  # fmt: skip
    if UNION:
        _walk(
            terms, ik_ptr, scores_M, slot_ptr, count_ptr, mask_ptr, seen_M,
            tl.maximum(begin, middle), end, b, g, S, N, blocks, row_stride,
            stride_kb, stride_kg, stride_ks, stride_kd,
            BLOCK, D, DP, M, TILE_N, PER, PARTS, 1 if PLAIN else STAGES, PLAIN, MASKED, True,
            BY_TMA, EXACT_DOT, TERMS,
        )  # fmt: skip
