"""Sorting networks over tuples of tensors: many short lists of largest values, kept in registers.

A tile of scores [M, 64] is read as [M, 4 lanes, 16]: column 8 i + 2 l + j goes to lane l, which is
how the accumulator of a tensor core lies in the four threads that share a row. A lane keeps four
lists, one for every (i mod 2, j), of the largest values that came their way, four or three: four
new values cost 22 or 16 comparisons, and nothing ever moves between threads: the lanes of a row are
merged by a kernel of its own, in which a thread has a whole row.

The low bits of a value hold its column without the bits that its list and lane imply. A column is
`number << 4 | (i mod 2) << 3 | lane << 1 | j`.

Legend: M rows.
"""

import triton
import triton.language as tl

__all__ = [
    "column_of",
    "keep_largest",
    "keep_largest_three",
    "largest8",
    "largest16",
    "largest_of_lanes",
    "lists_of_tile",
    "merged_lists",
    "sorted8",
    "sorted16",
]


@triton.jit
def _ordered(a, b):
    return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def _sorted4(a, b, c, d):
    """Four values, largest first."""
    a, b = _ordered(a, b)
    c, d = _ordered(c, d)
    a, c = _ordered(a, c)
    b, d = _ordered(b, d)
    b, c = _ordered(b, c)
    return a, b, c, d


@triton.jit
def _unbitonic4(a, b, c, d):
    """Four values that rise and then fall (or the other way round), largest first."""
    a, c = _ordered(a, c)
    b, d = _ordered(b, d)
    a, b = _ordered(a, b)
    c, d = _ordered(c, d)
    return a, b, c, d


@triton.jit
def _largest4(a, b):
    """The four largest of two sorted fours, sorted."""
    return _unbitonic4(
        tl.maximum(a[0], b[3]),
        tl.maximum(a[1], b[2]),
        tl.maximum(a[2], b[1]),
        tl.maximum(a[3], b[0]),
    )


@triton.jit
def _largest3(a, b):
    """The three largest of two sorted threes, sorted."""
    first, low = _ordered(a[0], b[0])
    second, third = _ordered(low, tl.maximum(a[1], b[1]))
    return first, second, tl.maximum(third, tl.maximum(a[2], b[2]))


@triton.jit
def _merged8(a, b):
    """Two sorted fours as a sorted eight."""
    x0, x4 = _ordered(a[0], b[3])
    x1, x5 = _ordered(a[1], b[2])
    x2, x6 = _ordered(a[2], b[1])
    x3, x7 = _ordered(a[3], b[0])
    x0, x1, x2, x3 = _unbitonic4(x0, x1, x2, x3)
    x4, x5, x6, x7 = _unbitonic4(x4, x5, x6, x7)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _largest8(a, b):
    """The eight largest of two sorted eights, sorted."""
    x0, x4 = _ordered(tl.maximum(a[0], b[7]), tl.maximum(a[4], b[3]))
    x1, x5 = _ordered(tl.maximum(a[1], b[6]), tl.maximum(a[5], b[2]))
    x2, x6 = _ordered(tl.maximum(a[2], b[5]), tl.maximum(a[6], b[1]))
    x3, x7 = _ordered(tl.maximum(a[3], b[4]), tl.maximum(a[7], b[0]))
    y0, y1, y2, y3 = _unbitonic4(x0, x1, x2, x3)
    y4, y5, y6, y7 = _unbitonic4(x4, x5, x6, x7)
    return y0, y1, y2, y3, y4, y5, y6, y7


@triton.jit
def lists_of_tile(x, M: tl.constexpr):
    """[M, 64] as four lists of four tensors [M, 4 lanes]."""
    x = tl.permute(tl.reshape(x, [M, 8, 4, 2]), [0, 2, 1, 3])
    even, odd = tl.split(tl.reshape(x, [M, 4, 8, 2]))  # by j
    e0, e1 = tl.split(tl.reshape(even, [M, 4, 4, 2]))  # by i mod 2
    o0, o1 = tl.split(tl.reshape(odd, [M, 4, 4, 2]))
    return _four(e0, M), _four(o0, M), _four(e1, M), _four(o1, M)


@triton.jit
def _four(x, M: tl.constexpr):
    a, b = tl.split(tl.reshape(x, [M, 4, 2, 2]))
    aa, ab = tl.split(a)
    ba, bb = tl.split(b)
    return aa, ab, ba, bb


@triton.jit
def keep_largest(best, x):
    """Merge four new values into a sorted list of four."""
    return _largest4(best, _sorted4(x[0], x[1], x[2], x[3]))


@triton.jit
def keep_largest_three(best, x):
    """Merge four new values into a sorted list of three."""
    a, b, c, _ = _sorted4(x[0], x[1], x[2], x[3])
    return _largest3(best, (a, b, c))


