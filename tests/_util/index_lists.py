"""The index kernels' lists in the form of the ops, and what the reference says of them.

Legend: B batch, G groups, J index key heads (1 or G), T queries, S key slots, I index size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparsify.kernels import lists, reference
from sparsify.kernels.gaps import msa_gaps
from sparsify.kernels.layout import Layout, gather_pages
from sparsify.kernels.placement import place

__all__ = ["Keys", "assert_choice", "by_last_bits", "chosen", "index_of", "inputs"]


class Keys(NamedTuple):
    """Index queries and keys."""

    iq: torch.Tensor
    ik: torch.Tensor


def inputs(
    *,
    batch=1,
    groups=2,
    shared=True,
    queries=None,
    keys=40,
    size=16,
    dtype=torch.float32,
    device="cpu",
    seed=0,
):
    """Random index queries and keys; as many queries as keys unless told otherwise."""
    generator = torch.Generator().manual_seed(seed)
    queries = keys if queries is None else queries

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    key_heads = 1 if shared else groups
    return Keys(normal(batch, groups, queries, size), normal(batch, key_heads, keys, size))


def by_last_bits(dtype, *, blocks=64, size=64, block=2, queries=3, device="cpu"):
    """Queries in float32 and keys in `dtype`, of which each block has one, that reads one number of
    the query: blocks are ranked by the last bits of these. And the same, but for the queries, which
    are rounded to what all terms but the last one hold."""
    generator = torch.Generator().manual_seed(blocks)
    step = 2.0**-23 if dtype == torch.bfloat16 else 2.0**-21
    numbers = [
        1 + 2.0**-9 + step * torch.randperm(size, generator=generator) for _ in range(queries)
    ]
    iq = torch.stack(numbers)[None, None].to(device)
    ik = torch.zeros(1, 1, (blocks + 1) * block, size, device=device, dtype=dtype)
    number = torch.arange(blocks, device=device)
    ik[0, 0, number * block, number % size] = 1.0
    high = iq.to(dtype).float()
    coarse = high + (iq - high).to(dtype).float() if dtype == torch.bfloat16 else high
    return Keys(iq, ik), Keys(coarse, ik)


def index_of(x, block_size, topk, local="inside", *, layout=None, **options):
    """The chooser of a call, and where its queries and blocks lie."""
    from sparsify.kernels.select.msa import Index

    layout = layout or Layout()
    ik = gather_pages(x.ik, layout.page_table)
    where = layout._replace(page_table=None)
    placement = place(where, x.iq.shape[0], x.iq.shape[2], ik.shape[2], block_size)
    return Index(x.iq, ik, placement, block_size, topk, local, **options), placement


def chosen(x, block_size, topk, local="inside", *, layout=None, **options):
    """Lists as `msa_select` gives them."""
    index, placement = index_of(x, block_size, topk, local, layout=layout, **options)
    past, queries = index.all_rows(), x.iq.shape[2]
    assert_form(past, index, placement, queries, block_size)
    width = min(topk + (local == "union"), placement.blocks)
    if layout is not None and layout.cu_seqlens_q is not None:
        slots = x.ik.shape[2]
        width = min(topk + (local == "union"), -(-slots // block_size))
    return lists.public(past, placement, queries, block_size, width)


def assert_form(past, index, placement, queries, block_size):
    """Past blocks in rising order, then -1; never the own block."""
    assert past.dtype == torch.int32 and past.shape[-1] == index.width
    known = past >= 0
    assert bool((known.sum(-1) <= index.chosen).all())
    rising = (past[..., 1:] > past[..., :-1]) & known[..., :-1]
    assert bool((rising | ~known[..., 1:]).all())
    first, end = lists._past_range(placement, queries, block_size, past.device)
    inside = (past >= first[:, None]) & (past < end[:, None])
    assert bool((inside | ~known).all())


def assert_choice(got, x, block_size, topk, local="inside", *, layout=None, differing=0.0):
    """Lists as the reference's, but for rows whose gap rounding can close, of which there are few.

    Keys and queries in eight bits are compared as the float32 numbers that they are.
    """
    layout, sizes = layout or Layout(), {"block_size": block_size, "topk": topk, "local": local}
    if x.iq.dtype.itemsize == 1:
        x = Keys(x.iq.float(), x.ik.float())
    wanted = reference.msa_select(x.iq, x.ik, layout, **sizes)
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    differs = (got != wanted).any(-1)
    if not bool(differs.any()):
        return
    gaps = msa_gaps(x.iq, x.ik, layout, **sizes)
    rows = torch.nonzero(differs & ~gaps.close()).tolist()
    assert not rows, f"rows that are not close were chosen otherwise, the first at {rows[:3]}"
    assert float(differs.float().mean()) <= differing
