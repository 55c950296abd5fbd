"""The ops against the slow oracle: random shapes, positions, masks, holes, origins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.kernels import reference_tiles
from tests._util.ops import KINDS, block_masks, close, make, run, select, slow

EXACT = 1e-12


@st.composite
def problems(draw):
    """A case, its sizes and where its keys lie."""
    kind = draw(st.sampled_from(KINDS))
    groups = draw(st.sampled_from([1, 2, 3]))
    batch, keys = draw(st.integers(1, 2)), draw(st.integers(1, 24))
    case = make(
        kind,
        seed=draw(st.integers(0, 10**6)),
        batch=batch,
        heads=groups * draw(st.sampled_from([1, 2, 3, 7])),
        groups=groups,
        queries=draw(st.integers(1, 12)),
        keys=keys,
        size=draw(st.sampled_from([1, 3, 8])),
        value_size=draw(st.sampled_from([1, 4])),
    )
    where = {}
    if draw(st.booleans()):
        where["kv_len"] = draw(_vector(batch, 0, keys))
    if draw(st.booleans()):
        where["q_start"] = draw(_vector(batch, -4, keys + 3))
    if draw(st.booleans()):
        cells = st.lists(st.booleans(), min_size=batch * keys, max_size=batch * keys)
        where["key_mask"] = torch.tensor(draw(cells)).view(batch, keys)
    if draw(st.booleans()):
        where["block_origin"] = draw(_vector(batch, 0, 5))
    return kind, case, draw(st.integers(1, 9)), draw(st.integers(1, 7)), where


def _vector(batch, low, high):
    values = st.lists(st.integers(low, high), min_size=batch, max_size=batch)
    return values.map(lambda v: torch.tensor(v, dtype=torch.int32))


@given(problems(), st.sampled_from(["masked", "gathered"]), st.sampled_from([None, 1, 3000]))
@settings(max_examples=200, deadline=None)
def test_attention_equals_the_oracle(problem, form, workspace):
    kind, case, block_size, topk, where = problem
    expected = slow(kind, case, block_size, topk, **where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference_tiles, "_gather_is_less", lambda *_: form == "gathered")
        out, lse = run(kind, case, block_size, topk, workspace_bytes=workspace, **where)
    torch.testing.assert_close(out, expected.out, rtol=0, atol=1e-11)
    torch.testing.assert_close(lse, expected.lse, rtol=0, atol=1e-11)


@given(problems())
@settings(max_examples=150, deadline=None)
def test_selection_equals_the_oracle_where_a_key_is_visible(problem):
    kind, case, block_size, topk, where = problem
    expected = slow(kind, case, block_size, topk, **where)
    lists = select(kind, case, block_size, topk, **where)
    chosen = block_masks(lists, expected.chosen.shape[-1], case["q"].shape[1])
    sees = expected.chosen.any(-1)
    assert torch.equal(chosen[sees], expected.chosen[sees])


@given(problems())
@settings(max_examples=100, deadline=None)
def test_lists_are_ascending_then_minus_one_with_the_own_block_last(problem):
    kind, case, block_size, topk, where = problem
    lists = select(kind, case, block_size, topk, **where).long()
    blocks = -(-case["k"].shape[2] // block_size)
    places = topk + 1 if kind == "union" else topk
    assert lists.shape[-1] == min(places, blocks)
    valid = lists >= 0
    assert bool((valid[..., 1:] <= valid[..., :-1]).all())
    both = valid[..., 1:]
    assert bool((lists[..., 1:] > lists[..., :-1])[both].all())
    assert int(lists.max()) < blocks


@pytest.mark.parametrize("kind", KINDS)
def test_two_step_equals_fused(kind):
    from sparsify.kernels import schemas

    case = make(kind, batch=2, queries=9, keys=30)
    lists = select(kind, case, 4, 3)
    two = schemas.block_attention(case["q"], case["k"], case["v"], lists, block_size=4)
    one = run(kind, case, 4, 3)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_tells_topk_values_apart(kind):
    case = make(kind)
    assert not close(run(kind, case, 4, 2)[0], slow(kind, case, 4, 3).out, 1e-3)


def test_oracle_tells_scales_apart():
    case = make()
    assert not close(run("moba", case, 4, 3)[0], slow("moba", case, 4, 3, scale=0.5).out, 1e-3)
    assert close(run("moba", case, 4, 3, scale=0.5)[0], slow("moba", case, 4, 3, scale=0.5).out)
