"""MSA's choice: the best blocks of every row, exactly, out of scores that sort as whole numbers.

Two passes with a row per thread. *Best* keeps the largest numbers in registers, with no block
number beside them, for each segment of the blocks. *Choice* merges the lists of all segments, which
gives the number at the border and how many of its equals are still wanted, reads its segment once
more and writes the blocks above the border and the first ones at it: ascending, so that ties go to
the lower block. Each program works out from the lists before it where its part of a row begins.

Longer lists are made by *exact*, which ranks 64-bit keys.

Legend: R or M rows of a tile, N blocks of a tile, L list length.
"""

import triton
import triton.language as tl

from sparsify.kernels.select.msa_scores import LENGTHS, NO_CANDIDATE, block_range
from sparsify.kernels.select.networks import largest8, largest16, sorted8, sorted16

LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)

__all__ = ["msa_best_fwd_kernel", "msa_choice_fwd_kernel", "msa_exact_fwd_kernel"]


@triton.jit
def _number(at_R, c, row_stride, first_R, reach_R, MASKED: tl.constexpr):
    at_R += c * row_stride  # within one list: less than 2**31
    if MASKED:
        number_R = tl.load(at_R, mask=(c >= first_R) & (c < reach_R), other=NO_CANDIDATE)
    else:
        number_R = tl.load(at_R)
    return number_R


@triton.jit
def _numbers8(at_R, c, row_stride, first_R, reach_R, MASKED: tl.constexpr):
    """Numbers of eight blocks."""
    return (
        _number(at_R, c, row_stride, first_R, reach_R, MASKED),
        _number(at_R, c + 1, row_stride, first_R, reach_R, MASKED),
        _number(at_R, c + 2, row_stride, first_R, reach_R, MASKED),
        _number(at_R, c + 3, row_stride, first_R, reach_R, MASKED),
        _number(at_R, c + 4, row_stride, first_R, reach_R, MASKED),
        _number(at_R, c + 5, row_stride, first_R, reach_R, MASKED),
        _number(at_R, c + 6, row_stride, first_R, reach_R, MASKED),
        _number(at_R, c + 7, row_stride, first_R, reach_R, MASKED),
    )


@triton.jit
def _keep(best, at_R, c, row_stride, first_R, reach_R, KEPT: tl.constexpr, MASKED: tl.constexpr):
    """Merge the numbers of the next `KEPT` blocks into a sorted list of as many."""
    x = _numbers8(at_R, c, row_stride, first_R, reach_R, MASKED)
    if KEPT == 8:
        kept = _merged(best, sorted8(x), KEPT)
    else:
        y = _numbers8(at_R, c + 8, row_stride, first_R, reach_R, MASKED)
        kept = _merged(best, sorted16(x, y), KEPT)
    return kept


@triton.jit
def _empty(R: tl.constexpr, KEPT: tl.constexpr):
    x = tl.full([R], NO_CANDIDATE, tl.int32)
    if KEPT == 8:
        best = (x, x, x, x, x, x, x, x)
    else:
        best = (x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x)
    return best


@triton.jit
def _listed8(at_R, row_stride):
    return (
        tl.load(at_R),
        tl.load(at_R + row_stride),
        tl.load(at_R + 2 * row_stride),
        tl.load(at_R + 3 * row_stride),
        tl.load(at_R + 4 * row_stride),
        tl.load(at_R + 5 * row_stride),
        tl.load(at_R + 6 * row_stride),
        tl.load(at_R + 7 * row_stride),
    )


@triton.jit
def _list_of(at_R, row_stride, KEPT: tl.constexpr):
    """The list of a segment."""
    x = _listed8(at_R, row_stride)
    if KEPT == 8:
        list_ = x
    else:
        y = _listed8(at_R + 8 * row_stride, row_stride)
        list_ = (
            x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
            y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7],
        )  # fmt: skip
    return list_


@triton.jit
def _merged(best, other, KEPT: tl.constexpr):
    if KEPT == 8:
        merged = largest8(best, other)
    else:
        merged = largest16(best, other)
    return merged


@triton.jit
def _segment(
    first_R, end_R, reach_R, inside_R, segment, index, STEP: tl.constexpr, PLAIN: tl.constexpr
):
    """Begin of a segment of a tile, how far it needs no mask, and its end."""
    begin = tl.maximum(tl.min(first_R, 0), index * segment)
    end = tl.minimum(tl.max(reach_R, 0), (index + 1) * segment)
    middle = begin
    if PLAIN:
        shared = tl.min(tl.where(inside_R, reach_R, 0x7FFFFFFF), 0)
        middle = begin + tl.maximum(tl.minimum(shared, end) - begin, 0) // STEP * STEP
    return begin, middle, end


