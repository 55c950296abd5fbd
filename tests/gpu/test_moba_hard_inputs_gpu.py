"""MoBA's kernels on empty calls, numbers that are not finite, and huge ones."""

from __future__ import annotations

import math

import pytest
import torch

from tests._util.moba_gpu import BLOCK, NEEDS_GPU, TOPK, attend, base, check, choose, layouts
from tests._util.parity import assert_lists, attended, error, expected, same_bits

NAN, INF = math.nan, math.inf

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("topk", [2, 10**6])
@pytest.mark.parametrize(
    "sizes", [(0, 5, 9), (1, 0, 9), (1, 5, 0), (1, 1, 1), (2, 1, 300), (1, 300, 3)]
)
def test_empty_and_single(sizes, topk):
    batch, queries, keys = sizes
    x = base(batch=batch, queries=queries, keys=keys)
    check(x, BLOCK, topk)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["k", "v"])
def test_future_tokens_reach_no_earlier_row(name, value):
    x = base()
    clean, lists = attend(x), choose(x)
    at = 3000
    getattr(x, name)[:, :, at:, 5] = value
    got = attend(x)
    assert same_bits([t[:, :, :at] for t in got], [t[:, :, :at] for t in clean])
    if name == "v" or value != INF:  # an infinite key may give a logit of -inf, that is no weight
        assert not bool(got[0][:, :, at:].isfinite().all(-1).any())
    assert torch.equal(choose(x)[:, :, :at], lists[:, :, :at])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_odd_tokens_reach_the_rows_that_attend_them(name):
    x = base()
    for at in (1000, 1500, 3333):
        getattr(x, name)[:, :1, at, 7] = NAN
    lists = choose(x)
    assert_lists(lists, x, BLOCK, TOPK)
    want = expected(lists, x, BLOCK)[0]
    got = attend(x)[0]
    finite = want.isfinite().all(-1)
    assert torch.equal(got.isfinite().all(-1), finite)
    assert bool(finite.any()) and not bool(finite.all())
    assert error(got[finite], want[finite]) < 2e-2


def test_hidden_tokens_are_never_read():
    where = layouts()["holes"]
    x = base(batch=2, queries=650)
    clean = attend(x, **where)
    hidden = ~where["key_mask"][0]
    x.k[:, :, hidden], x.v[:, :, hidden] = NAN, INF
    assert same_bits(attend(x, **where), clean)


@pytest.mark.parametrize("queries", [700, 5])
def test_rows_whose_logits_are_all_minus_infinity_give_nothing(queries):
    x = base(queries=queries)
    x.q.abs_()
    x.k[..., 0] = -INF
    x.v[:, :, 4000:4020] = NAN
    out, lse = attend(x)
    assert not bool(out.any()) and bool((lse == -INF).all())


@pytest.mark.parametrize("size", [1e3, 1e6, 1e8, 1e15, 1e30])
@pytest.mark.parametrize("queries", [700, 5])
def test_huge_equal_logits_split_by_count(size, queries):
    """Every attended key has the largest logit, so the output is the mean of the values."""
    x = base(queries=queries)
    x.q.fill_(size), x.k.fill_(1.0)
    x.v.fill_(0.0)[:, :, ::4] = 1.0
    lists = choose(x)
    keep = attended(lists, x, BLOCK)
    v = x.v.repeat_interleave(2, 1).double()
    weights = keep.double() / keep.sum(-1, keepdim=True)
    assert error(attend(x, scale=1.0)[0], weights @ v) < 1e-2
