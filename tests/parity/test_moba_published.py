"""MoBA against the algorithm its authors published (MoonshotAI/MoBA, the readable version).

The algorithm, restated: documents are cut by cumulative lengths. Each is cut into chunks, the last
one possibly short. A chunk's key is the plain mean of its keys in their own dtype. The gate of a
query and a chunk is their dot product in float32; the query's own chunk gets +inf, chunks that do
not lie wholly before it get -inf. Each query keeps the topk largest gates and attends to the tokens
of those chunks at or before itself, by one softmax with scale 1/sqrt(d). Heads are expanded first.

Where we differ on purpose, and these tests say so: equal gates (they take what torch.topk gives, we
take the lower chunk), NaN (they let it win, we rank it last, and it reaches no row that does not
select it), topk 1 (their fast version attends densely, ours and their readable one do not).
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from sparsify.kernels import schemas

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Rows that may choose otherwise: rounding of the mean, then of the gate.
FLIPPED = {torch.float64: 0.0, torch.float32: 1e-3, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def published_choice(q_HTD, k_HTD, chunk, topk):
    """Chunks each query keeps, bool `[H, T, chunks]`, of one document."""
    length = k_HTD.shape[1]
    chunks = -(-length // chunk)
    means = torch.stack([k_HTD[:, c * chunk : (c + 1) * chunk].mean(1) for c in range(chunks)], 1)
    wide = torch.float64 if q_HTD.dtype == torch.float64 else torch.float32
    gate = torch.einsum("htd,hcd->htc", q_HTD.to(wide), means.to(wide))
    for c in range(chunks):
        gate[:, : c * chunk, c] = -math.inf
        gate[:, c * chunk : (c + 1) * chunk, c] = math.inf
    kept = gate.topk(min(topk, chunks), dim=-1).indices
    return torch.zeros_like(gate, dtype=torch.bool).scatter_(-1, kept, True)


def published(q, k, v, edges, chunk, topk):
    """Choice `[H, T, chunks of the longest]` and float64 output `[H, T, D]` of packed documents."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], 0) for x in (k, v))
    most = max(-(-(b - a) // chunk) for a, b in pairwise(edges))
    choices, outs = [], []
    for a, b in pairwise(edges):
        if a == b:
            continue
        choice = published_choice(q[:, a:b], k[:, a:b], chunk, topk)
        triangle = torch.ones(b - a, b - a, dtype=torch.bool).tril()
        keep = choice.repeat_interleave(chunk, -1)[..., : b - a] & triangle
        logits = q[:, a:b].double() @ k[:, a:b].double().mT * q.shape[-1] ** -0.5
        weights = logits.masked_fill(~keep, -math.inf).softmax(-1)
        outs.append(weights @ v[:, a:b].double())
        seen = torch.arange(choice.shape[-1]) <= torch.arange(b - a)[:, None] // chunk
        choices.append(torch.nn.functional.pad(choice & seen, (0, most - choice.shape[-1])))
    return torch.cat(choices, 1), torch.cat(outs, 1)


def data(dtype, *, heads=6, groups=2, length=150, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(h):
        x = torch.randn(h, length, size, generator=generator, dtype=torch.float64)
        return x.to(dtype)

    return normal(heads), normal(groups), normal(groups)


def ours(q, k, v, edges, chunk, topk):
    """Choice as a mask, and output."""
    where = {"cu_seqlens_q": torch.tensor(edges, dtype=torch.int32)}
    lists = schemas.moba_select(q[None], k[None], block_size=chunk, topk=topk, **where)[0]
    out = schemas.moba_attention(q[None], k[None], v[None], block_size=chunk, topk=topk, **where)
    most = max(-(-(b - a) // chunk) for a, b in pairwise(edges))
    index = lists.long().masked_fill(lists < 0, most)
    named = torch.zeros(*lists.shape[:2], most + 1, dtype=torch.bool).scatter_(-1, index, True)
    return named[..., :most], out[0][0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edges", [[0, 150], [0, 40, 41, 57, 150], [0, 0, 16, 16, 150]])
@pytest.mark.parametrize(("chunk", "topk"), [(16, 2), (16, 3), (7, 5), (64, 2), (10, 100)])
def test_choice_and_output(dtype, edges, chunk, topk):
    q, k, v = data(dtype, seed=chunk + topk)
    choice, out = published(q, k, v, edges, chunk, topk)
    got_choice, got = ours(q, k, v, edges, chunk, topk)
    differs = (choice != got_choice).any(-1)
    assert float(differs.float().mean()) <= FLIPPED[dtype]
    bound = {torch.float64: 1e-12, torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps)
    error = (got.double() - out)[~differs].abs().max()
    assert float(error) <= bound * float(out.abs().max())


def test_another_chunk_size_gives_another_choice():
    q, k, v = data(torch.float64)
    assert not torch.equal(
        published(q, k, v, [0, 150], 16, 3)[0], ours(q, k, v, [0, 150], 16, 2)[0]
    )


def test_topk_one_is_the_readable_version_not_the_dense_one():
    q, k, v = data(torch.float64)
    _, out = published(q, k, v, [0, 150], 16, 1)
    _, got = ours(q, k, v, [0, 150], 16, 1)
    _, dense = published(q, k, v, [0, 150], 16, 100)
    assert float((got - out).abs().max()) < 1e-12
    assert float((got - dense).abs().max()) > 0.1


def test_ties_go_to_the_lower_chunk_here():
    q, k, v = data(torch.float32)
    q, k = torch.ones_like(q), torch.ones_like(k)
    choice, _ = ours(q, k, v, [0, 150], 16, 3)
    assert torch.nonzero(choice[0, -1]).flatten().tolist() == [0, 1, 9]


def test_nan_in_a_chunk_wins_there_and_loses_here():
    q, k, v = data(torch.float64)
    k[:, 20] = math.nan
    choice, _ = published(q, k, v, [0, 150], 16, 2)
    got, out = ours(q, k, v, [0, 150], 16, 2)
    assert bool(choice[:, -1, 1].all())
    assert not bool(got[:, 32:, 1].any())
    assert bool(out[:, 32:].isfinite().all())


def test_nan_ahead_reaches_earlier_rows_there_and_none_here():
    q, k, v = data(torch.float64)
    v[:, 149] = math.nan
    assert bool(published(q, k, v, [0, 150], 16, 2)[1][:, :149].isnan().any())
    assert bool(ours(q, k, v, [0, 150], 16, 2)[1][:, :149].isfinite().all())
