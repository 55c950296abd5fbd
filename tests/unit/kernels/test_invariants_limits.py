"""Where sparse attention is dense or block-diagonal, and how many pairs it reads.

Each test bears the number of its statement, which holds for both methods whatever the data; twins
show that it would fail for a neighbouring operator.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests._util.invariants import (
    BLOCK,
    BLOCKS,
    KEYS,
    dense,
    every_kind,
    keep_of,
    masked_dense,
    out_of,
)
from tests._util.ops import causal, close, cut, make


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
