"""MoBA's kernels on a GPU, against the reference in float64: shapes, layouts, gradients."""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import accelerated, reference, schemas
from sparsify.kernels.layout import Layout
from sparsify.kernels.selection import record_selection, replay_selection
from tests._util.moba_gpu import (
    BF16,
    BLOCK,
    DEVICE,
    FP16,
    FP32,
    KEYS,
    NEEDS_GPU,
    SIZE,
    TOPK,
    attend,
    base,
    check,
    choose,
    layouts,
    tensor,
)
from tests._util.parity import assert_attention, assert_lists, attended, error, inputs

INF = math.inf

pytestmark = NEEDS_GPU


HEADS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128)]


@pytest.mark.parametrize(("size", "value_size"), HEADS)
def test_head_sizes(size, value_size):
    check(base(size=size, value_size=value_size))


@pytest.mark.parametrize(("dtype", "size"), [(FP16, 128), (FP32, 64), (FP32, 128)])
def test_dtypes(dtype, size):
    check(base(size=size, dtype=dtype))


@pytest.mark.parametrize(
    ("block", "topk", "keys"),
    [(512, 3, 17_411), (64, 16, 4611), (4096, 3, 16_384), (2048, 2, 9001), (96, 5, 3301)],
)
def test_blocks_and_places(block, topk, keys):
    check(base(keys=keys), block, topk)


@pytest.mark.parametrize(("heads", "groups"), [(7, 1), (3, 3)])
def test_head_ratios(heads, groups):
    check(base(heads=heads, groups=groups, batch=2, keys=1027), 64, 4)


@pytest.mark.parametrize("topk", [1, 40, 10**6])
def test_own_block_alone_long_lists_and_dense(topk):
    check(base(), BLOCK, topk)


@pytest.mark.parametrize("keys", [3, 127, 129, BLOCK * TOPK - 1, BLOCK * TOPK + 1])
def test_lengths_around_the_borders(keys):
    check(base(keys=keys))


@pytest.mark.parametrize("queries", [1, 5, 31, 33, 700])
def test_queries_at_the_end(queries):
    check(base(queries=queries))


def test_scale():
    x = base()
    lists = choose(x)
    assert_attention(attend(x, scale=0.02), lists, x, BLOCK, scale=0.02)


def test_many_equal_scores_are_ranked_by_the_rule():
    """Products of small whole numbers are exact, so every row must agree."""
    x = base()
    generator = torch.Generator(DEVICE).manual_seed(0)
    for least, most in ((0, 2), (-1, 2), (0, 1)):
        shape = (1, 2, 37, SIZE)
        means = torch.randint(least, most, shape, generator=generator, device=DEVICE).to(BF16)
        q = torch.randint(-1, 2, x.q.shape, generator=generator, device=DEVICE).to(BF16)
        part = x._replace(q=q)
        lists = choose(part, block_means=means)
        assert_lists(lists, part, BLOCK, TOPK, block_means=means, differing=0.0)


def test_a_block_that_every_query_chose():
    x = base()
    x.q.abs_()
    x.k[:, :, 3 * BLOCK : 4 * BLOCK] += 3.0
    lists = choose(x)
    assert bool((lists[:, :, 4 * BLOCK :] == 3).any(-1).all())
    check(x)


def test_listed_blocks():
    x = base()
    generator = torch.Generator().manual_seed(0)
    for heads in (2, 4):
        lists = torch.randint(-2, 40, (1, heads, KEYS, TOPK), generator=generator).int().to(DEVICE)
        got = schemas.block_attention(*x, lists, block_size=BLOCK)
        assert_attention(got, lists, x, BLOCK)


def test_a_choice_that_is_wrong_is_seen():
    """The comparison itself: with other lists it fails."""
    x = base()
    lists = choose(x)
    wrong = lists.clone()
    wrong[:, :, 4000:4040, 0] = 36 - wrong[:, :, 4000:4040, 1]  # not every row is close
    with pytest.raises(AssertionError):
        assert_attention(attend(x), wrong, x, BLOCK)
    with pytest.raises(AssertionError):
        assert_lists(wrong, x, BLOCK, TOPK)


