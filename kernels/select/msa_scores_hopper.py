"""MSA's index scores on Hopper: products and maxima of different blocks at the same time.

The same scores as `msa_scores` writes, for plain calls with blocks of 128 keys. A program has 256
rows: two warp groups with two halves of 64 rows each, so that the maxima of one half are taken
while the tensor cores work at others, and a warp that fetches the keys of the blocks ahead into a
ring of slots. Queries of several terms leave room for 128 rows: a warp group has 64 of them, and
takes their maxima while the tensor cores work for the other one. Written in Gluon, since Triton's
own warp specialisation does not run there.

Legend: M rows of a half, N keys of a block, D index size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsify.kernels.select.msa_scores import LENGTHS, largest, sorting_number
from sparsify.kernels.select.query_terms import bounded, row_terms

__all__ = [
    "BLOCK",
    "Keys",
    "constants",
    "is_matrix",
    "keys_of",
    "msa_scores_hopper_fwd_kernel",
    "tile_rows",
]

BLOCK = 128
_RING_BYTES = 128 << 10
_MOST_SLOTS = 8
_REGISTERS = 232  # of a thread that computes; what is left goes to the warp that fetches
_ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
}
# Names that changed between versions of Triton.
_load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_all_warps = getattr(gl, "barrier", None) or gl.thread_barrier


class Keys(NamedTuple):
    """Index keys as rows of one matrix: head g of batch row b begins at row
    `b * row_of_batch + g * row_of_head` and at a column of that form."""

    descriptor: TensorDescriptor
    row_of_batch: int
    row_of_head: int
    column_of_batch: int
    column_of_head: int


def is_matrix(ik: torch.Tensor) -> bool:
    """Whether keys are rows of one matrix that the tensor memory accelerator reads."""
    return _matrix(ik) is not None


def keys_of(ik: torch.Tensor) -> Keys | None:
    """Keys `[B, 1 or G, S, I]` as a matrix of 16-byte aligned rows; None where they are none."""
    found = _matrix(ik)
    if found is None:
        return None
    shape, places = found
    layout = _layout(ik.shape[3], ik.dtype)
    matrix = TensorDescriptor(ik, [*shape], [ik.stride(2), 1], [BLOCK, ik.shape[3]], layout)
    return Keys(matrix, *places)


def _matrix(ik: torch.Tensor) -> tuple[tuple[int, int], tuple[int, int, int, int]] | None:
    """Rows and columns, and where the heads begin: rows and columns of a batch row and a head."""
    batch, heads, slots, size = ik.shape
    row, item = ik.stride(2), ik.element_size()
    if ik.dtype not in _ELEMENTS or ik.stride(3) != 1 or not ik.numel() or row < size:
        return None
    row_b, column_b = divmod(ik.stride(0) if batch > 1 else 0, row)
    row_g, column_g = divmod(ik.stride(1) if heads > 1 else 0, row)
    rows = (batch - 1) * row_b + (heads - 1) * row_g + slots
    columns = (batch - 1) * column_b + (heads - 1) * column_g + size
    aligned = all(x * item % 16 == 0 for x in (row, column_b, column_g))
    if columns > row or not aligned or ik.data_ptr() % 16:
        return None
    return (rows, columns), (row_b, row_g, column_b, column_g)


@functools.cache
def _layout(size: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([BLOCK, size], _ELEMENTS[dtype])


def tile_rows(terms: int) -> int:
    """Rows of a program, by the terms of a query."""
    return 256 if terms == 1 else 128


def constants(iq: torch.Tensor, ik: torch.Tensor, terms: int) -> dict[str, object]:
    """Constants and options of the kernel."""
    size, item = ik.shape[3], ik.element_size()
    return {
        "D": size,
        "TERMS": terms,
        "VECTOR": 16 // iq.element_size(),
        "ITEM": item,
        "SLOTS": min(_MOST_SLOTS, _RING_BYTES // (BLOCK * size * item)),
        "DEPTH": 32 // item,
        "REGISTERS": _REGISTERS,
        "num_warps": 4,
    }


@gluon.jit
def _fetch(
    ik, k_ring, full, empty, row, column, begin, end, BYTES: gl.constexpr, SLOTS: gl.constexpr
):
    """Fetch the keys of blocks `begin` to `end` into the ring."""
    for i in range(end - begin):
        slot = i % SLOTS
        mbarrier.wait(empty.index(slot), ((i // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(slot), BYTES)
        at = [row + (begin + i) * 128, column]
        _load_tile(ik, at, full.index(slot), k_ring.index(slot))


@gluon.jit
def _score(
    scores_M, row_stride, q_low, q_high, k_ring, full, empty, begin, end, layout: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Scores of two halves of 64 rows. No product may be on its way when the loop turns."""
    zero = gl.zeros([64, 128], gl.float32, layout)
    for i in range(end - begin):
        slot = i % SLOTS
        mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
        k_DN = k_ring.index(slot).permute((1, 0))
        low = warpgroup_mma(q_low, k_DN, zero, use_acc=False, is_async=True)
        high = warpgroup_mma(q_high, k_DN, zero, use_acc=False, is_async=True)
        low_MN = warpgroup_mma_wait(1, deps=[low])
        at_M = scores_M + (begin + i) * row_stride  # within one list: less than 2**31
        gl.store(at_M, sorting_number(gl.reduce(low_MN, 1, largest)))
        high_MN = warpgroup_mma_wait(0, deps=[high])
        mbarrier.arrive(empty.index(slot), count=1)
        gl.store(at_M + 64, sorting_number(gl.reduce(high_MN, 1, largest)))


