"""MSA's choice of blocks for a few queries over a cache: scores, then the best of them.

*Score* walks over the index keys once, however many queries and groups share them, and writes one
number per row and block; the blocks of a sequence are dealt out to many programs. Scores are
written as whole numbers that sort by the rule of `kernels.ranking`: no candidate, NaN, -inf ..
+inf. Where a program attends one place of a list, it finds that place in the scores by itself, see
`place_of`. Otherwise *top* ranks 64-bit keys, a segment of a row at a time; where a row has several
segments, the attention kernel takes the best of the best.

Positions are counted from the first key of block 0. Lengths, origins and pages are read here, so a
captured graph may be replayed with other values. What they describe is clamped: no kernel reads
outside its tensors.

Legend: M rows (queries of one or of all groups), N keys of a tile, D index size, P blocks of a
tile, C blocks of a chunk, L list length.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsify.kernels.select.msa_scores import largest, sorting_number
from sparsify.kernels.select.query_terms import row_terms, sum_of_products

__all__ = [
    "best_numbers",
    "decode_score_fwd_kernel",
    "decode_top_fwd_kernel",
    "page_of",
    "past_end",
    "place_of",
    "span_of",
]

NONE32 = tl.constexpr(-0x80000000)
NONE64 = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
NO_BLOCK = tl.constexpr(0x7FFFFFFF)
FAR = tl.constexpr(0x3FFFFFFF)


@triton.jit
def span_of(kv_len_ptr, start_ptr, origin_ptr, b, S, T):
    """Slot of the first key of block 0, key slots from there on, and the position of query 0."""
    length = S
    if kv_len_ptr is not None:
        given = tl.load(kv_len_ptr + b)
        length = tl.minimum(tl.maximum(given, 0), S).to(tl.int32)
    start = length - T
    if start_ptr is not None:
        given = tl.load(start_ptr + b)
        start = tl.minimum(tl.maximum(given, -FAR), FAR).to(tl.int32)
    origin = length * 0
    if origin_ptr is not None:
        given = tl.load(origin_ptr + b)
        origin = tl.minimum(tl.maximum(given, 0), length).to(tl.int32)
    return origin, length - origin, start - origin


@triton.jit
def past_end(p, keys, BLOCK: tl.constexpr, OWN: tl.constexpr):
    """How many blocks the query at position `p` may choose from; with OWN its own one, too."""
    own = tl.maximum(p, 0) // BLOCK
    if OWN:
        own += 1
    own = tl.where(p < 0, 0, own)
    return tl.minimum(own, (keys + BLOCK - 1) // BLOCK)


@triton.jit
def page_of(table_ptr, stride_tb, b, c, inside, pages):
    """The page that holds block `c`; entries that name none read another one."""
    page = tl.load(table_ptr + b * stride_tb + c, mask=inside, other=0)
    return tl.minimum(tl.maximum(page, 0), pages - 1).to(tl.int64)


@triton.jit
def _index_keys(
    ik, table_ptr, b, j, origin, keys, c, page, tile, n_N,
    stride_kb, stride_kj, stride_ks, stride_kd, stride_tb, pages,
    BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE_N: tl.constexpr,
    PER: tl.constexpr, BY_TMA: tl.constexpr,
):  # fmt: skip
    """A tile of index keys; what lies behind the last key is anything."""
    inside_N = tile * TILE_N + n_N < PER * BLOCK
    x_N = c * BLOCK + tile * TILE_N + n_N
    real_N = inside_N & (x_N < keys)
    if BY_TMA:
        if table_ptr is not None:
            k_ND = ik.load([page.to(tl.int32), j, tile * TILE_N, 0])
        else:
            k_ND = ik.load([b.to(tl.int32), j, origin + c * BLOCK + tile * TILE_N, 0])
        k_ND = tl.reshape(k_ND, [TILE_N, DP])
    else:
        d_D = tl.arange(0, DP)
        base = ik + j.to(tl.int64) * stride_kj
        if table_ptr is None:
            at_N = b * stride_kb + (origin + x_N).to(tl.int64) * stride_ks
        elif PER == 1:
            at_N = page * stride_kb + (tile * TILE_N + n_N).to(tl.int64) * stride_ks
        else:
            page_N = page_of(table_ptr, stride_tb, b, x_N // BLOCK, real_N, pages)
            at_N = page_N * stride_kb + (n_N % BLOCK).to(tl.int64) * stride_ks
        at = base + at_N[:, None] + d_D[None, :] * stride_kd
        k_ND = tl.load(at, mask=real_N[:, None] & (d_D < D)[None, :], other=0.0)
    return k_ND, x_N, real_N


@triton.jit
def _products(terms, k_ND, TERMS: tl.constexpr, EXACT_DOT: tl.constexpr):
    """Scores in float32; of two dtypes the narrower one is widened."""
    if EXACT_DOT:
        q_MD, k_ND = terms[0].to(tl.float32), k_ND.to(tl.float32)
        x_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    elif TERMS > 1:
        x_MN = sum_of_products(terms, tl.trans(k_ND), TERMS)
    else:
        q_MD = terms[0]
        if q_MD.dtype.primitive_bitwidth < k_ND.dtype.primitive_bitwidth:
            q_MD = q_MD.to(k_ND.dtype)
        else:
            k_ND = k_ND.to(q_MD.dtype)
        x_MN = tl.dot(q_MD, tl.trans(k_ND))
    return x_MN


@triton.jit
def _part_of(
    task, shares, kv_len_ptr, start_ptr, origin_ptr, S, T, B,
    BLOCK: tl.constexpr, PER: tl.constexpr, UNION: tl.constexpr, EVEN: tl.constexpr,
    BP: tl.constexpr,
):  # fmt: skip
    """Sequence of a program, and its tiles of blocks, first and behind the last.

    EVEN: as many programs for every sequence. Otherwise a program has equally many tiles whatever
    the lengths are: with `shares` - B + 1 equal parts in all, what is rounded up in each of B
    sequences is at most `shares` parts.
    """
    if EVEN:
        each = shares // B
        b, part = task // each, task % each
        _, keys, first = span_of(kv_len_ptr, start_ptr, origin_ptr, b, S, T)
        end = tl.cdiv(past_end(first + T - 1, keys, BLOCK, UNION), PER)
        size = tl.cdiv(end, each)
    else:
        b_B = tl.arange(0, BP)
        clamped_B = tl.minimum(b_B, B - 1)
        _, keys_B, first_B = span_of(kv_len_ptr, start_ptr, origin_ptr, clamped_B, S, T)
        end_B = tl.cdiv(past_end(first_B + T - 1, keys_B, BLOCK, UNION), PER)
        end_B = tl.where(b_B < B, end_B, 0)
        size = tl.maximum(tl.cdiv(tl.sum(end_B, 0), shares - B + 1), 1)
        parts_B = tl.cdiv(end_B, size)
        upto_B = tl.cumsum(parts_B, 0)
        b = tl.minimum(tl.sum((upto_B <= task).to(tl.int32), 0), B - 1)
        part = task - tl.sum(tl.where(b_B == b, upto_B - parts_B, 0), 0)
        end = tl.sum(tl.where(b_B == b, end_B, 0), 0)
    begin = part * size
    return b.to(tl.int64), begin, tl.minimum(begin + size, end)


@triton.jit(do_not_specialize=["stride_mb", "stride_tb", "S", "N", "pages", "shares", "B"])
def decode_score_fwd_kernel(
    iq_ptr, ik, order_ptr,
    kv_len_ptr, start_ptr, origin_ptr, mask_ptr, table_ptr,
    stride_qb, stride_qg, stride_qt, stride_qd,
    stride_kb, stride_kj, stride_ks, stride_kd,
    stride_mb, stride_tb,
    S, N, pages, shares, B,
    T: tl.constexpr, GROUPS: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    TILES: tl.constexpr, PER: tl.constexpr, STAGES: tl.constexpr, UNION: tl.constexpr,
    BY_TMA: tl.constexpr, EXACT_DOT: tl.constexpr, TERMS: tl.constexpr, EVEN: tl.constexpr,
    BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`order` [B, T, G, N] int32 of every block that some query of the row may choose.

    SHARED: one index key for all groups. A tile holds a part of a block (TILES of them) or several
    blocks (PER). UNION: the own block is scored by what a query sees of it. `shares` programs deal
    out the blocks of all `B` sequences, see `_part_of`. TERMS: of a query, see `query_terms`.
    """
    if PDL:
        gdc_launch_dependents()
    ROWS: tl.constexpr = T * GROUPS if SHARED else T
    ROW_TILES: tl.constexpr = (ROWS + M - 1) // M
    KEYS_OF: tl.constexpr = 1 if SHARED else GROUPS
    row_tile = tl.program_id(0) % ROW_TILES
    j = tl.program_id(0) // ROW_TILES % KEYS_OF
    b, begin, behind = _part_of(
        tl.program_id(0) // (ROW_TILES * KEYS_OF), shares, kv_len_ptr, start_ptr, origin_ptr,
        S, T, B, BLOCK, PER, UNION, EVEN, BP,
    )  # fmt: skip
    origin, keys, first = span_of(kv_len_ptr, start_ptr, origin_ptr, b, S, T)

    r_M = row_tile * M + tl.arange(0, M)
    inside_M = r_M < ROWS
    t_M = r_M // GROUPS if SHARED else r_M
    g_M = r_M % GROUPS if SHARED else j + r_M * 0
    p_M = first + t_M
    d_D, n_N = tl.arange(0, DP), tl.arange(0, TILE_N)
    q_at = b * stride_qb + g_M.to(tl.int64) * stride_qg + t_M.to(tl.int64) * stride_qt
    q_MD = tl.load(
        iq_ptr + q_at[:, None] + d_D[None, :] * stride_qd,
        mask=inside_M[:, None] & (d_D < D)[None, :],
        other=0.0,
    )
    terms = (q_MD,)
    if TERMS > 1:
        terms = row_terms(q_MD.to(tl.float32), TERMS)
    out_M = order_ptr + ((b * T + t_M) * GROUPS + g_M) * N

    end = past_end(first + T - 1, keys, BLOCK, UNION)
    best_MP = tl.full([M, PER], float("-inf"), tl.float32)
    any_MP = tl.zeros([M, PER], tl.int32)
    # The page of the next tile is looked up ahead: loads that wait for one are fetched late.
    page = b
    if table_ptr is not None:
        page = page_of(table_ptr, stride_tb, b, begin * PER, begin < behind, pages)
    for step in tl.range(0, (behind - begin) * TILES, num_stages=STAGES):
        tile = step % TILES
        c = (begin + step // TILES) * PER
        k_ND, x_N, real_N = _index_keys(
            ik, table_ptr, b, j, origin, keys, c, page, tile, n_N,
            stride_kb, stride_kj, stride_ks, stride_kd, stride_tb, pages,
            BLOCK, D, DP, TILE_N, PER, BY_TMA,
        )  # fmt: skip
        if table_ptr is not None:
            ahead = begin + (step + 1) // TILES
            page = page_of(table_ptr, stride_tb, b, ahead * PER, ahead < behind, pages)
        if mask_ptr is not None:
            at_N = mask_ptr + b * stride_mb + origin + x_N
            real_N = real_N & (tl.load(at_N, mask=real_N, other=0) != 0)
        x_MN = _products(terms, k_ND, TERMS, EXACT_DOT)
        seen_MN = real_N[None, :] & (r_M >= 0)[:, None]
        if UNION:
            seen_MN = seen_MN & (x_N[None, :] <= p_M[:, None])
        x_MN = tl.where(seen_MN, x_MN, float("-inf"))
        new_MP = tl.reduce(tl.reshape(x_MN, [M, PER, TILE_N // PER]), 2, largest)
        if TILES > 1:
            new_MP = tl.where(tile == 0, new_MP, largest(best_MP, new_MP))
            best_MP = new_MP
        order_MP = sorting_number(new_MP)
        if mask_ptr is not None or UNION:
            there_MP = tl.max(tl.reshape(seen_MN.to(tl.int32), [M, PER, TILE_N // PER]), 2)
            if TILES > 1:
                there_MP = tl.where(tile == 0, there_MP, tl.maximum(any_MP, there_MP))
                any_MP = there_MP
            order_MP = tl.where(there_MP != 0, order_MP, NONE32)
        c_P = c + tl.arange(0, PER)
        written = tl.where(tile == TILES - 1, end, 0)
        tl.store(
            out_M[:, None] + c_P[None, :],
            order_MP,
            mask=inside_M[:, None] & (c_P < written)[None, :],
        )


@triton.jit
def best_numbers(key_L, CHOSEN: tl.constexpr, LENGTH: tl.constexpr):
    """Block numbers of the first `CHOSEN` keys, ascending, `NO_BLOCK` behind."""
    found_L = (key_L != NONE64) & (tl.arange(0, LENGTH) < CHOSEN)
    number_L = 0x7FFFFFFF - (key_L & 0xFFFFFFFF).to(tl.int32)
    return tl.sort(tl.where(found_L, number_L, NO_BLOCK))


@triton.jit
def _least_and_largest(least, largest, other_least, other_largest):
    return tl.minimum(least, other_least), tl.maximum(largest, other_largest)


@triton.jit
def place_of(
    order_ptr, end, own, place, C: tl.constexpr, CHOSEN: tl.constexpr, LENGTH: tl.constexpr
):
    """The block with the `place`-th number among the best `CHOSEN` of `end` blocks (0 if there are
    no more than `place`), and how many of these are not `own`, which is the last of the blocks or
    none of them.

    Nothing is sorted: the lowest score among the best is searched between bounds, two scores in
    between at a time, and what reaches it is counted off in the order of the blocks.
    """
    tl.static_assert(C <= 16384)  # two counts share a number
    c_C = tl.arange(0, C)
    x_C = tl.load(order_ptr + c_C, mask=c_C < end, other=NONE32)
    # Each of LENGTH parts has a score as high as the lowest of their maxima.
    top_L = tl.max(tl.reshape(x_C, [LENGTH, C // LENGTH]), 1)
    low, beyond = tl.reduce((top_L, top_L), 0, _least_and_largest)
    beyond += 1
    # `reached` scores are at least `low` (below 0: not yet counted), and too few at least `beyond`.
    reached, span = tl.full([], -1, tl.int32), (beyond - low).to(tl.uint32, bitcast=True)
    while (reached < 0) | ((span > 1) & (reached != CHOSEN)):
        step = tl.maximum(span // 3, 1).to(tl.int32, bitcast=True)
        lower = tl.where(reached < 0, low, low + step)
        upper = lower + step
        counts = tl.sum((x_C >= lower).to(tl.int32) + ((x_C >= upper).to(tl.int32) << 16), 0)
        reach_lower, reach_upper = counts & 0xFFFF, counts >> 16
        beyond = tl.where(reach_lower < CHOSEN, lower, beyond)
        beyond = tl.where((reach_lower >= CHOSEN) & (reach_upper < CHOSEN), upper, beyond)
        low = tl.where(reach_lower >= CHOSEN, lower, low)
        low = tl.where(reach_upper >= CHOSEN, upper, low)
        reached = tl.where(reach_lower >= CHOSEN, reach_lower, reached)
        reached = tl.where(reach_upper >= CHOSEN, reach_upper, reached)
        span = (beyond - low).to(tl.uint32, bitcast=True)
    best_C = (x_C >= low) & (x_C != NONE32)
    if reached > CHOSEN:  # of equal scores, those of the first blocks
        equal_C = (x_C == low).to(tl.int32)
        left = CHOSEN - reached + tl.sum(equal_C, 0)
        best_C = best_C & ((x_C != low) | (tl.cumsum(equal_C, 0) <= left))
    nth_C = tl.cumsum(best_C.to(tl.int32), 0)
    number_C = tl.where(best_C & (nth_C == place + 1), c_C, 0)
    counted_C = (best_C & (c_C != own)).to(tl.int32)
    both = tl.sum(number_C + (counted_C << 16), 0)
    return both & 0xFFFF, both >> 16


@triton.jit(do_not_specialize=["S", "N", "chunks"])
def decode_top_fwd_kernel(
    order_ptr, best_ptr, kv_len_ptr, start_ptr, origin_ptr,
    S, N, chunks,
    T: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, C: tl.constexpr,
    CHOSEN: tl.constexpr, LENGTH: tl.constexpr, SEGMENTS: tl.constexpr, UNION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The best blocks of every row: with one segment their numbers `[rows, L]` int32, ascending,
    with several the best keys of each `[rows, SEGMENTS, L]` int64. A segment has `chunks` chunks.
    """
    if PDL:
        gdc_launch_dependents()
    row = (tl.program_id(0) // SEGMENTS).to(tl.int64)
    segment = tl.program_id(0) % SEGMENTS
    b, t = row // (T * GROUPS), (row // GROUPS % T).to(tl.int32)
    _, keys, first = span_of(kv_len_ptr, start_ptr, origin_ptr, b, S, T)
    end = past_end(first + t, keys, BLOCK, UNION)
    c_C, l_L = tl.arange(0, C), tl.arange(0, LENGTH)
    best_L = tl.full([LENGTH], NONE64, tl.int64)
    if PDL:
        gdc_wait()
    begin = segment * chunks
    for chunk in range(begin, tl.minimum(begin + chunks, tl.cdiv(end, C))):
        number_C = chunk * C + c_C
        x_C = tl.load(order_ptr + row * N + number_C, mask=number_C < end, other=NONE32)
        key_C = (x_C.to(tl.int64) << 32) | (0x7FFFFFFF - number_C).to(tl.int64)
        new_L = tl.topk(tl.where(x_C == NONE32, NONE64, key_C), LENGTH)
        if chunk == begin:
            best_L = new_L
        else:
            best_L = tl.topk(tl.reshape(tl.join(best_L, new_L), [2 * LENGTH]), LENGTH)
    if SEGMENTS == 1:
        tl.store(best_ptr + row * LENGTH + l_L, best_numbers(best_L, CHOSEN, LENGTH))
    else:
        tl.store(best_ptr + (row * SEGMENTS + segment) * LENGTH + l_L, best_L)
