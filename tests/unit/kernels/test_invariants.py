"""Statements that hold for both methods, whatever the data. Each test bears the statement's number.

Negative twins show that the statement would fail for a neighbouring operator.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.kernels import schemas
from tests._util import oracle
from tests._util.ops import (
    KINDS,
    MSA_KINDS,
    OF_KEYS,
    away_from_ties,
    block_masks,
    causal,
    close,
    cut,
    make,
    ops_for,
    run,
    select,
)

KEYS, BLOCK = 37, 8
BLOCKS = 5
NAN = float("nan")

every_kind = pytest.mark.parametrize("kind", KINDS)
msa_kinds = pytest.mark.parametrize("kind", MSA_KINDS)


def dense(case, **where):
    return oracle.dense(case["q"], case["k"], case["v"], **where).out


def out_of(kind, case, topk=3, block_size=BLOCK, **options):
    return run(kind, case, block_size, topk, **options)[0]


def chosen(kind, case, topk=3, block_size=BLOCK, **where):
    blocks = -(-case["k"].shape[2] // block_size)
    return block_masks(select(kind, case, block_size, topk, **where), blocks, case["q"].shape[1])


def masked_dense(case, keep, scale=None):
    """Attention under an explicit mask, float64."""
    group = case["q"].shape[1] // case["k"].shape[1]
    k, v = (case[n].double().repeat_interleave(group, 1) for n in ("k", "v"))
    scale = case["q"].shape[-1] ** -0.5 if scale is None else scale
    logits = (case["q"].double() @ k.mT) * scale
    return logits.masked_fill(~keep, -math.inf).softmax(-1) @ v


def keep_of(kind, case, topk=3, block_size=BLOCK):
    """Token mask of a selection."""
    keys, queries = case["k"].shape[2], case["q"].shape[2]
    tokens = chosen(kind, case, topk, block_size).repeat_interleave(block_size, -1)[..., :keys]
    return tokens & causal(queries, keys)


@every_kind
@pytest.mark.parametrize("topk", [BLOCKS, BLOCKS + 1, 1000, 10**6])
def test_i01_all_blocks_is_dense(kind, topk):
    case = make(kind, seed=1)
    assert close(out_of(kind, case, topk), dense(case))


@every_kind
def test_i01_twin_one_block_fewer_is_not_dense(kind):
    case = make(kind, seed=1)
    assert not close(out_of(kind, case, BLOCKS - 2), dense(case), 1e-4)


@every_kind
@pytest.mark.parametrize("block_size", [KEYS, KEYS + 1, 512, 10**6])
@pytest.mark.parametrize("topk", [1, 2])
def test_i02_one_block_is_dense(kind, block_size, topk):
    case = make(kind, seed=1)
    assert close(out_of(kind, case, topk, block_size), dense(case))


@pytest.mark.parametrize("kind", ["moba", "msa", "proxy"])
@given(keys=st.integers(1, 40), block_size=st.integers(1, 12))
@settings(max_examples=25, deadline=None)
def test_i03_topk_one_is_block_diagonal(kind, keys, block_size):
    case = make(kind, seed=keys, keys=keys)
    number = torch.arange(keys) // block_size
    same_block = number[:, None] == number
    out = out_of(kind, case, 1, block_size)
    assert close(out, masked_dense(case, causal(keys, keys) & same_block))
    assert close(out, dense(case)) == (keys <= block_size)


@every_kind
@given(topk=st.integers(1, 6), block_size=st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_i04_rows_whose_blocks_all_fit_are_dense(kind, topk, block_size):
    case = make(kind, seed=2)
    rows = topk * block_size
    assert close(out_of(kind, case, topk, block_size)[:, :, :rows], dense(case)[:, :, :rows])


@every_kind
def test_i04_twin_the_next_row_is_not_dense(kind):
    case = make(kind, seed=2)
    topk = 3 if kind == "union" else 2
    out, full = out_of(kind, case, 2), dense(case)
    assert not close(out[:, :, topk * BLOCK :], full[:, :, topk * BLOCK :], 1e-4)


@every_kind
@given(
    topk=st.integers(1, 7),
    block_size=st.integers(1, 9),
    keys=st.integers(1, 40),
    queries=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_i05_own_block_in_none_ahead_right_count(kind, topk, block_size, keys, queries):
    case = make(kind, seed=3, keys=keys, queries=min(keys, queries))
    picked = chosen(kind, case, topk, block_size)[0]
    own = torch.arange(keys - case["q"].shape[2], keys) // block_size
    number = torch.arange(picked.shape[-1])
    assert bool(picked.gather(-1, own[None, :, None].expand(picked.shape[0], -1, 1)).all())
    assert not bool((picked & (number > own[:, None])).any())
    count, least = picked.sum(-1), torch.minimum(own + 1, torch.tensor(topk))
    if kind == "union":
        most = torch.minimum(own + 1, torch.tensor(topk + 1))
        assert bool(((count == least) | (count == most)).all())
    else:
        assert bool((count == least).all())


@every_kind
@pytest.mark.parametrize("t", [1, 7, 8, 9, 20, 36])
@pytest.mark.parametrize("future", ["other", "nan", "inf", "-inf"])
def test_i06_the_future_changes_nothing_bit_for_bit(kind, t, future):
    case = make(kind, seed=4)
    changed = {name: x.clone() for name, x in case.items()}
    for x in changed.values():
        x[:, :, t:] = x[:, :, t:] * -3 + 1 if future == "other" else float(future)
    assert torch.equal(out_of(kind, changed)[:, :, :t], out_of(kind, case)[:, :, :t])


@every_kind
def test_i06_twin_the_past_changes_later_rows(kind):
    case = make(kind, seed=4)
    changed = dict(case, v=case["v"].clone())
    changed["v"][:, :, 0] += 1
    assert not close(out_of(kind, changed, BLOCKS), out_of(kind, case, BLOCKS), 1e-4)


@every_kind
def test_i07_gradients_never_point_into_the_future(kind):
    case = {name: x.clone().requires_grad_() for name, x in make(kind, seed=5).items()}
    out_of(kind, case)[:, :, 20].sum().backward()
    for name in ("q", "k", "v"):
        assert float(case[name].grad[:, :, 21:].abs().max()) == 0
        assert float(case[name].grad.abs().max()) > 0
    assert float(case["q"].grad[:, :, :20].abs().max()) == 0


@msa_kinds
def test_i07_hidden_inputs_of_the_index_get_nothing_from_the_future(kind):
    case = make(kind, seed=5)
    hidden = torch.linspace(-1, 1, 4 * KEYS, dtype=torch.float64).view(1, 1, KEYS, 4)
    hidden.requires_grad_()
    with_index = dict(case, iq=case["iq"] * hidden, ik=case["ik"] * hidden)
    q = case["q"].clone().requires_grad_()
    out_of(kind, dict(with_index, q=q)).square().sum().backward()
    assert hidden.grad is None or float(hidden.grad.abs().max()) == 0


@msa_kinds
def test_i08_the_choice_carries_no_gradient(kind):
    case = {name: x.clone().requires_grad_() for name, x in make(kind, seed=6).items()}
    out_of(kind, case).sum().backward()
    assert case["iq"].grad is None
    assert case["ik"].grad is None


def test_i08_moba_gradient_is_that_of_attention_given_the_choice():
    case = {name: x.clone().requires_grad_() for name, x in make(seed=6).items()}
    out_of("moba", case).square().sum().backward()
    twin = {name: x.detach().clone().requires_grad_() for name, x in case.items()}
    masked_dense(twin, keep_of("moba", twin)).square().sum().backward()
    for name in ("q", "k", "v"):
        assert close(case[name].grad, twin[name].grad)


@every_kind
@pytest.mark.parametrize("t", [1, 8, 9, 23])
def test_i09_a_prefix_is_a_prefix(kind, t):
    case = make(kind, seed=7)
    assert close(out_of(kind, cut(case, 0, t)), out_of(kind, case)[:, :, :t])


@every_kind
@pytest.mark.parametrize("t", [1, 8, 9, 16, 37])
def test_i10_decode_is_the_last_row_of_the_prefill(kind, t):
    case = make(kind, seed=8)
    assert close(out_of(kind, cut(case, t - 1, t)), out_of(kind, case)[:, :, t - 1 : t])


@every_kind
@given(borders=st.sets(st.integers(1, KEYS - 1), max_size=5))
@settings(max_examples=25, deadline=None)
def test_i11_chunked_prefill_is_the_whole(kind, borders):
    case = make(kind, seed=9)
    edges = [0, *sorted(borders), KEYS]
    parts = [out_of(kind, cut(case, a, b)) for a, b in pairwise(edges)]
    assert close(torch.cat(parts, 2), out_of(kind, case))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_i12_a_row_does_not_depend_on_its_neighbours_bit_for_bit(kind, dtype):
    one, two = (make(kind, seed=s, keys=150, size=16, dtype=dtype) for s in (1, 2))
    batch = {name: torch.cat([one[name], two[name], one[name]]) for name in one}
    alone, other = out_of(kind, one), out_of(kind, two)
    assert torch.equal(out_of(kind, batch), torch.cat([alone, other, alone]))


@every_kind
def test_i13_permuting_groups_permutes_the_output(kind):
    case = make(kind, seed=10)
    heads, groups = [2, 3, 0, 1], [1, 0]
    index = case["ik"] if case["ik"].shape[1] == 1 else case["ik"][:, groups]
    moved = {
        "q": case["q"][:, heads],
        "k": case["k"][:, groups],
        "v": case["v"][:, groups],
        "iq": case["iq"][:, groups],
        "ik": index,
    }
    assert close(out_of(kind, moved), out_of(kind, case)[:, heads])


@every_kind
def test_i14_permuting_heads_of_a_group_permutes_the_output(kind):
    case = make(kind, seed=11)
    heads = [1, 0, 2, 3]
    assert close(out_of(kind, dict(case, q=case["q"][:, heads])), out_of(kind, case)[:, heads])


@every_kind
def test_i14_twin_moving_a_head_to_another_group_does_not(kind):
    case = make(kind, seed=11)
    heads = [2, 1, 0, 3]
    moved = out_of(kind, dict(case, q=case["q"][:, heads]))
    assert not close(moved, out_of(kind, case)[:, heads], 1e-3)


@every_kind
def test_i15_who_shares_a_selection(kind):
    case = make(kind, seed=12)
    picked = chosen(kind, case)
    assert torch.equal(picked[:, 0], picked[:, 1]) == (kind != "moba")
    assert not torch.equal(picked[:, 1], picked[:, 2])


@every_kind
@pytest.mark.parametrize("ratio", [2, 3, 7, 8])
def test_i16_grouped_heads_equal_repeated_ones(kind, ratio):
    case = make(kind, seed=13, heads=2 * ratio, groups=2)
    spread = {n: case[n].repeat_interleave(ratio, 1) for n in ("k", "v", "iq")}
    index = case["ik"] if case["ik"].shape[1] == 1 else case["ik"].repeat_interleave(ratio, 1)
    assert close(out_of(kind, dict(case, **spread, ik=index)), out_of(kind, case))
    tiled = {n: case[n].repeat(1, ratio, 1, 1) for n in ("k", "v", "iq")}
    index = case["ik"] if case["ik"].shape[1] == 1 else case["ik"].repeat(1, ratio, 1, 1)
    assert not close(out_of(kind, dict(case, **tiled, ik=index)), out_of(kind, case), 1e-3)


@every_kind
def test_i16_equal_axes_are_not_mixed_up(kind):
    case = make(kind, seed=13, batch=4, heads=4, groups=4, keys=4, size=4, value_size=4)
    keep = keep_of(kind, case, 2, 2)
    assert close(out_of(kind, case, 2, 2), masked_dense(case, keep))


@every_kind
def test_i17_linear_in_values(kind):
    case = make(kind, seed=14)
    other = make(kind, seed=15)["v"]
    mixed = out_of(kind, dict(case, v=2 * case["v"] - 3 * other))
    parts = 2 * out_of(kind, case) - 3 * out_of(kind, dict(case, v=other))
    assert close(mixed, parts, 1e-11)


@every_kind
def test_i18_weights_sum_to_one_and_reveal_the_selection(kind):
    case = make(kind, seed=16)
    ones = out_of(kind, dict(case, v=torch.ones_like(case["v"])))
    assert float((ones - 1).abs().max()) <= 1e-14
    number = torch.arange(KEYS) // BLOCK
    indicator = (number[:, None] == torch.arange(BLOCKS)).double().expand(1, 2, KEYS, BLOCKS)
    weights = out_of(kind, dict(case, v=indicator))
    assert torch.equal(weights > 0, chosen(kind, case))


@every_kind
def test_i19_one_vector_added_to_all_keys_changes_nothing(kind):
    case = make(kind, seed=17)
    assert close(out_of(kind, dict(case, k=case["k"] + 0.7)), out_of(kind, case), 1e-11)


@every_kind
def test_i20_query_factor_against_scale(kind):
    case = make(kind, seed=18, dtype=torch.float32)
    scale = 6**-0.5
    doubled = out_of(kind, dict(case, q=4 * case["q"]), scale=scale / 4)
    assert torch.equal(doubled, out_of(kind, case, scale=scale))
    tripled = out_of(kind, dict(case, q=3 * case["q"]), scale=scale / 3)
    assert close(tripled, out_of(kind, case), 1e-6)
    assert not close(out_of(kind, dict(case, q=4 * case["q"])), out_of(kind, case), 1e-3)


@every_kind
def test_i21_joint_rotation_changes_nothing(kind):
    case = make(kind, seed=19)
    generator = torch.Generator().manual_seed(19)
    turn = torch.randn(6, 6, generator=generator, dtype=torch.float64)
    turn = torch.linalg.qr(turn)[0]
    turned = dict(case, q=case["q"] @ turn, k=case["k"] @ turn)
    assert close(out_of(kind, turned), out_of(kind, case), 1e-11)


def _permuted(case, order):
    return {name: x[:, :, order] if name in OF_KEYS else x for name, x in case.items()}


@every_kind
def test_i22_order_inside_a_past_block_does_not_matter(kind):
    case = make(kind, seed=20)
    order = torch.arange(KEYS)
    order[8:16] = order[8:16].flip(0)
    moved = out_of(kind, _permuted(case, order))
    assert close(moved[:, :, 16:], out_of(kind, case)[:, :, 16:])
    assert not close(moved[:, :, 8:15], out_of(kind, case)[:, :, 8:15], 1e-3)


@every_kind
def test_i23_order_of_past_blocks_does_not_matter(kind):
    case = make(kind, seed=21)
    order = torch.arange(KEYS)
    order[:8], order[8:16] = torch.arange(8, 16), torch.arange(8)
    assert close(out_of(kind, _permuted(case, order))[:, :, 16:], out_of(kind, case)[:, :, 16:])


@every_kind
def test_i24_selections_are_nested_in_topk(kind):
    case = make(kind, seed=22)
    sets = [chosen(kind, case, topk) for topk in range(1, BLOCKS + 2)]
    for fewer, more in pairwise(sets):
        assert bool((fewer <= more).all())


@every_kind
@pytest.mark.parametrize("seed", range(5))
def test_i25_inside_the_hull_of_the_selected_values(kind, seed):
    case = make(kind, seed=seed)
    keep, out = keep_of(kind, case)[..., None], out_of(kind, case)
    v = case["v"].repeat_interleave(2, 1)[:, :, None].expand(-1, -1, KEYS, -1, -1)
    low = v.masked_fill(~keep, math.inf).amin(3)
    high = v.masked_fill(~keep, -math.inf).amax(3)
    assert bool(((out >= low - 1e-12) & (out <= high + 1e-12)).all())


@every_kind
@pytest.mark.parametrize("seed", range(5))
def test_i26_error_is_bounded_by_the_lost_mass(kind, seed):
    case = make(kind, seed=seed)
    k, v = (case[n].repeat_interleave(2, 1) for n in ("k", "v"))
    logits = (case["q"] @ k.mT) * 6**-0.5
    weights = logits.masked_fill(~causal(KEYS, KEYS), -math.inf).softmax(-1)
    lost = 1 - (weights * keep_of(kind, case)).sum(-1, keepdim=True)
    span = v.amax(2, keepdim=True) - v.amin(2, keepdim=True)
    error = (out_of(kind, case) - dense(case)).abs()
    assert bool((error <= lost * span + 1e-12).all())


@every_kind
@given(lengths=st.lists(st.integers(0, 15), min_size=1, max_size=5))
@settings(max_examples=25, deadline=None)
def test_i27_packed_documents_equal_separate_runs(kind, lengths):
    total = sum(lengths)
    case = make(kind, seed=23, keys=total + 2)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    packed = out_of(kind, case, 2, 4, cu_seqlens_q=edges)
    at = edges.tolist()
    for a, b in pairwise(at):
        document = {name: x[:, :, a:b] for name, x in case.items()}
        assert close(packed[:, :, a:b], out_of(kind, document, 2, 4))
    assert float(packed[:, :, total:].abs().max()) == 0


@every_kind
def test_i27_twin_one_long_document_differs(kind):
    case = make(kind, seed=23)
    edges = torch.tensor([0, 13, 14, 37], dtype=torch.int32)
    packed = out_of(kind, case, 2, cu_seqlens_q=edges)
    assert not close(packed, out_of(kind, case, 2), 1e-3)


@every_kind
@pytest.mark.parametrize("form", ["key_mask", "kv_len"])
@pytest.mark.parametrize("garbage", [NAN, math.inf, 1e30])
def test_i28_right_padding_changes_nothing(kind, form, garbage):
    case = make(kind, seed=24)
    pads = {n: torch.full_like(x[:, :, :5], garbage) for n, x in case.items()}
    padded = {n: torch.cat([x, pads[n]], 2) for n, x in case.items()}
    real = torch.arange(KEYS + 5)[None] < KEYS
    if form == "kv_len":
        where = {"kv_len": torch.tensor([KEYS]), "q_start": torch.tensor([0])}
    else:
        where = {"key_mask": real}
    assert close(out_of(kind, padded, **where)[:, :, :KEYS], out_of(kind, case))


@every_kind
def test_i29_left_padding_changes_nothing_unless_blocks_are_anchored_to_slots(kind):
    case = make(kind, seed=25)
    padded = {n: torch.cat([torch.full_like(x[:, :, :5], NAN), x], 2) for n, x in case.items()}
    where = {"key_mask": torch.arange(KEYS + 5)[None] >= 5}
    out = out_of(kind, padded, 2, **where)
    assert close(out[:, :, 5:], out_of(kind, case, 2))
    assert float(out[:, :, :5].abs().max()) == 0
    anchored = out_of(kind, padded, 2, block_origin=torch.tensor([0]), **where)
    assert not close(anchored[:, :, 5:], out_of(kind, case, 2), 1e-3)


@every_kind
def test_i30_full_tie_takes_the_lowest_numbers(kind):
    case = {n: x if n == "v" else torch.ones_like(x) for n, x in make(kind, seed=26).items()}
    lists = select(kind, case, BLOCK, 3)
    expected = [0, 1, 2, 4] if kind == "union" else [0, 1, 4]
    assert lists[0, 0, 36].tolist() == expected


@every_kind
def test_i31_rows_without_keys_give_nothing(kind):
    case = make(kind, seed=27, queries=12, keys=7)
    out, lse = run(kind, case, 4, 2)
    assert float(out[:, :, :5].abs().max()) == 0
    assert bool((lse[:, :, :5] == -math.inf).all())
    rest = {n: x[:, :, 5:] if n in ("q", "iq") else x for n, x in case.items()}
    assert close(out[:, :, 5:], out_of(kind, rest, 2, 4))


@every_kind
def test_i31_rows_without_keys_get_no_gradient_even_with_nan_inside(kind):
    case = make(kind, seed=27, queries=12, keys=7)
    case["q"][:, :, :5] = NAN
    leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
    out = out_of(kind, leaves, 2, 4)
    grad = torch.ones_like(out)
    grad[:, :, :5] = NAN
    out.backward(grad)
    assert float(leaves["q"].grad[:, :, :5].abs().max()) == 0
    for name in ("q", "k", "v"):
        assert bool(leaves[name].grad.isfinite().all())


@every_kind
@pytest.mark.parametrize(
    ("batch", "queries", "keys", "groups"),
    [(0, 5, 5, 2), (1, 0, 5, 2), (1, 1, 1, 1), (2, 0, 0, 1), (1, 3, 0, 2), (2, 1, 6, 1)],
)
def test_i32_empty_and_tiny_shapes(kind, batch, queries, keys, groups):
    case = make(kind, batch=batch, queries=queries, keys=keys, groups=groups)
    leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
    out, lse = run(kind, leaves, 2, 2)
    assert out.shape == (batch, 4, queries, 5)
    assert lse.shape == (batch, 4, queries)
    out.sum().backward()
    assert all(leaves[n].grad.shape == leaves[n].shape for n in ("q", "k", "v"))
    lists = select(kind, case, 2, 2)
    assert lists.shape[:3] == (batch, 4 if kind == "moba" else groups, queries)
    if keys == 1:
        assert close(out, case["v"].repeat_interleave(4 // groups, 1))


@pytest.mark.parametrize("kind", ["moba", "msa", "proxy"])
@pytest.mark.parametrize("topk", [1, 2, 3, 9])
@pytest.mark.parametrize(("first", "last"), [(0, 37), (9, 30), (36, 37)])
def test_i33_pairs_follow_from_sizes_alone(kind, topk, first, last):
    case = cut(make(kind, seed=28), first, last)
    pairs = int(keep_of(kind, case, topk).sum())
    rows = range(first, last)
    per_head = sum(min(topk - 1, p // BLOCK) * BLOCK + p % BLOCK + 1 for p in rows)
    assert pairs == 4 * per_head


@pytest.mark.parametrize("topk", [1, 2, 3])
def test_i33_pairs_of_union_lie_between(topk):
    case = make("union", seed=28)
    pairs = int(keep_of("union", case, topk).sum())
    bounds = [
        4 * sum(min(k - 1, p // BLOCK) * BLOCK + p % BLOCK + 1 for p in range(KEYS))
        for k in (topk, topk + 1)
    ]
    assert bounds[0] <= pairs <= bounds[1]


@every_kind
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}])
def test_i34_gradcheck(kind, options):
    case = make(kind, seed=29, keys=19)
    assert away_from_ties(kind, case, 4, 2, margin=1e-4)
    qkv = [case[n].clone().requires_grad_() for n in ("q", "k", "v")]

    def attend(q, k, v):
        return run(kind, dict(case, q=q, k=k, v=v), 4, 2, **options)

    assert torch.autograd.gradcheck(attend, qkv, atol=1e-6, fast_mode=True)


@every_kind
def test_i35_garbage_behind_the_cache_length_is_never_read(kind):
    case = make(kind, seed=30, queries=3)
    room = {n: torch.full_like(case[n], NAN).repeat(1, 1, 2, 1) for n in OF_KEYS}
    for name in OF_KEYS:
        room[name][:, :, :KEYS] = case[name]
    out = out_of(kind, dict(case, **room), kv_len=torch.tensor([KEYS]))
    assert close(out, out_of(kind, case))


@every_kind
@pytest.mark.parametrize("queries", [1, KEYS])
def test_i35_sentinels_anywhere_in_a_list_have_no_effect(kind, queries):
    case = make(kind, seed=30, queries=queries)
    qkv = (case["q"], case["k"], case["v"])
    lists = select(kind, case, BLOCK, 3)
    expected = schemas.block_attention(*qkv, lists, block_size=BLOCK)[0]
    front = torch.cat([torch.full_like(lists[..., :2], -1), lists], -1)
    twice = torch.cat([lists, lists], -1)
    wild = torch.cat([torch.full_like(lists[..., :1], 1000), lists.flip(-1)], -1)
    for other in (front, twice, wild):
        assert close(schemas.block_attention(*qkv, other, block_size=BLOCK)[0], expected)
    nothing = schemas.block_attention(*qkv, torch.full_like(lists, -1), block_size=BLOCK)
    assert float(nothing[0].abs().max()) == 0
    assert bool((nothing[1] == -math.inf).all())


@every_kind
def test_i36_same_input_same_selection_and_checkpointing_changes_no_gradient(kind):
    case = make(kind, seed=31, dtype=torch.float32)
    assert torch.equal(select(kind, case, BLOCK, 3), select(kind, case, BLOCK, 3))
    plain = {n: x.clone().requires_grad_() for n, x in case.items()}
    again = {n: x.clone().requires_grad_() for n, x in case.items()}
    out_of(kind, plain).square().sum().backward()
    names = ops_for(kind)

    def attend(*tensors):
        return out_of(kind, dict(zip(names, tensors, strict=True)))

    tensors = [again[n] for n in names]
    out = torch.utils.checkpoint.checkpoint(attend, *tensors, use_reentrant=False)
    out.square().sum().backward()
    for name in ("q", "k", "v"):
        assert torch.equal(plain[name].grad, again[name].grad)


@every_kind
def test_i37_views_equal_copies(kind):
    case = make(kind, seed=32)
    expected = out_of(kind, case)
    turned = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in case.items()}
    assert close(out_of(kind, turned), expected)
    inside = {
        n: torch.nn.functional.pad(x, (3, 2, 1, 1))[:, :, 1:-1, 3:-2] for n, x in case.items()
    }
    assert close(out_of(kind, inside), expected)
    flat = {n: x[:, :, :1].expand_as(x) for n, x in case.items()}
    copied = {n: x.contiguous() for n, x in flat.items()}
    assert close(out_of(kind, flat), out_of(kind, copied))


@every_kind
def test_i37_gradients_of_views_equal_those_of_copies(kind):
    case = make(kind, seed=32)
    grads = []
    for turn in (False, True):
        leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
        used = {
            n: x.transpose(1, 2).contiguous().transpose(1, 2) if turn else x
            for n, x in leaves.items()
        }
        out_of(kind, used).transpose(1, 2).sum().backward()
        grads.append([leaves[n].grad for n in ("q", "k", "v")])
    for a, b in zip(*grads, strict=True):
        assert close(a, b)


@every_kind
@pytest.mark.parametrize("queries", [1, KEYS])
def test_i38_offsets_beyond_two_to_the_31_elements(kind, queries):
    case = make(kind, seed=33, queries=queries, dtype=torch.float16)
    far = dict(case)
    for name in ("k", "v", "ik"):
        heads, size = case[name].shape[1], case[name].shape[3]
        # The storage is claimed but never touched between the heads, so it takes no memory.
        storage = torch.empty(2**31 + 2 * KEYS * size, dtype=torch.float16)
        start = 0 if heads == 2 else 2**31
        view = storage.as_strided((1, heads, KEYS, size), (2**31, 2**31, size, 1), start)
        far[name] = view.copy_(case[name])
    assert torch.equal(out_of(kind, far), out_of(kind, case))
    assert torch.equal(select(kind, far, BLOCK, 3), select(kind, case, BLOCK, 3))


@msa_kinds
def test_m01_scale_of_the_index_does_not_matter(kind):
    case = make(kind, seed=34)
    expected = select(kind, case, BLOCK, 3)
    for factor in (5, 0.25, 2.0**20):
        assert torch.equal(select(kind, dict(case, iq=factor * case["iq"]), BLOCK, 3), expected)
    assert not torch.equal(select(kind, dict(case, iq=-case["iq"]), BLOCK, 3), expected)


@msa_kinds
def test_m02_with_all_blocks_the_index_has_no_influence(kind):
    case = make(kind, seed=35)
    other = dict(case, iq=-case["iq"], ik=case["ik"].flip(2))
    assert torch.equal(out_of(kind, other, BLOCKS), out_of(kind, case, BLOCKS))


@pytest.mark.parametrize("kind", ["msa", "proxy"])
def test_m03_inside_is_a_subset_of_union(kind):
    case = make(kind, seed=36)
    sizes = {"block_size": BLOCK, "topk": 3}
    lists = [
        schemas.msa_select(case["iq"], case["ik"], local=local, **sizes)
        for local in ("inside", "union")
    ]
    inside, union = (block_masks(x, BLOCKS, 2) for x in lists)
    assert bool((inside <= union).all())
    assert not torch.equal(inside, union)


@msa_kinds
def test_m04_future_index_keys_of_the_own_block_have_no_effect(kind):
    case = make(kind, seed=37)
    for value in (1e6, NAN):
        changed = dict(case, ik=case["ik"].clone())
        changed["ik"][:, :, 21:24] = value
        expected = select(kind, case, BLOCK, 3)[:, :, :21]
        assert torch.equal(select(kind, changed, BLOCK, 3)[:, :, :21], expected)
        assert torch.equal(out_of(kind, changed)[:, :, :21], out_of(kind, case)[:, :, :21])