@gluon.jit
def _score_terms(
    scores_M, row_stride, q_tile, k_ring, full, empty, begin, end, layout: gl.constexpr,
    SLOTS: gl.constexpr, TERMS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Scores of 64 rows, whose terms are summed as `sum_of_products` does it."""
    zero = gl.zeros([64, 128], gl.float32, layout)
    for i in range(end - begin):
        slot = i % SLOTS
        mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
        k_DN = k_ring.index(slot).permute((1, 0))
        least: gl.constexpr = GROUP * TERMS + TERMS - 1
        rest = warpgroup_mma(q_tile.index(least), k_DN, zero, use_acc=False, is_async=True)
        if TERMS == 3:
            rest = warpgroup_mma(q_tile.index(least - 1), k_DN, rest, is_async=True)
        rest_MN = bounded(warpgroup_mma_wait(0, deps=[rest]))
        x = warpgroup_mma(q_tile.index(GROUP * TERMS), k_DN, rest_MN, is_async=True)
        x_MN = warpgroup_mma_wait(0, deps=[x])
        mbarrier.arrive(empty.index(slot), count=1)
        at_M = scores_M + (begin + i) * row_stride  # within one list: less than 2**31
        gl.store(at_M, sorting_number(gl.reduce(x_MN, 1, largest)))


@gluon.jit
def _consume(
    scores_ptr, row_stride, q_tile, k_ring, full, empty, begin, end, row,
    SLOTS: gl.constexpr, DEPTH: gl.constexpr, TERMS: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """One warp group's rows."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, DEPTH]
    )
    row_M = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    if TERMS == 1:
        _score(
            scores_ptr + row_M + GROUP * 128, row_stride,
            q_tile.index(2 * GROUP), q_tile.index(2 * GROUP + 1),
            k_ring, full, empty, begin, end, layout, SLOTS,
        )  # fmt: skip
    else:
        _score_terms(
            scores_ptr + row_M + GROUP * 64, row_stride, q_tile,
            k_ring, full, empty, begin, end, layout, SLOTS, TERMS, GROUP,
        )  # fmt: skip


