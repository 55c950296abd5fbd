"""MoBA's gate: scores of queries against block means, fused with the choice of the best blocks.

Three kernels. The *packed* one keeps short lists of float32 scores whose low bits hold the block
number, so that one comparison moves both; *merge* makes one list of a row's four, and flags the row
where the bits cut off could matter: two scores equal at the border, a list that was too short, a
score that is not finite. The *exact* one ranks 64-bit keys by the rule of `kernels.ranking` and
redoes flagged rows, or does all rows where the lists would be too short. Together they choose
exactly what the rule says of their float32 scores.

Legend: M queries of a tile, N block columns, D key size, L list length.
"""

import triton
import triton.language as tl

from sparsify.kernels.select.networks import (
    column_of,
    keep_largest,
    keep_largest_three,
    largest_of_lanes,
    lists_of_tile,
    merged_lists,
    sorted8,
)

NO_COLUMN = tl.constexpr(-0x40000000)
# One compilation serves all lengths and head counts.
_LENGTHS = ["T", "N", "start", "t_begin", "t_count", "head_begin", "heads", "group"]

__all__ = ["gate_exact_fwd_kernel", "gate_merge_fwd_kernel", "gate_packed_fwd_kernel"]


@triton.jit
def _candidates(
    first_ptr, end_ptr, b, t_M, inside_M, T, start, BLOCK: tl.constexpr, PLAIN: tl.constexpr
):
    """Range of the past blocks of each query."""
    if PLAIN:
        end_M = tl.maximum(start + t_M, 0) // BLOCK
        first_M = tl.zeros_like(end_M)
    else:
        first_M = tl.load(first_ptr + b * T + t_M, mask=inside_M, other=0)
        end_M = tl.load(end_ptr + b * T + t_M, mask=inside_M, other=0)
    return first_M, end_M


