"""Inputs and shorthands for tests of the attention ops.

A case is a dict of q, k, v, iq, ik. Kinds: "moba"; "msa" with one shared index key; "proxy", MSA
with an index key per key/value head; "union", MSA with the own block on top of topk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsify.kernels import schemas
from tests._util import oracle

__all__ = [
    "KINDS",
    "MSA_KINDS",
    "away_from_ties",
    "block_masks",
    "causal",
    "close",
    "cut",
    "make",
    "ops_for",
    "run",
    "select",
    "slow",
]

KINDS = ("moba", "msa", "proxy", "union")
MSA_KINDS = KINDS[1:]
TENSORS = ("q", "k", "v", "iq", "ik")
OF_QUERIES = ("q", "iq")
OF_KEYS = ("k", "v", "ik")


def make(
    kind="moba",
    *,
    seed=0,
    batch=1,
    heads=4,
    groups=2,
    queries=None,
    keys=37,
    size=6,
    value_size=5,
    index_size=4,
    dtype=torch.float64,
):
    """Random tensors of one attention; as many queries as keys unless told otherwise."""
    generator = torch.Generator().manual_seed(seed)
    queries = keys if queries is None else queries
    index_heads = groups if kind == "proxy" else 1

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "q": normal(batch, heads, queries, size),
        "k": normal(batch, groups, keys, size),
        "v": normal(batch, groups, keys, value_size),
        "iq": normal(batch, groups, queries, index_size),
        "ik": normal(batch, index_heads, keys, index_size),
    }


def run(kind, case, block_size, topk, **options):
    """Output and log-sum-exp of the fused op."""
    qkv = (case["q"], case["k"], case["v"])
    sizes = {"block_size": block_size, "topk": topk}
    if kind == "moba":
        return schemas.moba_attention(*qkv, **sizes, **options)
    local = "union" if kind == "union" else "inside"
    return schemas.msa_attention(*qkv, case["iq"], case["ik"], local=local, **sizes, **options)


def select(kind, case, block_size, topk, **where):
    """Lists of the select op."""
    sizes = {"block_size": block_size, "topk": topk}
    if kind == "moba":
        return schemas.moba_select(case["q"], case["k"], **sizes, **where)
    local = "union" if kind == "union" else "inside"
    return schemas.msa_select(case["iq"], case["ik"], local=local, **sizes, **where)


def slow(kind, case, block_size, topk, **options):
    """The same by the oracle."""
    qkv = (case["q"], case["k"], case["v"])
    sizes = {"block_size": block_size, "topk": topk}
    if kind == "moba":
        return oracle.moba(*qkv, **sizes, **options)
    local = "union" if kind == "union" else "inside"
    return oracle.msa(*qkv, case["iq"], case["ik"], local=local, **sizes, **options)


def block_masks(lists: Tensor, blocks: int, heads: int) -> Tensor:
    """Lists as masks, bool `[B, heads, T, blocks]`, one per query head."""
    named = torch.zeros(*lists.shape[:3], blocks + 1, dtype=torch.bool)
    index = lists.long().masked_fill(lists < 0, blocks)
    named.scatter_(-1, index, True)
    return named[..., :blocks].repeat_interleave(heads // lists.shape[1], 1)


def cut(case, first, last, *, keys=True):
    """Queries first..last-1 and, unless told otherwise, keys 0..last-1."""
    part = dict(case)
    for name in OF_QUERIES:
        part[name] = case[name][:, :, first:last]
    if keys:
        for name in OF_KEYS:
            part[name] = case[name][:, :, :last]
    return part


def causal(queries: int, keys: int) -> Tensor:
    """Bottom-right causal mask, True where a query sees a key."""
    return torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries


def close(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    """Whether max|a-b| is within `bound` of max|b|, both finite and of one shape."""
    if a.shape != b.shape or not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        return False
    if a.numel() == 0:
        return True
    a, b = a.double(), b.double()
    return bool((a - b).abs().max() <= bound * b.abs().max().clamp(min=1e-30))


def ops_for(kind):
    """Names of the fused op's tensor arguments of a kind."""
    return TENSORS[:3] if kind == "moba" else TENSORS


def away_from_ties(kind, case, block_size, topk, margin=1e-6, **where) -> bool:
    """Whether every choice stands by more than `margin`, so that small steps cannot flip it."""
    from sparsify.kernels.gaps import moba_gaps, msa_gaps
    from sparsify.kernels.layout import Layout

    sizes = {"block_size": block_size, "topk": topk}
    layout = Layout(**where)
    if kind == "moba":
        gaps = moba_gaps(case["q"], case["k"], layout, **sizes)
    else:
        local = "union" if kind == "union" else "inside"
        gaps = msa_gaps(case["iq"], case["ik"], layout, local=local, **sizes)
    return bool((gaps.gap > margin).all())
