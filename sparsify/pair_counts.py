"""Exact counts of attention work, in closed form.

A pair is one query-key score of one query head. Query i stands at position p = q_offset + i; it
sees the keys 0..p. Positions below 0 see nothing. The index of MSA scores every visible key, so
`dense_pairs` counts its pairs too.
"""

from __future__ import annotations

__all__ = ["attended_pairs", "dense_pairs", "gate_pairs"]


def dense_pairs(q_len: int, kv_len: int, q_offset: int | None = None) -> int:
    """Pairs of causal attention: the sum over queries of p + 1.

    Args:
        q_len, kv_len: numbers of queries and keys.
        q_offset: position of query 0; by default the last query stands at the last key.

    Raises:
        ValueError: a negative length, or a query behind the last key.
    """
    first, end = _positions(q_len, kv_len, q_offset)
    return (end * (end + 1) - first * (first + 1)) // 2


def attended_pairs(
    q_len: int, kv_len: int, block: int, topk: int, q_offset: int | None = None
) -> int:
    """Pairs that block-sparse attention computes, whatever blocks it selects.

    The query at p reads its own block up to itself and min(topk - 1, p // block) whole blocks:
    the sum over queries of min(topk - 1, p // block) * block + p % block + 1.

    Args:
        q_len, kv_len, q_offset: as in `dense_pairs`.
        block: tokens of a block.
        topk: blocks per query, the own one included.

    Raises:
        ValueError: a negative length, block or topk below 1, or a query behind the last key.
    """
    if block < 1 or topk < 1:
        raise ValueError(f"block and topk must be at least 1, not {block} and {topk}")
    first, end = _positions(q_len, kv_len, q_offset)
    return _attended_before(end, block, topk) - _attended_before(first, block, topk)


def gate_pairs(q_len: int, kv_len: int, block: int, q_offset: int | None = None) -> int:
    """Pairs of a query with the mean of a complete past block: MoBA's gate.

    The sum over queries of p // block.

    Args:
        q_len, kv_len, q_offset: as in `dense_pairs`.
        block: tokens of a block.

    Raises:
        ValueError: a negative length, a block below 1, or a query behind the last key.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, not {block}")
    first, end = _positions(q_len, kv_len, q_offset)
    return _gated_before(end, block) - _gated_before(first, block)


def _positions(q_len: int, kv_len: int, q_offset: int | None) -> tuple[int, int]:
    """Positions of the queries that see anything, as a half-open range."""
    if q_len < 0 or kv_len < 0:
        raise ValueError(f"lengths must not be negative: {q_len} and {kv_len}")
    start = kv_len - q_len if q_offset is None else q_offset
    if q_len and start + q_len > kv_len:
        raise ValueError(f"the last query at {start + q_len - 1} stands behind {kv_len} keys")
    end = max(start + q_len, 0)
    return min(max(start, 0), end), end


def _attended_before(end: int, block: int, topk: int) -> int:
    """Attended pairs of the positions 0..end-1."""
    whole, rest = divmod(end, block)
    past = topk - 1
    # Sum over the whole blocks c < `whole` of min(past, c).
    if whole <= past:
        past_blocks = whole * (whole - 1) // 2
    else:
        past_blocks = past * (past - 1) // 2 + (whole - past) * past
    own = whole * block * (block + 1) // 2 + rest * (rest + 1) // 2
    return own + past_blocks * block * block + rest * min(past, whole) * block


def _gated_before(end: int, block: int) -> int:
    """Gate pairs of the positions 0..end-1."""
    whole, rest = divmod(end, block)
    return whole * (whole - 1) // 2 * block + rest * whole