# Layouts


@pytest.mark.parametrize("name", ["lengths", "documents", "left padding", "holes"])
@pytest.mark.parametrize("topk", [TOPK, 10**6])
def test_layouts(name, topk):
    where = layouts()[name]
    batch = 1 if name == "documents" else 2
    queries = None if name == "documents" else 650
    check(base(batch=batch, queries=queries), BLOCK, topk, **where)


def test_pages():
    x, pages = base(batch=2, queries=5), base(batch=60, keys=BLOCK, seed=1)
    table = torch.randperm(60)[:52].view(2, 26).int().to(DEVICE)
    x = x._replace(k=pages.k, v=pages.v)
    check(x, page_table=table, kv_len=tensor([26 * BLOCK, 1999]))


def test_chunks_choose_as_the_whole_prefill():
    x = base()
    chosen = choose(x)
    whole = attend(x)[0]
    for first, last in ((0, 1001), (1001, 1002), (1002, KEYS)):
        part = x._replace(q=x.q[:, :, first:last], k=x.k[:, :, :last], v=x.v[:, :, :last])
        rows = choose(part)
        assert torch.equal(rows, chosen[:, :, first:last, : rows.shape[-1]])
        got = attend(part)
        assert_attention(got, rows, part, BLOCK)
        assert error(got[0], whole[:, :, first:last]) < 2e-2


# Gradients and selections


def eager_gradients(lists, x, grad):
    """Gradients of attention as models write it, in the dtype of the inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in x]
    q, k, v = leaves
    ratio = q.shape[1] // k.shape[1]
    logits = (q @ k.repeat_interleave(ratio, 1).mT) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~attended(lists, x, BLOCK), -INF)
    weights = logits.softmax(-1, dtype=torch.float32).to(q.dtype)
    (weights @ v.repeat_interleave(ratio, 1)).backward(grad)
    return [t.grad for t in leaves]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("op", ["fused", "two steps"])
def test_gradients(dtype, op, monkeypatch):
    x = base(dtype=dtype, keys=2051)
    lists = choose(x)
    grad = inputs(heads=4, keys=2051, size=SIZE, dtype=dtype, device=DEVICE, seed=9).q
    leaves = [t.clone().requires_grad_() for t in x]
    if op == "fused":
        attend(leaves)[0].backward(grad)
    else:
        monkeypatch.setenv("SPARSIFY_IMPL", "auto")
        schemas.block_attention(*leaves, lists, block_size=BLOCK)[0].backward(grad)
    wide = [t.double() for t in x]
    out, lse = reference.block_attention(*wide, lists, Layout(), block_size=BLOCK)
    wanted = reference.block_attention_backward(
        grad.double(), None, *wide, lists, out, lse, Layout(), block_size=BLOCK
    )
    yardstick = eager_gradients(lists, x, grad)
    for leaf, want, eager in zip(leaves, wanted, yardstick, strict=True):
        bound = 1e-5 if dtype == FP32 else max(2 * error(eager, want), 1e-2)
        assert error(leaf.grad, want) <= bound


def test_recorded_and_replayed(monkeypatch):
    x = base()
    monkeypatch.setenv("SPARSIFY_IMPL", "reference")
    with record_selection() as chosen:
        attend(x)
    lists = choose(x)
    monkeypatch.setenv("SPARSIFY_IMPL", "triton")
    with replay_selection(chosen), record_selection() as again:
        got = attend(x)
    assert_attention(got, lists, x, BLOCK)
    assert all(d.differing == d.unmatched == 0 for d in chosen.diff(again).values())


def test_auto_is_the_kernels(monkeypatch):
    monkeypatch.setenv("SPARSIFY_IMPL", "auto")
    x = base()
    calls = []
    real = accelerated.moba_attention

    def spy(*args, **options):
        calls.append(1)
        return real(*args, **options)

    monkeypatch.setattr(accelerated, "moba_attention", spy)
    attend(x)
    assert calls
