"""Float32 index queries as sums of terms in the keys' dtype, so that tensor cores multiply them.

Products of a term and a key are exact, and tensor cores sum them in float32, as products of float32
are summed without them; small terms are summed first, where little is lost. bfloat16 has float32's
range, and three terms hold all 24 bits of a number (of 2**-103 or more: less has no term as small).
float16 has not: a row is multiplied by a power of two, which brings its largest number next to
2**15 and leaves the order of its scores. Two terms then hold a number but for its last bit, and but
for what is below 2**-39 of the largest number of its row.

Legend: M rows, D index size, N keys.
"""

import triton
import triton.language as tl

__all__ = ["bounded", "row_terms", "sum_of_products"]

# The largest numbers: what is beyond would round to infinity.
MOST_BFLOAT16 = tl.constexpr(3.3895313892515355e38)
MOST_FLOAT16 = tl.constexpr(65504.0)
MOST_FLOAT32 = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _term(rest, MOST: tl.constexpr, DTYPE: tl.constexpr):
    """`rest` rounded to DTYPE, and what is left of it. Numbers that are not finite leave nothing,
    lest infinities of two terms should cancel."""
    finite = tl.abs(rest) < float("inf")
    term = tl.where(finite, tl.minimum(tl.maximum(rest, -MOST), MOST), rest).to(DTYPE)
    return term, tl.where(finite, rest - term.to(tl.float32), 0.0)


@triton.jit
def _scaled(q_MD):
    """Rows whose largest finite number is next to 2**15, by the exponent alone."""
    size_MD = tl.abs(q_MD)
    largest_M = tl.max(tl.where(size_MD < float("inf"), size_MD, 0.0), 1)
    exponent_M = tl.maximum(largest_M.to(tl.int32, bitcast=True) >> 23, 15)
    return q_MD * ((268 - exponent_M) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def row_terms(q_MD, TERMS: tl.constexpr):
    """The terms of float32 rows, the largest first: three in bfloat16, or two in float16 of what
    has the same order; with one term, the rows as they are."""
    if TERMS == 3:
        high_MD, rest_MD = _term(q_MD, MOST_BFLOAT16, tl.bfloat16)
        middle_MD, rest_MD = _term(rest_MD, MOST_BFLOAT16, tl.bfloat16)
        terms = (high_MD, middle_MD, rest_MD.to(tl.bfloat16))
    elif TERMS == 2:
        high_MD, rest_MD = _term(_scaled(q_MD), MOST_FLOAT16, tl.float16)
        terms = (high_MD, rest_MD.to(tl.float16))
    else:
        terms = (q_MD,)
    return terms


@triton.jit
def bounded(x):
    """Sums of the small terms; finite also for a key that is infinite, whose products with terms of
    different signs would cancel, and be NaN with a term of 0. The largest terms decide there."""
    return tl.minimum(tl.maximum(x, -MOST_FLOAT32), MOST_FLOAT32)


@triton.jit
def sum_of_products(terms, k_DN, TERMS: tl.constexpr):
    """Products of the terms' sum with keys, in float32."""
    x_MN = tl.dot(terms[TERMS - 1], k_DN)
    if TERMS == 3:
        x_MN = tl.dot(terms[1], k_DN, x_MN)
    if TERMS > 1:
        x_MN = tl.dot(terms[0], k_DN, bounded(x_MN))
    return x_MN