@triton.jit
def _scores(
    q_MD, means_ptr, c_N, N,
    D: tl.constexpr, DP: tl.constexpr, INSIDE: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """Scores of one tile of blocks; INSIDE when all of them exist."""
    d_D = tl.arange(0, DP)
    at = means_ptr + c_N[None, :] * D + d_D[:, None]
    if INSIDE and D == DP:
        mean_DN = tl.load(at)
    else:
        mean_DN = tl.load(at, mask=(c_N < N)[None, :] & (d_D < D)[:, None], other=0.0)
    if EXACT_DOT:
        x_MN = tl.dot(q_MD.to(tl.float32), mean_DN.to(tl.float32), input_precision="ieee")
    else:
        x_MN = tl.dot(q_MD, mean_DN)
    return x_MN


@triton.jit
def _packed_step(
    l0, l1, l2, l3, odd_M4, q_MD, means_ptr, real_ptr, c0, first_M, end_M, N,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, spare,
    LIST: tl.constexpr, MASKED: tl.constexpr, REAL: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """One tile of 64 blocks into the lists; `odd_M4` turns NaN where a score is not finite."""
    c_N = c0 + tl.arange(0, 64)
    x_MN = _scores(q_MD, means_ptr, c_N, N, D, DP, not MASKED, EXACT_DOT)
    low = (1 << spare) - 1
    bits_MN = (x_MN.to(tl.int32, bitcast=True) & ~low) | (c_N >> 4)[None, :]
    key_MN = bits_MN.to(tl.float32, bitcast=True)
    x0, x1, x2, x3 = lists_of_tile(key_MN, M)
    # Additions of the floating-point pipe, which the comparisons leave idle.
    odd_M4 += ((_sum4(x0) + _sum4(x1)) + (_sum4(x2) + _sum4(x3))) * 0.0
    if MASKED or REAL:
        keep_MN = tl.full([M, 64], True, tl.int1)
        if MASKED:
            keep_MN = (c_N[None, :] >= first_M[:, None]) & (c_N[None, :] < end_M[:, None])
        if REAL:
            keep_MN = keep_MN & (tl.load(real_ptr + c_N, mask=c_N < N, other=0) != 0)[None, :]
        x0, x1, x2, x3 = lists_of_tile(tl.where(keep_MN, key_MN, float("-inf")), M)
    if LIST == 3:
        l0, l1 = keep_largest_three(l0, x0), keep_largest_three(l1, x1)
        l2, l3 = keep_largest_three(l2, x2), keep_largest_three(l3, x3)
    else:
        l0, l1 = keep_largest(l0, x0), keep_largest(l1, x1)
        l2, l3 = keep_largest(l2, x2), keep_largest(l3, x3)
    return l0, l1, l2, l3, odd_M4


@triton.jit
def _sum4(x):
    return (x[0] + x[1]) + (x[2] + x[3])


@triton.jit(do_not_specialize=_LENGTHS)
def gate_packed_fwd_kernel(
    q_ptr, means_ptr, best_ptr, cut_ptr,
    first_ptr, end_ptr, real_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    T, N, start, t_begin, t_count, head_begin, heads, group, spare,
    BLOCK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, KEPT: tl.constexpr,
    LIST: tl.constexpr, STAGES: tl.constexpr,
    PLAIN: tl.constexpr, REAL: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """The `KEPT` (4 or 8) best past blocks of each query and lane, as values with their numbers:
    `best` [heads, KEPT, 4, t_count]; and in `cut` [heads, 4, t_count] the largest value at the end
    of a list, NaN where a score is not finite. Lists have `LIST` (3 or 4) values."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    slice_head = tl.program_id(1)
    head = head_begin + slice_head
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    i_M = tile * M + tl.arange(0, M)
    inside_M = i_M < t_count
    t_M = t_begin + i_M
    d_D = tl.arange(0, DP)
    q_MD = tl.load(
        q_ptr + b * stride_qb + h * stride_qh
        + t_M.to(tl.int64)[:, None] * stride_qt + d_D[None, :] * stride_qd,
        mask=inside_M[:, None] & (d_D < D)[None, :],
        other=0.0,
    )  # fmt: skip
    first_M, end_M = _candidates(first_ptr, end_ptr, b, t_M, inside_M, T, start, BLOCK, PLAIN)
    means = means_ptr + (b * (heads // group) + h // group) * N * D
    real = real_ptr
    if REAL:
        real += b * N

    none_M4 = tl.full([M, 4], float("-inf"), tl.float32)
    if LIST == 3:
        none = (none_M4, none_M4, none_M4)
    else:
        none = (none_M4, none_M4, none_M4, none_M4)
    l0, l1, l2, l3 = none, none, none, none
    odd_M4 = tl.zeros([M, 4], tl.float32)
    if PLAIN:
        # Rows behind the end have blocks too, which do no harm.
        begin, middle = 0, tl.min(end_M, 0) // 64
    else:
        begin = tl.min(tl.where(inside_M, first_M, N), 0) // 64
        middle = begin
    for tile_n in tl.range(begin, middle, num_stages=STAGES):
        l0, l1, l2, l3, odd_M4 = _packed_step(
            l0, l1, l2, l3, odd_M4, q_MD, means, real, tile_n * 64, first_M, end_M, N,
            D, DP, M, spare, LIST, False, REAL, EXACT_DOT,
        )  # fmt: skip
    last = tl.cdiv(tl.max(tl.where(inside_M, end_M, 0), 0), 64)
    for tile_n in tl.range(middle, last, num_stages=1 if PLAIN else STAGES):
        l0, l1, l2, l3, odd_M4 = _packed_step(
            l0, l1, l2, l3, odd_M4, q_MD, means, real, tile_n * 64, first_M, end_M, N,
            D, DP, M, spare, LIST, True, REAL, EXACT_DOT,
        )  # fmt: skip

    best, cut_M4 = merged_lists(l0, l1, l2, l3, LIST, spare)
    lane_M4 = tl.arange(0, 4)[None, :] * t_count + i_M[:, None]
    at = best_ptr + slice_head.to(tl.int64) * KEPT * 4 * t_count + lane_M4
    for place in tl.static_range(KEPT):
        tl.store(at + place * 4 * t_count, best[place], mask=inside_M[:, None])
    # A score that is not finite made `odd` NaN, and makes the border NaN too.
    at = cut_ptr + slice_head.to(tl.int64) * 4 * t_count + lane_M4
    tl.store(at, tl.where(odd_M4 == 0.0, cut_M4, float("nan")), mask=inside_M[:, None])


@triton.jit
def _lane(best_ptr, row, i_R, inside_R, t_count, LANE: tl.constexpr, KEPT: tl.constexpr):
    """The list of one lane, eight values; the places behind `KEPT` hold -inf."""
    none_R = tl.full(i_R.shape, float("-inf"), tl.float32)
    at = best_ptr + row * KEPT * 4 * t_count + LANE * t_count + i_R
    x0 = tl.load(at, mask=inside_R, other=float("-inf"))
    x1 = tl.load(at + 4 * t_count, mask=inside_R, other=float("-inf"))
    x2 = tl.load(at + 8 * t_count, mask=inside_R, other=float("-inf"))
    x3 = tl.load(at + 12 * t_count, mask=inside_R, other=float("-inf"))
    if KEPT == 8:
        x4 = tl.load(at + 16 * t_count, mask=inside_R, other=float("-inf"))
        x5 = tl.load(at + 20 * t_count, mask=inside_R, other=float("-inf"))
        x6 = tl.load(at + 24 * t_count, mask=inside_R, other=float("-inf"))
        x7 = tl.load(at + 28 * t_count, mask=inside_R, other=float("-inf"))
    else:
        x4, x5, x6, x7 = none_R, none_R, none_R, none_R
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _column_down_to(x_R, border_R, LANE: tl.constexpr, spare):
    """The column of a value that reaches the border, negative, so that the largest is the first."""
    chosen_R = (x_R >= border_R) & (x_R > float("-inf"))
    return tl.where(chosen_R, -column_of(x_R, LANE, spare), NO_COLUMN)


@triton.jit
def _columns_of_lane(x, border_R, LANE: tl.constexpr, spare):
    return sorted8(
        (
            _column_down_to(x[0], border_R, LANE, spare),
            _column_down_to(x[1], border_R, LANE, spare),
            _column_down_to(x[2], border_R, LANE, spare),
            _column_down_to(x[3], border_R, LANE, spare),
            _column_down_to(x[4], border_R, LANE, spare),
            _column_down_to(x[5], border_R, LANE, spare),
            _column_down_to(x[6], border_R, LANE, spare),
            _column_down_to(x[7], border_R, LANE, spare),
        )
    )


@triton.jit(do_not_specialize=["t_count", "spare"])
def gate_merge_fwd_kernel(
    best_ptr, cut_ptr, idx_ptr, count_ptr, rows_ptr, t_count, spare,
    R: tl.constexpr, KEPT: tl.constexpr, CHOSEN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The best `CHOSEN` past blocks of each query, -1 behind; flagged rows go to `rows_ptr`."""
    row = tl.program_id(1).to(tl.int64)
    i_R = tl.program_id(0) * R + tl.arange(0, R)
    inside_R = i_R < t_count
    a = _lane(best_ptr, row, i_R, inside_R, t_count, 0, KEPT)
    b = _lane(best_ptr, row, i_R, inside_R, t_count, 1, KEPT)
    c = _lane(best_ptr, row, i_R, inside_R, t_count, 2, KEPT)
    d = _lane(best_ptr, row, i_R, inside_R, t_count, 3, KEPT)
    best = largest_of_lanes(a, b, c, d)
    border_R, next_R = best[CHOSEN - 1], best[CHOSEN]

    # By number, as the exact kernel lists them: a row has the same bits whichever chose for it.
    columns = largest_of_lanes(
        _columns_of_lane(a, border_R, 0, spare),
        _columns_of_lane(b, border_R, 1, spare),
        _columns_of_lane(c, border_R, 2, spare),
        _columns_of_lane(d, border_R, 3, spare),
    )
    at_R = idx_ptr + (row * t_count + i_R) * WIDTH
    for place in tl.static_range(WIDTH):
        if place < CHOSEN:
            column_R = tl.where(columns[place] == NO_COLUMN, -1, -columns[place])
        else:
            column_R = tl.full([R], -1, tl.int32)
        tl.store(at_R + place, column_R, mask=inside_R)

    tie_R = (_score(border_R, spare) == _score(next_R, spare)) & (next_R > float("-inf"))
    flag_R = tie_R
    for lane in tl.static_range(4):
        at = cut_ptr + (row * 4 + lane) * t_count + i_R
        cut_R = tl.load(at, mask=inside_R, other=float("-inf"))
        flag_R = flag_R | (cut_R != cut_R) | ((cut_R >= border_R) & (cut_R > float("-inf")))
    flag_R = flag_R & inside_R
    flags_R = flag_R.to(tl.int32)
    place = tl.atomic_add(count_ptr + row, tl.sum(flags_R, 0), sem="relaxed")
    tl.store(rows_ptr + row * t_count + place + tl.cumsum(flags_R, 0) - 1, i_R, mask=flag_R)


@triton.jit
def _score(x_M, spare):
    """The score as far as a value keeps it; zeros of either sign are one score."""
    bits = x_M.to(tl.int32, bitcast=True)
    score = bits >> (spare + 2)
    return tl.where((bits & 0x7FFFFFFF) >> (spare + 2) == 0, 0, score)


@triton.jit
def _ranked_keys(x_MN, c_N, keep_MN):
    """64-bit keys that sort by the rule: no candidate, NaN, -inf .. +inf, lower numbers first."""
    bits = x_MN.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(x_MN == x_MN, order, -0x7FFFFFFF)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - c_N)[None, :].to(tl.int64)
    return tl.where(keep_MN, key, -0x7FFFFFFFFFFFFFFF)


@triton.jit(do_not_specialize=_LENGTHS)
def gate_exact_fwd_kernel(
    q_ptr, means_ptr, idx_ptr, count_ptr, rows_ptr,
    first_ptr, end_ptr, real_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    T, N, start, t_begin, t_count, head_begin, heads, group,
    BLOCK: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, TILE_N: tl.constexpr,
    CHOSEN: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr, ONE_TILE: tl.constexpr,
    LISTED: tl.constexpr, PLAIN: tl.constexpr, REAL: tl.constexpr, EXACT_DOT: tl.constexpr,
):  # fmt: skip
    """The same by 64-bit keys; with LISTED only for the rows that were flagged."""
    slice_head = tl.program_id(1)
    head = head_begin + slice_head
    b, h = (head // heads).to(tl.int64), (head % heads).to(tl.int64)
    d_D, l_L = tl.arange(0, DP), tl.arange(0, LENGTH)
    means = means_ptr + (b * (heads // group) + h // group) * N * D
    rows = rows_ptr + slice_head.to(tl.int64) * t_count
    count = t_count
    if LISTED:
        count = tl.load(count_ptr + slice_head)
    for begin in range(tl.program_id(0) * M, count, tl.num_programs(0) * M):
        i_M = begin + tl.arange(0, M)
        inside_M = i_M < count
        if LISTED:
            i_M = tl.load(rows + i_M, mask=inside_M, other=0)
        t_M = t_begin + i_M
        q_MD = tl.load(
            q_ptr + b * stride_qb + h * stride_qh
            + t_M.to(tl.int64)[:, None] * stride_qt + d_D[None, :] * stride_qd,
            mask=inside_M[:, None] & (d_D < D)[None, :],
            other=0.0,
        )  # fmt: skip
        first_M, end_M = _candidates(first_ptr, end_ptr, b, t_M, inside_M, T, start, BLOCK, PLAIN)
        first_M, end_M = tl.where(inside_M, first_M, N), tl.where(inside_M, end_M, 0)
        best_ML = tl.full([M, LENGTH], -0x7FFFFFFFFFFFFFFF, tl.int64)
        low = 0 if ONE_TILE else tl.min(first_M, 0) // TILE_N
        high = 1 if ONE_TILE else tl.cdiv(tl.max(end_M, 0), TILE_N)
        for tile_n in range(low, high):
            c_N = tile_n * TILE_N + tl.arange(0, TILE_N)
            # -0 becomes +0: equal scores have equal bits.
            x_MN = _scores(q_MD, means, c_N, N, D, DP, False, EXACT_DOT) + 0.0
            keep_MN = (c_N[None, :] >= first_M[:, None]) & (c_N[None, :] < end_M[:, None])
            if REAL:
                known_N = tl.load(real_ptr + b * N + c_N, mask=c_N < N, other=0) != 0
                keep_MN = keep_MN & known_N[None, :]
            new_ML = tl.topk(_ranked_keys(x_MN, c_N, keep_MN), LENGTH, dim=1)
            if ONE_TILE:
                best_ML = new_ML
            else:
                both = tl.reshape(tl.join(best_ML, new_ML), [M, 2 * LENGTH])
                best_ML = tl.topk(both, LENGTH, dim=1)
        found_ML = (best_ML != -0x7FFFFFFFFFFFFFFF) & (l_L < CHOSEN)[None, :]
        number_ML = 0x7FFFFFFF - (best_ML & 0xFFFFFFFF).to(tl.int32)
        number_ML = tl.sort(tl.where(found_ML, number_ML, 0x7FFFFFFF), dim=1)
        out = idx_ptr + (slice_head.to(tl.int64) * t_count + i_M)[:, None] * WIDTH + l_L[None, :]
        tl.store(
            out,
            tl.where(number_ML == 0x7FFFFFFF, -1, number_ML),
            mask=inside_M[:, None] & (l_L < WIDTH)[None, :],
        )