@gluon.jit
def _load_queries(
    iq_ptr, q_tile, stride_qh, stride_qt, stride_qd, row, head, t_begin, t_count, work,
    HEADS: gl.constexpr, D: gl.constexpr, VECTOR: gl.constexpr, TERMS: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Queries of `PARTS` times 64 rows into shared memory, term by term; rows behind the end hold
    the last one."""
    lanes: gl.constexpr = D // VECTOR
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // lanes, lanes], [4, 1], [1, 0])
    m_M = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    d_D = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    for part in gl.static_range(PARTS):
        row_M = row + part * 64 + m_M
        t_M = (t_begin + gl.minimum(row_M // HEADS, t_count - 1)).to(gl.int64)
        head_M = (head + row_M % HEADS).to(gl.int64)
        at_MD = iq_ptr + (head_M * stride_qh + t_M * stride_qt)[:, None]
        q_MD = gl.load(at_MD + d_D[None, :] * stride_qd, mask=(d_D[None, :] < D) & work)
        terms = row_terms(q_MD, TERMS)
        for term in gl.static_range(TERMS):
            q_tile.index(part * TERMS + term).store(terms[term])


@gluon.jit(do_not_specialize=(*LENGTHS, "row_of_batch", "row_of_head"))
def msa_scores_hopper_fwd_kernel(
    iq_ptr, ik, scores_ptr,
    stride_qb, stride_qh, stride_qt, stride_qd,
    row_of_batch, row_of_head, column_of_batch, column_of_head,
    start, t_begin, t_count, z_begin, head_begin, blocks, row_stride, segment,
    OF_BATCH: gl.constexpr, HEADS: gl.constexpr,
    D: gl.constexpr, TERMS: gl.constexpr, VECTOR: gl.constexpr, ITEM: gl.constexpr,
    SLOTS: gl.constexpr, DEPTH: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Scores of past blocks as in `msa_scores_fwd_kernel`; `segment` counts blocks."""
    PARTS: gl.constexpr = 4 if TERMS == 1 else 2
    row = (gl.num_programs(0) - 1 - gl.program_id(0)) * (64 * PARTS)
    z = z_begin + gl.program_id(2)
    b, g = z // OF_BATCH, z % OF_BATCH
    last = gl.minimum((row + 64 * PARTS - 1) // HEADS, t_count - 1)
    past = gl.maximum(start + t_begin + last, 0) // 128
    begin = gl.minimum(gl.program_id(1) * segment, past)
    end = gl.minimum(begin + segment, past)

    q_tile = gl.allocate_shared_memory(
        ik.dtype, [PARTS * TERMS, 64, D], gl.NVMMASharedLayout.get_default_for([64, D], ik.dtype)
    )
    k_ring = gl.allocate_shared_memory(ik.dtype, [SLOTS, 128, D], ik.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    _load_queries(
        iq_ptr + b.to(gl.int64) * stride_qb, q_tile, stride_qh, stride_qt, stride_qd,
        row, g * HEADS + head_begin, t_begin, t_count, begin < end, HEADS, D, VECTOR,
        TERMS, PARTS,
    )  # fmt: skip
    # Tensor cores and fetches see shared memory through another proxy than stores do.
    fence_async_shared()
    _all_warps()

    scores = scores_ptr + (gl.program_id(2) * blocks).to(gl.int64) * row_stride
    key_row = b * row_of_batch + g * row_of_head
    key_column = b * column_of_batch + g * column_of_head
    BYTES: gl.constexpr = 128 * D * ITEM
    gl.warp_specialize(
        [
            (_consume, (
                scores, row_stride, q_tile, k_ring, full, empty, begin, end, row,
                SLOTS, DEPTH, TERMS, 0,
            )),
            (_consume, (
                scores, row_stride, q_tile, k_ring, full, empty, begin, end, row,
                SLOTS, DEPTH, TERMS, 1,
            )),
            (_fetch, (ik, k_ring, full, empty, key_row, key_column, begin, end, BYTES, SLOTS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip
