"""Which blocks are chosen.

Each test bears the number of its statement, which holds for both methods whatever the data; twins
show that it would fail for a neighbouring operator.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsify.kernels import schemas
from tests._util.invariants import BLOCK, BLOCKS, chosen, every_kind, msa_kinds, out_of
from tests._util.ops import block_masks, make, select


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
def test_i15_who_shares_a_selection(kind):
    case = make(kind, seed=12)
    picked = chosen(kind, case)
    assert torch.equal(picked[:, 0], picked[:, 1]) == (kind != "moba")
    assert not torch.equal(picked[:, 1], picked[:, 2])


@every_kind
def test_i24_selections_are_nested_in_topk(kind):
    case = make(kind, seed=22)
    sets = [chosen(kind, case, topk) for topk in range(1, BLOCKS + 2)]
    for fewer, more in pairwise(sets):
        assert bool((fewer <= more).all())


@every_kind
def test_i30_full_tie_takes_the_lowest_numbers(kind):
    case = {n: x if n == "v" else torch.ones_like(x) for n, x in make(kind, seed=26).items()}
    lists = select(kind, case, BLOCK, 3)
    expected = [0, 1, 2, 4] if kind == "union" else [0, 1, 4]
    assert lists[0, 0, 36].tolist() == expected


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