@triton.jit
def _renumbered(x, LIST: tl.constexpr, spare):
    """The list's bits put into the low bits of its values, whose scores lose two bits for them.

    `spare` is the number of low bits so far.
    """
    low = (1 << spare) - 1
    lower = (1 << (spare + 2)) - 1
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits & ~lower) | ((bits & low) << 2) | LIST
    return tl.where(x > float("-inf"), bits.to(tl.float32, bitcast=True), float("-inf"))


@triton.jit
def _renumbered4(x, LIST: tl.constexpr, spare):
    return (
        _renumbered(x[0], LIST, spare),
        _renumbered(x[1], LIST, spare),
        _renumbered(x[2], LIST, spare),
        _renumbered(x[3], LIST, spare),
    )


@triton.jit
def merged_lists(l0, l1, l2, l3, LENGTH: tl.constexpr, spare):
    """The eight largest values of each lane, sorted, as eight tensors; and the largest of the
    values that are the last of their list: had that list been longer, the next might have been as
    large. Lists have `LENGTH` (3 or 4) values; all have `spare + 2` low bits now.
    """
    if LENGTH == 3:
        none = tl.full(l0[0].shape, float("-inf"), tl.float32)
        l0, l1 = (l0[0], l0[1], l0[2], none), (l1[0], l1[1], l1[2], none)
        l2, l3 = (l2[0], l2[1], l2[2], none), (l3[0], l3[1], l3[2], none)
    a, b = _renumbered4(l0, 0, spare), _renumbered4(l1, 1, spare)
    c, d = _renumbered4(l2, 2, spare), _renumbered4(l3, 3, spare)
    end: tl.constexpr = LENGTH - 1
    last = tl.maximum(tl.maximum(a[end], b[end]), tl.maximum(c[end], d[end]))
    return _largest8(_merged8(a, b), _merged8(c, d)), last


@triton.jit
def largest_of_lanes(a, b, c, d):
    """The eight largest values of four sorted eights, sorted."""
    return _largest8(_largest8(a, b), _largest8(c, d))


@triton.jit
def sorted8(x):
    """Eight values, largest first."""
    return _merged8(_sorted4(x[0], x[1], x[2], x[3]), _sorted4(x[4], x[5], x[6], x[7]))


@triton.jit
def largest8(a, b):
    """The eight largest of two sorted eights, sorted."""
    return _largest8(a, b)


@triton.jit
def _unbitonic8(x0, x1, x2, x3, x4, x5, x6, x7):
    """Eight values that rise and then fall (or the other way round), largest first."""
    x0, x4 = _ordered(x0, x4)
    x1, x5 = _ordered(x1, x5)
    x2, x6 = _ordered(x2, x6)
    x3, x7 = _ordered(x3, x7)
    x0, x1, x2, x3 = _unbitonic4(x0, x1, x2, x3)
    x4, x5, x6, x7 = _unbitonic4(x4, x5, x6, x7)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _unbitonic16(
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
):  # fmt: skip
    """Sixteen values that rise and then fall (or the other way round), largest first."""
    x0, x8 = _ordered(x0, x8)
    x1, x9 = _ordered(x1, x9)
    x2, x10 = _ordered(x2, x10)
    x3, x11 = _ordered(x3, x11)
    x4, x12 = _ordered(x4, x12)
    x5, x13 = _ordered(x5, x13)
    x6, x14 = _ordered(x6, x14)
    x7, x15 = _ordered(x7, x15)
    x0, x1, x2, x3, x4, x5, x6, x7 = _unbitonic8(x0, x1, x2, x3, x4, x5, x6, x7)
    x8, x9, x10, x11, x12, x13, x14, x15 = _unbitonic8(x8, x9, x10, x11, x12, x13, x14, x15)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def sorted16(a, b):
    """Two eights as one sorted sixteen."""
    a, b = sorted8(a), sorted8(b)
    return _unbitonic16(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7],
        b[7], b[6], b[5], b[4], b[3], b[2], b[1], b[0],
    )  # fmt: skip


@triton.jit
def largest16(a, b):
    """The sixteen largest of two sorted sixteens, sorted."""
    return _unbitonic16(
        tl.maximum(a[0], b[15]), tl.maximum(a[1], b[14]),
        tl.maximum(a[2], b[13]), tl.maximum(a[3], b[12]),
        tl.maximum(a[4], b[11]), tl.maximum(a[5], b[10]),
        tl.maximum(a[6], b[9]), tl.maximum(a[7], b[8]),
        tl.maximum(a[8], b[7]), tl.maximum(a[9], b[6]),
        tl.maximum(a[10], b[5]), tl.maximum(a[11], b[4]),
        tl.maximum(a[12], b[3]), tl.maximum(a[13], b[2]),
        tl.maximum(a[14], b[1]), tl.maximum(a[15], b[0]),
    )  # fmt: skip


@triton.jit
def column_of(x, LANE: tl.constexpr, spare):
    """Columns of values of one lane with `spare + 2` low bits."""
    number = x.to(tl.int32, bitcast=True) & ((1 << (spare + 2)) - 1)
    return ((number >> 2) << 4) | ((number & 2) << 2) | (LANE << 1) | (number & 1)
