"""MSA against the rule of the vendor's test reference (MiniMax-AI/MSA), restated.

For each key/value head and query: the score of a block is its best visible token, iq . ik; blocks
rank by score, then by lower number; the query's own block is forced and takes one of the topk
places. All query heads of the group attend to the tokens of the chosen blocks at or before the
query. Blocks are counted from the first slot. The article's formula is the union of the best topk
visible blocks with the own one.
"""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import schemas


def rule(iq, ik, block, topk, local, start):
    """Chosen blocks `[G, T, blocks]` bool, one row at a time."""
    groups, queries, _ = iq.shape
    blocks = -(-ik.shape[1] // block)
    chosen = torch.zeros(groups, queries, blocks, dtype=torch.bool)
    for g in range(groups):
        for t in range(queries):
            position = start + t
            own = position // block
            tokens = (ik[min(g, ik.shape[0] - 1), : position + 1] @ iq[g, t]).tolist()
            scores = [max(tokens[c * block : (c + 1) * block]) for c in range(own + 1)]
            count = own + 1 if local == "union" else own
            order = sorted(range(count), key=lambda c: (-scores[c], c))
            places = topk if local == "union" else topk - 1
            chosen[g, t, [*order[:places], own]] = True
    return chosen


@pytest.mark.parametrize("local", ["inside", "union"])
@pytest.mark.parametrize("index_heads", [1, 3])
@pytest.mark.parametrize(("block", "topk"), [(8, 2), (8, 4), (5, 3), (16, 1), (100, 2)])
@pytest.mark.parametrize(("queries", "keys"), [(60, 60), (7, 60), (1, 60)])
def test_choice_and_output(local, index_heads, block, topk, queries, keys):
    generator = torch.Generator().manual_seed(block * topk + queries)

    def normal(heads, length, size):
        return torch.randn(heads, length, size, generator=generator, dtype=torch.float64)

    q, k, v = normal(6, queries, 16), normal(3, keys, 16), normal(3, keys, 16)
    iq, ik = normal(3, queries, 8), normal(index_heads, keys, 8)
    start = keys - queries
    chosen = rule(iq, ik, block, topk, local, start)
    sizes = {"block_size": block, "topk": topk, "local": local}
    lists = schemas.msa_select(iq[None], ik[None], **sizes)[0].long()
    blocks = chosen.shape[-1]
    named = torch.zeros(3, queries, blocks + 1, dtype=torch.bool)
    named.scatter_(-1, lists.masked_fill(lists < 0, blocks), True)
    assert torch.equal(named[..., :blocks], chosen)
    visible = torch.arange(keys) <= start + torch.arange(queries)[:, None]
    keep = (chosen.repeat_interleave(block, -1)[..., :keys] & visible).repeat_interleave(2, 0)
    logits = q @ k.repeat_interleave(2, 0).mT / 4
    expected = logits.masked_fill(~keep, -math.inf).softmax(-1) @ v.repeat_interleave(2, 0)
    out = schemas.msa_attention(*(x[None] for x in (q, k, v, iq, ik)), **sizes)[0][0]
    assert float((out - expected).abs().max()) < 1e-12