@triton.jit(do_not_specialize=LENGTHS)
def msa_best_fwd_kernel(
    scores_ptr, best_ptr, first_ptr, end_ptr, own_ptr,
    T, N, start, t_begin, t_count, z_begin, blocks, row_stride, segment,
    OF_BATCH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    KEPT: tl.constexpr, PLAIN: tl.constexpr, UNION: tl.constexpr,
):  # fmt: skip
    """The `KEPT` (8 or 16) largest numbers of each row and segment, sorted:
    `best` [lists, segments, KEPT, row_stride]."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    index, z = tl.program_id(1), tl.program_id(2)
    row_R = tile * R + tl.arange(0, R)
    i_R = row_R // HEADS
    inside_R = i_R < t_count
    first_R, end_R, reach_R = block_range(
        first_ptr, end_ptr, own_ptr, (z_begin + z) // OF_BATCH, t_begin + i_R, inside_R,
        T, N, start, BLOCK, PLAIN, UNION,
    )  # fmt: skip
    begin, middle, end = _segment(first_R, end_R, reach_R, inside_R, segment, index, KEPT, PLAIN)
    at_R = scores_ptr + (z * blocks).to(tl.int64) * row_stride + row_R
    best = _empty(R, KEPT)
    if PLAIN:
        for c in range(begin, middle, KEPT):
            best = _keep(best, at_R, c, row_stride, first_R, reach_R, KEPT, False)
    for c in range(middle, end, KEPT):
        # The last step may pass the end of the segment.
        best = _keep(best, at_R, c, row_stride, first_R, tl.minimum(reach_R, end), KEPT, True)
    list_ = (z * tl.num_programs(1) + index).to(tl.int64) * KEPT
    at_R = best_ptr + list_ * row_stride + row_R
    for place in tl.static_range(KEPT):
        tl.store(at_R + place * row_stride, best[place])


@triton.jit
def _border(best, KEPT: tl.constexpr, RANKED: tl.constexpr):
    """The number at the border, how many of its equals are wanted, how many blocks there are."""
    border_R = best[RANKED - 1]
    above_R = tl.zeros_like(border_R)
    total_R = tl.zeros_like(border_R)
    for place in tl.static_range(RANKED):
        above_R += (best[place] > border_R).to(tl.int32)
        total_R += (best[place] != NO_CANDIDATE).to(tl.int32)
    return border_R, RANKED - above_R, total_R


@triton.jit
def _before(lists_R, row_stride, index, border_R, wanted_R, KEPT: tl.constexpr):
    """How many blocks, and how many of them at the border, the segments before write."""
    above_R = tl.zeros_like(border_R)
    equal_R = tl.zeros_like(border_R)
    for other in range(index):
        x = _list_of(lists_R + other * KEPT * row_stride, row_stride, KEPT)
        for place in tl.static_range(KEPT):
            above_R += (x[place] > border_R).to(tl.int32)
            equal_R += ((x[place] == border_R) & (border_R != NO_CANDIDATE)).to(tl.int32)
    equal_R = tl.minimum(equal_R, wanted_R)
    return above_R + equal_R, equal_R


@triton.jit
def _write(
    n_R, equal_R, x_R, c, out_R, border_R, wanted_R, end_R, inside_R,
    WIDTH: tl.constexpr, UNION: tl.constexpr,
):  # fmt: skip
    """Write block `c` where it is chosen."""
    at_border_R = (x_R == border_R) & (equal_R < wanted_R) & (x_R != NO_CANDIDATE)
    chosen_R = (x_R > border_R) | at_border_R
    number_R = c + tl.zeros_like(n_R)
    stored_R = chosen_R & inside_R
    if UNION:
        # The own block, the last of the row, is always attended and never listed.
        number_R = tl.where(number_R == end_R, -1, number_R)
        stored_R = stored_R & (n_R < WIDTH)
    tl.store(out_R + n_R, number_R, mask=stored_R)
    return n_R + chosen_R.to(tl.int32), equal_R + at_border_R.to(tl.int32)


@triton.jit
def _write8(
    n_R, equal_R, at_R, c, row_stride, out_R, border_R, wanted_R, first_R, end_R, reach_R,
    inside_R, WIDTH: tl.constexpr, UNION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    x = _numbers8(at_R, c, row_stride, first_R, reach_R, MASKED)
    for j in tl.static_range(8):
        n_R, equal_R = _write(
            n_R, equal_R, x[j], c + j, out_R, border_R, wanted_R, end_R, inside_R, WIDTH, UNION
        )
    return n_R, equal_R


@triton.jit(do_not_specialize=LENGTHS)
def msa_choice_fwd_kernel(
    scores_ptr, best_ptr, idx_ptr, first_ptr, end_ptr, own_ptr,
    T, N, start, t_begin, t_count, z_begin, blocks, row_stride, segment, list_stride,
    OF_BATCH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
    KEPT: tl.constexpr, RANKED: tl.constexpr, WIDTH: tl.constexpr,
    PLAIN: tl.constexpr, UNION: tl.constexpr,
):  # fmt: skip
    """The best `RANKED` blocks of each row, ascending, without the own one, -1 behind."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    index, segments, z = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    row_R = tile * R + tl.arange(0, R)
    i_R = row_R // HEADS
    inside_R = i_R < t_count
    first_R, end_R, reach_R = block_range(
        first_ptr, end_ptr, own_ptr, (z_begin + z) // OF_BATCH, t_begin + i_R, inside_R,
        T, N, start, BLOCK, PLAIN, UNION,
    )  # fmt: skip
    begin, middle, end = _segment(first_R, end_R, reach_R, inside_R, segment, index, 8, PLAIN)
    lists_R = best_ptr + (z * segments).to(tl.int64) * KEPT * row_stride + row_R
    best = _empty(R, KEPT)
    for other in range(segments):
        x = _list_of(lists_R + other * KEPT * row_stride, row_stride, KEPT)
        best = _merged(best, x, KEPT)
    border_R, wanted_R, total_R = _border(best, KEPT, RANKED)
    n_R, equal_R = _before(lists_R, row_stride, index, border_R, wanted_R, KEPT)

    list_R = z * HEADS + row_R % HEADS
    out_R = idx_ptr + list_R.to(tl.int64) * list_stride + i_R.to(tl.int64) * WIDTH
    if index == 0:
        for place in tl.static_range(WIDTH):
            tl.store(out_R + place, tl.full([R], -1, tl.int32), mask=inside_R & (place >= total_R))
    at_R = scores_ptr + (z * blocks).to(tl.int64) * row_stride + row_R
    if PLAIN:
        for c in range(begin, middle, 8):
            n_R, equal_R = _write8(
                n_R, equal_R, at_R, c, row_stride, out_R, border_R, wanted_R,
                first_R, end_R, reach_R, inside_R, WIDTH, UNION, False,
            )  # fmt: skip
    for c in range(middle, end, 8):
        n_R, equal_R = _write8(
            n_R, equal_R, at_R, c, row_stride, out_R, border_R, wanted_R,
            first_R, end_R, tl.minimum(reach_R, end), inside_R, WIDTH, UNION, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def msa_exact_fwd_kernel(
    scores_ptr, idx_ptr, first_ptr, end_ptr, own_ptr,
    T, N, start, t_begin, t_count, z_begin, blocks, row_stride, list_stride,
    OF_BATCH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    TILE_N: tl.constexpr, RANKED: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
    PLAIN: tl.constexpr, UNION: tl.constexpr,
):  # fmt: skip
    """The same for lists of any length."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    z = tl.program_id(2)
    row_M, l_L = tile * M + tl.arange(0, M), tl.arange(0, LENGTH)
    i_M = row_M // HEADS
    inside_M = i_M < t_count
    first_M, end_M, reach_M = block_range(
        first_ptr, end_ptr, own_ptr, (z_begin + z) // OF_BATCH, t_begin + i_M, inside_M,
        T, N, start, BLOCK, PLAIN, UNION,
    )  # fmt: skip
    at_M = scores_ptr + (z * blocks).to(tl.int64) * row_stride + row_M
    best_ML = tl.full([M, LENGTH], LOWEST, tl.int64)
    for tile_n in range(tl.min(first_M, 0) // TILE_N, tl.cdiv(tl.max(reach_M, 0), TILE_N)):
        c_N = tile_n * TILE_N + tl.arange(0, TILE_N)
        keep_MN = (c_N[None, :] >= first_M[:, None]) & (c_N[None, :] < reach_M[:, None])
        at_MN = at_M[:, None] + c_N[None, :] * row_stride
        x_MN = tl.load(at_MN, mask=keep_MN, other=NO_CANDIDATE)
        key_MN = (x_MN.to(tl.int64) << 32) | (0x7FFFFFFF - c_N)[None, :].to(tl.int64)
        key_MN = tl.where(x_MN != NO_CANDIDATE, key_MN, LOWEST)
        new_ML = tl.topk(key_MN, LENGTH, dim=1)
        both_ML = tl.reshape(tl.join(best_ML, new_ML), [M, 2 * LENGTH])
        best_ML = tl.topk(both_ML, LENGTH, dim=1)
    found_ML = (best_ML != LOWEST) & (l_L < RANKED)[None, :]
    number_ML = 0x7FFFFFFF - (best_ML & 0xFFFFFFFF).to(tl.int32)
    if UNION:
        found_ML = found_ML & (number_ML != end_M[:, None])
    number_ML = tl.sort(tl.where(found_ML, number_ML, 0x7FFFFFFF), dim=1)
    list_M = z * HEADS + row_M % HEADS
    out_M = idx_ptr + list_M.to(tl.int64) * list_stride + i_M.to(tl.int64) * WIDTH
    tl.store(
        out_M[:, None] + l_L[None, :],
        tl.where(number_ML == 0x7FFFFFFF, -1, number_ML),
        mask=inside_M[:, None] & (l_L < WIDTH)[None, :],
    )
