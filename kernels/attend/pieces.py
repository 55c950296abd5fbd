"""Small pieces that the attention kernels share.

Legend: M rows of a tile, D key size, V value size.
"""

import triton
import triton.language as tl

__all__ = ["block_of", "dot", "row_load", "row_store", "safe_top"]


@triton.jit
def dot(a, b, EXACT_DOT: tl.constexpr):
    precision: tl.constexpr = "ieee" if EXACT_DOT else "tf32"
    return tl.dot(a, b, input_precision=precision)


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
