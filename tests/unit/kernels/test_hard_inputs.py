"""Inputs that break careless implementations: ties, NaN, inf, huge logits, half precision."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.kernels import reference_tiles, schemas
from sparsify.kernels.ranking import best_blocks, ranked
from tests._util import oracle
from tests._util.ops import KINDS, close, cut, make, run, select, slow

NAN, INF = math.nan, math.inf
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["masked", "gathered"])
def form(request, monkeypatch):
    """Both ways in which the reference attends."""
    monkeypatch.setattr(reference_tiles, "_gather_is_less", lambda *_: request.param == "gathered")
    return request.param


def test_rank_higher_score_then_lower_block_then_nan():
    scores = torch.tensor([[[1.0, NAN, 3.0, -INF, 3.0, INF, 0.0, -0.0, 3.0]]])
    candidate = torch.ones_like(scores, dtype=torch.bool)
    assert ranked(scores, candidate)[0, 0].tolist() == [5, 2, 4, 8, 0, 6, 7, 3, 1]
    candidate[..., [5, 2]] = False
    assert ranked(scores, candidate)[0, 0, :7].tolist() == [4, 8, 0, 6, 7, 3, 1]


@given(
    scores=st.lists(st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, INF, -INF, NAN]), min_size=1),
    double=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_rank_is_the_rule_for_any_scores(scores, double):
    dtype = torch.float64 if double else torch.float32
    values = torch.tensor(scores, dtype=dtype)[None, None]
    order = ranked(values, torch.ones_like(values, dtype=torch.bool))[0, 0].tolist()
    best_first = sorted(
        range(len(scores)),
        key=lambda c: (scores[c] != scores[c], 0.0 if scores[c] != scores[c] else -scores[c], c),
    )
    assert order == best_first


def test_rank_last_bit_decides():
    one = torch.tensor(1.0)
    above = torch.nextafter(one, torch.tensor(2.0))
    scores = torch.stack([one, above, one])[None, None]
    order = ranked(scores, torch.ones_like(scores, dtype=torch.bool))
    assert order[0, 0].tolist() == [1, 0, 2]


def test_rank_minus_infinity_is_a_candidate_and_a_block_that_is_none_stays_out():
    scores = torch.tensor([[[-INF, INF, 5.0]]])
    candidate = torch.tensor([[[True, False, False]]])
    lists = best_blocks(scores, candidate, torch.tensor([2]), places=2, width=3)
    assert lists[0, 0].tolist() == [0, 2, -1]


@every_kind
def test_seventeen_equal_scores_take_the_lowest(kind):
    case = {n: x if n == "v" else torch.ones_like(x) for n, x in make(kind, keys=68).items()}
    case = {n: x.float() for n, x in case.items()}
    lists = select(kind, case, 4, 4)[0, 0, -1].tolist()
    assert lists == ([0, 1, 2, 3, 16] if kind == "union" else [0, 1, 2, 16])


@every_kind
def test_duplicate_blocks_follow_the_value_of_the_lower(kind):
    case = make(kind, keys=12, dtype=torch.float32)
    for name in ("k", "ik"):
        case[name][:, :, 4:8] = case[name][:, :, :4]
    case["v"][:, :, :4], case["v"][:, :, 4:8] = 1.0, 2.0
    topk = 1 if kind == "union" else 2
    chosen = select(kind, case, 4, topk)[0, :, -1]
    assert bool((chosen != 1).all())
    row = run(kind, cut(case, 11, 12), 4, topk)[0]
    assert bool((row < 2.0).all())


@every_kind
@pytest.mark.parametrize("block_size", [1, 3, 100])
@pytest.mark.parametrize("topk", [1, 10**6])
def test_one_query_one_key_gives_the_value(kind, block_size, topk):
    case = make(kind, keys=1, dtype=torch.float32)
    out, lse = run(kind, case, block_size, topk)
    assert torch.equal(out, case["v"].repeat_interleave(2, 1))
    logit = (case["q"] * case["k"].repeat_interleave(2, 1)).sum(-1) * 6**-0.5
    assert close(lse, logit, 1e-6)


@pytest.mark.parametrize("topk", [2, 3, 4, 5])
def test_nan_in_a_key_ranks_its_block_last(topk, form):
    case = make(keys=37)
    case["k"][:, :, 9] = NAN
    lists = select("moba", case, 8, topk)
    row = lists[0, :, 36]
    assert bool(((row == 1).any(-1) == (topk == 5)).all())
    out = run("moba", case, 8, topk)[0]
    expected = slow("moba", case, 8, topk).out
    assert torch.equal(out.isnan(), expected.isnan())
    assert bool(out[0, :, 36].isnan().all()) == (topk == 5)
    assert bool(out[0, :, 9:16].isnan().all())
    good = ~expected.isnan()
    assert float((out - expected)[good].abs().max()) < 1e-12


@every_kind
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["k", "v"])
def test_non_finite_entries_reach_the_rows_that_select_them_as_in_dense(kind, value, name, form):
    case = make(kind, seed=3, keys=30)
    case[name][:, 1, 5, 2] = value
    case[name][:, 0, 17, 0] = value
    case[name][:, 0, 3, 0] = -value
    expected = slow(kind, case, 4, 3)
    lists = select(kind, case, 4, 3)
    out = schemas.block_attention(case["q"], case["k"], case["v"], lists, block_size=4)[0]
    if name == "v":
        torch.testing.assert_close(out, expected.out, rtol=0, atol=1e-12, equal_nan=True)
    else:
        assert torch.equal(out.isnan().any(-1), expected.out.isnan().any(-1))
        good = ~expected.out.isnan()
        assert float((out - expected.out)[good].abs().max()) < 1e-12
    assert bool(out.isfinite().all(-1).any(-1).all())


@pytest.mark.parametrize("queries", [1, 30])
def test_weight_zero_times_infinity_is_nan_as_in_dense(queries, form):
    case = make(keys=30, queries=queries)
    case["k"][:, :, 29] = case["q"][:, ::2, -1] * 1e5
    case["q"], case["k"] = case["q"].float(), case["k"].float()
    case["v"] = case["v"].float()
    case["v"][:, :, 28, 1] = INF
    logits = case["q"][:, ::2, -1:] @ case["k"].mT * 6**-0.5
    weights = logits.softmax(-1)
    assert bool((weights[..., 28] == 0).all())
    out = run("moba", case, 64, 1)[0][:, ::2, -1]
    assert bool(out[..., 1].isnan().all())
    assert bool(out[..., 0].isfinite().all())


@every_kind
@pytest.mark.parametrize(("name", "at"), [("q", 13), ("k", 17), ("v", 17)])
@pytest.mark.parametrize("masked_grad", [True, False])
def test_nan_reaches_gradients_only_over_selected_pairs(kind, name, at, masked_grad):
    """As autograd gives when each row gathers its own keys."""
    case = make(kind, seed=4, keys=24)
    case[name][:, 1 if name == "q" else 0, at] = NAN
    grads = []
    for attend in (run, slow):
        leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
        out = attend(kind, leaves, 4, 2)[0]
        grad = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        out.backward(grad.masked_fill(out.isnan(), 0.0) if masked_grad else grad)
        grads.append([leaves[n].grad for n in ("q", "k", "v")])
    for got, expected in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12, equal_nan=True)
        assert bool(got.isfinite().any())


def test_infinite_gate_is_the_best_and_minus_infinite_the_worst():
    case = make(keys=37, heads=2, groups=1)
    means = torch.zeros(1, 1, 5, 6, dtype=torch.float64)
    means[0, 0, 1], means[0, 0, 2, 0], means[0, 0, 3, 0] = 1.0, INF, -INF
    case["q"] = case["q"].abs() + 0.1
    lists = select("moba", case, 8, 4, block_means=means)[0, 0, 36].tolist()
    assert lists == [0, 1, 2, 4]
    assert select("moba", case, 8, 2, block_means=means)[0, 0, 36].tolist() == [2, 4]
    assert select("moba", case, 8, 5, block_means=means)[0, 0, 36].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("queries", [1, 9])
def test_rows_whose_logits_are_all_minus_infinity_give_nothing(queries, form):
    case = make(keys=9, queries=queries)
    case["q"] = case["q"].abs()
    case["k"][..., 0] = -INF
    case["v"][:, :, 2] = NAN
    leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
    out, lse = run("moba", leaves, 4, 3)
    assert not bool(out.any())
    assert bool((lse == -INF).all())
    (out.sum() + lse.exp().sum()).backward()
    for name in ("q", "k", "v"):
        assert float(leaves[name].grad.abs().max()) == 0


@pytest.mark.parametrize("size", [1e3, 1e6, 1e7, 1e8, 1e30])
@pytest.mark.parametrize("queries", [1, 4])
def test_huge_equal_logits_split_by_count(size, queries, form):
    """Three keys against one, all with the largest logit: 3/4 and 1/4, at any size."""
    q = torch.full((1, 1, queries, 1), size)
    k = torch.ones(1, 1, 4, 1)
    v = torch.tensor([1.0, 1.0, 1.0, 0.0]).view(1, 1, 4, 1)
    out = schemas.moba_attention(q, k, v, block_size=2, topk=2, scale=1.0)[0]
    assert abs(float(out[0, 0, -1, 0]) - 0.75) < 1e-6
    leaf = v.clone().requires_grad_()
    schemas.moba_attention(q, k, leaf, block_size=2, topk=2, scale=1.0)[0][
        0, 0, -1
    ].sum().backward()
    assert float((leaf.grad - 0.25).abs().max()) < 1e-6


def test_half_precision_scores_may_leave_its_range():
    q = torch.full((1, 1, 8, 64), 100.0, dtype=torch.float16)
    k = torch.full((1, 1, 8, 64), 100.0, dtype=torch.float16)
    k[:, :, :4] = 90.0
    v = torch.arange(8.0, dtype=torch.float16).view(1, 1, 8, 1)
    lists = schemas.moba_select(q, k, block_size=2, topk=2)
    assert lists[0, 0, 7].tolist() == [2, 3]
    out = schemas.moba_attention(q, k, v, block_size=2, topk=2)[0]
    assert bool(out.isfinite().all())
    assert abs(float(out[0, 0, 7, 0]) - 5.5) < 1e-2


def test_means_are_rounded_to_the_key_dtype():
    """Two blocks whose exact means differ by less than one bfloat16 step tie, so the lower wins."""
    k = torch.ones(1, 1, 6, 1, dtype=torch.bfloat16)
    k[0, 0, 3] = 1.0078125
    q = torch.ones(1, 1, 6, 1, dtype=torch.bfloat16)
    assert schemas.moba_select(q, k, block_size=2, topk=2)[0, 0, 5].tolist() == [0, 2]
    exact = schemas.moba_select(q.double(), k.double(), block_size=2, topk=2)
    assert exact[0, 0, 5].tolist() == [1, 2]


@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 7, 12])
def test_any_head_ratio_and_block_size(ratio, block_size):
    case = make(keys=23, heads=2 * ratio, groups=2)
    assert close(run("moba", case, block_size, 3)[0], slow("moba", case, block_size, 3).out)


@every_kind
@pytest.mark.parametrize("keys", [1, 2, 3, 7, 8, 9, 15, 17])
def test_short_inputs_equal_dense(kind, keys):
    case = make(kind, keys=keys)
    expected = oracle.dense(case["q"], case["k"], case["v"]).out
    assert close(run(kind, case, 8, 3)[0], expected)


@every_kind
def test_many_more_places_than_blocks_cost_no_memory(kind):
    case = make(kind, keys=64)
    lists = select(kind, case, 1, 10**6)
    assert lists.shape[-1] == 64
    assert close(run(kind, case, 1, 10**6)[0], oracle.dense(case["q"], case["k"], case["v"]).out)


def test_result_is_finite_and_right_with_a_tiny_workspace():
    case = make(keys=50, heads=8, groups=4)
    assert close(run("moba", case, 4, 3, workspace_bytes=1)[0], run("moba", case, 4, 3)[0])


def test_lists_without_places_attend_nothing(form):
    case = make(keys=9)
    q, k, v = (case[name].requires_grad_() for name in "qkv")
    lists = torch.empty(*q.shape[:3], 0, dtype=torch.int32)
    out, lse = schemas.block_attention(q, k, v, lists, block_size=4)
    assert not bool(out.any()) and bool((lse == -INF).all())
    out.sum().backward()
    assert all(not bool(x.grad.any()) for x in (q, k, v))
