"""MoBA's kernels give the same bits every time: in any batch, compiled, captured, elsewhere."""

from __future__ import annotations

import pytest
import torch

from sparsify.kernels import schemas
from tests._util.moba_gpu import (
    BLOCK,
    DEVICE,
    KEYS,
    NEEDS_GPU,
    TOPK,
    attend,
    base,
    choose,
    layouts,
    tensor,
)
from tests._util.parity import error, same_bits

pytestmark = NEEDS_GPU


def test_reruns():
    x = base()
    first, lists = attend(x), choose(x)
    for _ in range(4):
        assert same_bits(attend(x), first)
        assert torch.equal(choose(x), lists)


def test_batch_composition():
    x = base(batch=3)
    whole, lists = attend(x), choose(x)
    for rows in (slice(1, 2), slice(0, 2), slice(2, 3)):
        part = type(x)(*(t[rows].clone() for t in x))
        assert same_bits(attend(part), [t[rows] for t in whole])
        assert torch.equal(choose(part), lists[rows])
    turned = type(x)(*(t.flip(0) for t in x))
    assert same_bits(attend(turned), [t.flip(0) for t in whole])


def test_decode_in_a_batch():
    x = base(batch=5, queries=1)
    whole = attend(x)
    for row in (0, 3):
        part = type(x)(*(t[row : row + 1].clone() for t in x))
        assert same_bits(attend(part), [t[row : row + 1] for t in whole])


# Compilers, graphs, streams


def test_compiled_full_graph():
    def twice(q, k, v):
        return schemas.moba_attention(q * 2, k, v, block_size=BLOCK, topk=TOPK)[0] * 2

    x = base()
    compiled = torch.compile(twice, fullgraph=True)
    assert torch.equal(compiled(*x), twice(*x))
    leaves = [t.clone().requires_grad_() for t in x]
    others = [t.clone().requires_grad_() for t in x]
    twice(*leaves).square().mean().backward()
    compiled(*others).square().mean().backward()
    for a, b in zip(leaves, others, strict=True):
        assert error(b.grad, a.grad) < 2e-2


@pytest.mark.parametrize("what", ["prefill", "decode", "documents", "masked"])
def test_captured_graphs_follow_their_inputs(what):
    queries = {"decode": 1, "masked": 650}.get(what)
    x = base(batch=1, queries=queries)
    where = {}
    if what == "documents":
        where = layouts()["documents"]
    elif what == "masked":
        where = {"key_mask": layouts()["holes"]["key_mask"][:1].clone()}
    attend(x, **where)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attend(x, **where)
    for seed in (5, 6):
        for old, new in zip(x, base(batch=1, queries=queries, seed=seed), strict=True):
            old.copy_(new)
        if what == "documents":
            where["cu_seqlens_q"].copy_(tensor([0, 1, 400 * seed, 3000, 3000, KEYS]))
        elif what == "masked":
            where["key_mask"].copy_(torch.rand(1, KEYS, device=DEVICE) < 0.6)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(got, attend(x, **where))


@pytest.mark.parametrize("name", ["plain", "lengths", "documents", "holes"])
def test_nothing_waits_for_the_device(name):
    where = {} if name == "plain" else layouts()[name]
    batch = 1 if name in ("plain", "documents") else 2
    x = base(batch=batch, queries=KEYS if batch == 1 else 650)
    lists = choose(x, **where)
    attend(x, **where)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(x, **where)
        choose(x, **where)
        schemas.block_attention(*x, lists, block_size=BLOCK, **where)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_other_streams():
    x = base()
    want = attend(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = attend(x)
    stream.synchronize()
    assert same_bits(got, want)


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two CUDA devices")
def test_tensors_on_a_device_that_is_not_the_current_one():
    x = base()
    want = attend(x)
    there = type(x)(*(t.to("cuda:1") for t in x))
    assert same_bits([t.to("cuda:0") for t in attend(there)], want)
