"""Decode calls of MSA: inputs, pages, and the comparison with the reference by the rule of replay.

Legend: B batch, H query heads, G key/value heads, J index key heads, T queries, S key slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from sparsify.kernels import decoding, reference
from sparsify.kernels.attend import decode
from sparsify.kernels.gaps import msa_gaps
from sparsify.kernels.layout import Layout
from sparsify.kernels.select import decode_choice
from tests._util.parity import Inputs, assert_attention

__all__ = [
    "LISTS",
    "PLACES",
    "RANKED_PLACES",
    "WAYS",
    "Case",
    "assert_choice",
    "attend",
    "attend_by",
    "case",
    "check",
    "in_pages",
]

PLACES, RANKED_PLACES, LISTS = WAYS = (
    "a program per place",
    "a program per place of ranked blocks",
    "a program per list",
)

MOST_RANKED = decoding.MOST_RANKED


class Case(NamedTuple):
    """Arguments of one call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    iq: torch.Tensor
    ik: torch.Tensor
    layout: Layout
    sizes: dict

    def main(self):
        """What attention reads, without the index."""
        return Inputs(self.q, self.k, self.v)

    def row(self, b):
        """One row of the batch alone."""
        rows = [None if x is None else x[b : b + 1] for x in self.layout]
        paged = self.layout.page_table is not None
        k, v, ik = (x if paged else x[b : b + 1] for x in (self.k, self.v, self.ik))
        q, iq = self.q[b : b + 1], self.iq[b : b + 1]
        return self._replace(q=q, k=k, v=v, iq=iq, ik=ik, layout=Layout(*rows))


def case(
    *,
    batch=1,
    heads=4,
    groups=2,
    index_heads=1,
    queries=1,
    keys=100,
    size=16,
    value_size=None,
    index_size=16,
    block=16,
    topk=3,
    local="inside",
    dtype=torch.float32,
    index_dtype=None,
    key_dtype=None,
    device="cpu",
    seed=0,
    **layout,
):
    """Random tensors; layout tensors by name, as lists or tensors."""
    generator = torch.Generator().manual_seed(seed)
    index_dtype = index_dtype or dtype

    def normal(*shape, to=dtype):
        return torch.randn(*shape, generator=generator).to(device, to)

    where = {n: torch.as_tensor(x, device=device) for n, x in layout.items()}
    return Case(
        normal(batch, heads, queries, size),
        normal(batch, groups, keys, size),
        normal(batch, groups, keys, value_size or size),
        normal(batch, groups, queries, index_size, to=index_dtype),
        normal(batch, index_heads, keys, index_size, to=key_dtype or index_dtype),
        Layout(**where),
        {"block_size": block, "topk": topk, "local": local},
    )


def in_pages(x, seed=0, unused=3):
    """The same call with keys in shuffled pages, and NaN in those that no row uses."""
    (batch, _, keys, _), block = x.k.shape, x.sizes["block_size"]
    assert keys % block == 0
    width = keys // block
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(batch * width + unused, generator=generator)[: batch * width]
    table = order.view(batch, width).to(x.q.device, torch.int32)

    def paged(values):
        shape = (batch * width + unused, values.shape[1], block, values.shape[3])
        pages = torch.full(shape, float("nan"), device=values.device).to(values.dtype)
        cut = values.unflatten(2, (width, block)).transpose(1, 2).flatten(0, 1)
        pages[order.to(values.device)] = cut
        return pages

    layout = x.layout._replace(page_table=table)
    return x._replace(k=paged(x.k), v=paged(x.v), ik=paged(x.ik), layout=layout)


def attend(x, **options):
    return decode.msa_decode(*x[:5], x.layout, **x.sizes, **options)


def attend_by(way, monkeypatch):
    """One of the ways to attend a list, however many there are."""
    processors = 1 if way == LISTS else 10**6
    monkeypatch.setattr(decoding, "processors", lambda _: processors)
    monkeypatch.setattr(decoding, "MOST_RANKED", 0 if way == RANKED_PLACES else MOST_RANKED)


def assert_choice(x):
    """Lists as the reference's but for close rows; returns them."""
    lists = decode_choice.choose(x.iq, x.ik, x.layout, **x.sizes)
    wanted = reference.msa_select(x.iq, x.ik, x.layout, **x.sizes)
    assert (lists.shape, lists.dtype) == (wanted.shape, wanted.dtype)
    differs = (lists != wanted).any(-1)
    if bool(differs.any()):
        close = msa_gaps(x.iq, x.ik, x.layout, **x.sizes).close()
        rows = torch.nonzero(differs & ~close).tolist()
        assert not rows, f"rows that are not close were chosen otherwise, the first at {rows[:3]}"
    return lists


def check(x, scale=None):
    """Choice and output of one call against the reference in float64."""
    got = attend(x, scale=scale)
    lists, block = assert_choice(x), x.sizes["block_size"]
    assert_attention(got, lists, x.main(), block, layout=x.layout, scale=scale)
    return got
