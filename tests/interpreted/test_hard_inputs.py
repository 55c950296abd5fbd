"""Inputs that break careless kernels: NaN, inf, hidden rows, huge logits, half precision."""

from __future__ import annotations

import math

import pytest
import torch

from sparsify.kernels import accelerated
from sparsify.kernels.layout import Layout
from tests._util.parity import error, expected, inputs

NAN, INF = math.nan, math.inf
BLOCK = 7


def attend(x, topk=3, *, block=BLOCK, layout=None, **options):
    return accelerated.moba_attention(
        *x, layout or Layout(), None, block_size=block, topk=topk, **options
    )


def choose(x, topk=3, *, block=BLOCK, layout=None):
    return accelerated.moba_select(x.q, x.k, layout or Layout(), None, block_size=block, topk=topk)


def assert_rows(got, lists, x, *, block=BLOCK, layout=None):
    """Rows are finite where the reference's are, and agree there."""
    want = expected(lists, x, block, layout=layout)[0]
    finite = want.isfinite().all(-1)
    assert torch.equal(got.isfinite().all(-1), finite)
    assert error(got[finite], want[finite]) < (1e-6 if x.q.dtype == torch.float32 else 1e-3)
    return finite


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("topk", [1, 3, 1000])
def test_future_tokens_reach_no_earlier_row(name, value, topk, by_block):
    x = inputs(queries=20, keys=40)
    clean = attend(x, topk)
    getattr(x, name)[0, 0, 30, 2] = value
    got = attend(x, topk)
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[:, :, :10], b[:, :, :10])
    # The row of that token sees it.
    assert not bool(got[0][0, 0, 10].isfinite().all()) or value == -INF


@pytest.mark.parametrize("value", [NAN, INF])
def test_future_keys_change_no_bit_of_packed_lists(value):
    """Rows that a future score has ranked a second time keep the order of their sums."""
    x = inputs(keys=75)
    clean = attend(x, block=2)
    x.k[:, :, 48:, 5] = value
    for a, b in zip(attend(x, block=2), clean, strict=True):
        assert torch.equal(a[:, :, :48], b[:, :, :48])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_that_see_an_odd_token_and_those_that_do_not(name, value, form):
    x = inputs(queries=20, keys=40, dtype=form)
    getattr(x, name)[0, 0, 12 if name == "q" else 23, 2] = value
    finite = assert_rows(attend(x)[0], choose(x), x)
    assert bool(finite.any()) and (value == -INF or not bool(finite.all()))


@pytest.mark.parametrize("topk", [3, 1000])
def test_hidden_tokens_are_never_read(topk, path):
    """Slots of padding, behind `kv_len` and before the origin may hold anything."""
    mask = torch.ones(1, 40, dtype=torch.bool)
    mask[0, [15, 20, 36]] = False
    layout = Layout(key_mask=mask, kv_len=torch.tensor([38]), block_origin=torch.tensor([3]))
    x = inputs(queries=8, keys=40)
    clean = attend(x, topk, layout=layout)
    hidden = [0, 1, 2, 15, 20, 36, 38, 39]
    x.k[:, :, hidden], x.v[:, :, hidden] = NAN, NAN
    for a, b in zip(attend(x, topk, layout=layout), clean, strict=True):
        assert torch.equal(a, b)


def test_other_documents_are_never_read(path):
    layout = Layout(cu_seqlens_q=torch.tensor([0, 9, 20]))
    x = inputs(keys=20)
    clean = attend(x, 2, block=3, layout=layout)
    for part, rest in ((slice(0, 9), slice(9, 20)), (slice(9, 20), slice(0, 9))):
        k, v = x.k.clone(), x.v.clone()
        k[:, :, part], v[:, :, part] = NAN, INF
        got = attend(x._replace(k=k, v=v), 2, block=3, layout=layout)
        for a, b in zip(got, clean, strict=True):
            assert torch.equal(a[:, :, rest], b[:, :, rest])


def test_blocks_that_were_not_chosen_are_never_read(path):
    x = inputs(queries=5, keys=40)
    lists = torch.tensor([1, 3, 5], dtype=torch.int32).expand(1, 1, 5, 3)
    call = {"block_size": BLOCK}
    clean = accelerated.block_attention(*x, lists, Layout(), **call)
    for c in (0, 2, 4):
        x.k[:, :, c * 7 : c * 7 + 7], x.v[:, :, c * 7 : c * 7 + 7] = NAN, INF
    for a, b in zip(accelerated.block_attention(*x, lists, Layout(), **call), clean, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("topk", [1, 3, 1000])
@pytest.mark.parametrize("odd", [None, NAN])
def test_rows_whose_logits_are_all_minus_infinity_give_nothing(topk, odd, path):
    x = inputs(queries=9, keys=30)
    x.q.abs_()
    x.k[..., 0] = -INF
    if odd is not None:
        x.v[:, :, 2] = odd
        x.v[:, :, 25] = odd
    out, lse = attend(x, topk)
    assert not bool(out.any())
    assert bool((lse == -INF).all())


def test_some_keys_with_logits_of_minus_infinity(path):
    x = inputs(queries=9, keys=30)
    x.q.abs_()
    x.k[:, :, 7:14, 0] = -INF
    x.k[:, :, 24:27, 0] = -INF
    assert bool(assert_rows(attend(x)[0], choose(x), x).all())
    lists = torch.tensor([1], dtype=torch.int32).expand(1, 1, 9, 1)
    out, lse = accelerated.block_attention(*x, lists, Layout(), block_size=BLOCK)
    assert not bool(out.any()) and bool((lse == -INF).all())


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8, 1e30])
def test_huge_equal_logits_split_by_count(size, path):
    """Three keys against one, all with the largest logit: 3/4 and 1/4, at any size."""
    x = inputs(queries=1, keys=4, size=1)
    x.q.fill_(size), x.k.fill_(1.0)
    x.v.copy_(torch.tensor([1.0, 1.0, 1.0, 0.0]).view(1, 1, 4, 1))
    out = attend(x, 2, block=2, scale=1.0)[0]
    assert abs(float(out[0, 0, 0, 0]) - 0.75) < 1e-6


def test_half_precision_scores_may_leave_its_range(path):
    x = inputs(queries=8, keys=8, size=64, dtype=torch.float16)
    x.q.fill_(100.0), x.k.fill_(100.0)
    x.k[:, :, :4] = 90.0
    x.v.copy_(torch.arange(8.0).view(1, 1, 8, 1).expand_as(x.v))
    assert choose(x, 2, block=2)[0, 0, 7].tolist() == [2, 3]
    out = attend(x, 2, block=2)[0]
    assert bool(out.isfinite().all())
    assert abs(float(out[0, 0, 7, 0]) - 5.5) < 1e-2


def test_one_query_one_key_gives_the_value(path):
    x = inputs(keys=1)
    for block, topk in ((1, 1), (3, 2), (100, 10**6)):
        assert torch.equal(attend(x, topk, block=block)[0], x.v)


def test_values_of_one_give_one(path):
    x = inputs(queries=9, keys=40)
    x.v.fill_(1.0)
    assert float((attend(x)[0] - 1).abs().max()) < 1e-6


def test_duplicate_blocks_follow_the_value_of_the_lower(path):
    x = inputs(queries=2, keys=21)
    x.k[:, :, 7:14] = x.k[:, :, :7]
    x.v[:, :, :7], x.v[:, :, 7:14] = 1.0, 5.0
    lists = choose(x, 2)
    assert bool((lists != 1).all())
    assert_rows(attend(x, 2)[0], lists, x)
