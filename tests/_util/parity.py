"""An implementation of the MoBA ops against the reference in float64, by the rule of replay.

Two right implementations may choose differently at near ties. So lists may differ only in rows of
which the gap is within the rounding bound, and outputs are compared given the lists.

Legend: B batch, H query heads, G key/value heads, T queries, S key slots, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparsify.kernels import reference
from sparsify.kernels.gaps import moba_gaps
from sparsify.kernels.layout import Layout, gather_pages, sequences
from sparsify.kernels.masks import TileMask, listed

__all__ = [
    "DIFFERING_ROWS",
    "Inputs",
    "assert_attention",
    "assert_lists",
    "attended",
    "eager",
    "error",
    "expected",
    "inputs",
    "same_bits",
]

DIFFERING_ROWS = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 1e-2}
FLOAT32_BOUND = 1e-6
LSE_BOUND = 1e-5


class Inputs(NamedTuple):
    """Queries, keys and values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def inputs(
    *,
    batch=1,
    heads=1,
    groups=1,
    queries=None,
    keys=40,
    size=16,
    value_size=None,
    dtype=torch.float32,
    device="cpu",
    seed=0,
):
    """Random tensors of one attention; as many queries as keys unless told otherwise."""
    generator = torch.Generator().manual_seed(seed)
    queries = keys if queries is None else queries

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return Inputs(
        normal(batch, heads, queries, size),
        normal(batch, groups, keys, size),
        normal(batch, groups, keys, value_size or size),
    )


def error(got, wanted):
    """max|a-b| / max|b|."""
    if not got.numel():
        return 0.0
    wanted = wanted.double()
    largest = wanted.abs().max().clamp(min=1e-30)
    return float((got.double() - wanted).abs().max() / largest)


def same_bits(a, b):
    """Tensors pair by pair, bit for bit; NaN equals NaN."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(s.view(ints[s.element_size()]), t.view(ints[t.element_size()]))
        for s, t in zip(a, b, strict=True)
    )


def assert_lists(lists, x, block_size, topk, *, layout=None, block_means=None, differing=None):
    """Lists as the reference's, but for close rows, of which there are few."""
    layout, sizes = layout or Layout(), {"block_size": block_size, "topk": topk}
    wanted = reference.moba_select(x.q, x.k, layout, block_means, **sizes)
    assert (lists.shape, lists.dtype) == (wanted.shape, wanted.dtype)
    differs = (lists != wanted).any(-1)
    if not bool(differs.any()):
        return
    gaps = moba_gaps(x.q, x.k, layout, block_means, **sizes)
    rows = torch.nonzero(differs & ~gaps.close()).tolist()
    assert not rows, f"rows that are not close were chosen otherwise, the first at {rows[:3]}"
    share = DIFFERING_ROWS[x.q.dtype] if differing is None else differing
    assert float(differs.float().mean()) <= share


def attended(lists, x, block_size, layout=None):
    """Which keys each query attends, bool `[B, H, T, S]`."""
    layout, (batch, heads, queries) = layout or Layout(), x.q.shape[:3]
    keys = gather_pages(x.k, layout.page_table).shape[2]
    keep = torch.zeros(batch, heads, queries, keys, dtype=torch.bool, device=x.q.device)
    for s in sequences(batch, queries, keys, layout._replace(page_table=None)):
        blocks = -(-s.keys // block_size)
        if not s.queries or not blocks:
            continue
        named = listed(s.take_queries(lists), x.k.shape[1], blocks)
        mask = TileMask(named, s, 0, s.queries, block_size)
        if mask.reach:
            found = mask.keep().flatten(0, 1)
            found = found.repeat_interleave(heads // found.shape[0], 0)
            s.take_queries(keep)[..., s.k_from : s.k_from + mask.reach] = found
    return keep


def eager(lists, x, block_size, *, layout=None, scale=None):
    """Attention as models write it, in the dtype of the inputs: the yardstick of low precision."""
    page_table = None if layout is None else layout.page_table
    k, v = (gather_pages(t, page_table) for t in (x.k, x.v))
    ratio = x.q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(ratio, 1), v.repeat_interleave(ratio, 1)
    keep = attended(lists, x, block_size, layout)
    logits = (x.q @ k.mT) * (x.q.shape[-1] ** -0.5 if scale is None else scale)
    logits = logits.masked_fill(~keep, float("-inf"))
    weights = logits.softmax(-1, dtype=torch.float32).to(x.q.dtype)
    return weights.masked_fill(~keep.any(-1, keepdim=True), 0.0) @ v


def expected(lists, x, block_size, *, layout=None, scale=None):
    """Output and log-sum-exp of the reference in float64, given the lists."""
    wide = [t.double() for t in x]
    layout = layout or Layout()
    return reference.block_attention(*wide, lists, layout, block_size=block_size, scale=scale)


def assert_attention(got, lists, x, block_size, *, layout=None, scale=None):
    """Output and log-sum-exp within the budget of their dtype, given the lists."""
    (out, lse), (want, want_lse) = (
        got,
        expected(lists, x, block_size, layout=layout, scale=scale),
    )
    assert (out.shape, out.dtype, out.stride()) == (want.shape, x.q.dtype, want.stride())
    assert (lse.shape, lse.dtype) == (want_lse.shape, torch.float32)
    assert bool(out.isfinite().all())
    bound = FLOAT32_BOUND
    if x.q.dtype != torch.float32:
        yardstick = eager(lists, x, block_size, layout=layout, scale=scale)
        bound = max(2 * error(yardstick, want), torch.finfo(x.q.dtype).eps / 2)
    found = error(out, want)
    assert found <= bound, f"error {found:.2e}, budget {bound:.2e}"
    nothing = want_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), nothing)
    assert not bool(out[nothing].any())
    off = (lse.double() - want_lse)[~nothing].abs() / (1 + want_lse[~nothing].abs())
    assert not off.numel() or float(off.max()) <= LSE_BOUND
